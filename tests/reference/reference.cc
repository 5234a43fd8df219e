#include "tests/reference/reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "kernels/api/mutex.h"
#include "kernels/api/philox.h"
#include "tests/reference/setup.h"

namespace attn::reference {
namespace {

const double kEps20 = std::ldexp(1.0, -20);
const double kEps22 = std::ldexp(1.0, -22);

void Fill(Tensor& t, int64_t n, double value) {
  t.value.assign(n, value);
  t.bound.assign(n, 0.0);
}

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t extent : shape) n *= extent;
  return n;
}

Result MakeResult(const Setup& s) {
  const int64_t rows_q = s.thd ? s.total_q : s.batch * s.seqlen_q;
  const int64_t rows_k = s.thd ? s.total_k : s.batch * s.seqlen_k;
  Result r;
  Fill(r.out, rows_q * s.heads * s.dim_v, 0.0);
  Fill(r.lse, rows_q * s.heads, -kInfinity);
  if (!s.backward) return r;
  Fill(r.dq, rows_q * s.heads * s.dim, 0.0);
  Fill(r.dk, rows_k * s.kv_heads * s.dim, 0.0);
  Fill(r.dv, rows_k * s.kv_heads * s.dim_v, 0.0);
  if (s.spec.bias) Fill(r.dbias, Elements(s.spec.bias->shape), 0.0);
  if (s.spec.sinks) Fill(r.dsink, s.heads, 0.0);
  return r;
}

// A matrix with its absolute values, stored by channel so that loops over tokens vectorise.
struct Columns {
  int64_t rows = 0;
  std::vector<double> x;  // [dim][rows]
  void Load(const View& view, int64_t b, int64_t token0, int64_t n, int64_t head, int64_t dim) {
    rows = n;
    x.resize(dim * n);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t d = 0; d < dim; ++d) x[d * n + j] = view.At(b, token0 + j, head, d);
    }
  }
  // sum[j] = Σ_d a[d]·x[d][j] and abs_sum[j] = Σ_d |a[d]|·|x[d][j]| for lo <= j < hi.
  void Dot(const std::vector<double>& a, int64_t lo, int64_t hi, std::vector<double>& sum,
           std::vector<double>& abs_sum) const {
    std::fill(sum.begin() + lo, sum.begin() + hi, 0.0);
    std::fill(abs_sum.begin() + lo, abs_sum.begin() + hi, 0.0);
    double* __restrict s = sum.data();
    double* __restrict t = abs_sum.data();
    for (size_t d = 0; d < a.size(); ++d) {
      const double* __restrict c = x.data() + d * rows;
      const double f = a[d];
      for (int64_t j = lo; j < hi; ++j) {
        const double product = f * c[j];
        s[j] += product;
        t[j] += std::abs(product);
      }
    }
  }
};

// Σ w·x and Σ w'·|x| into a row.
void AddScaled(double w, double w_abs, const double* x, int64_t n, double* __restrict sum,
               double* __restrict abs_sum) {
  for (int64_t d = 0; d < n; ++d) {
    sum[d] += w * x[d];
    abs_sum[d] += w_abs * std::abs(x[d]);
  }
}

// All query heads of one kv head of one sequence.
class HeadGroup {
 public:
  HeadGroup(const Setup& s, int64_t b, int64_t kv_head, Result& r, Mutex& shared)
      : s_(s), seq_(s.seqs[b]), b_(b), kv_head_(kv_head), r_(r), shared_mutex_(shared) {}

  void Run() {
    const int64_t n = seq_.lk;
    k_.Load(s_.k, b_, seq_.k0, n, kv_head_, s_.dim);
    v_.Load(s_.v, b_, seq_.k0, n, kv_head_, s_.dim_v);
    k_rows_ = Transposed(k_, s_.dim);
    v_rows_ = Transposed(v_, s_.dim_v);
    for (auto* x : {&score_, &score_abs_, &cap_slope_, &p_, &dp_, &dp_abs_, &keep_}) x->resize(n);
    visible_.resize(n);
    if (s_.backward) {
      touched_.assign(n, false);
      dk_.assign(n * s_.dim, 0.0);
      dk_bound_.assign(n * s_.dim, 0.0);
      dv_.assign(n * s_.dim_v, 0.0);
      dv_bound_.assign(n * s_.dim_v, 0.0);
    }
    const int64_t group = s_.heads / s_.kv_heads;
    for (int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h) {
      for (int64_t i = 0; i < seq_.lq; ++i) Row(h, i);
    }
    if (s_.backward) StoreKeyGradients();
  }

 private:
  static std::vector<double> Transposed(const Columns& c, int64_t dim) {
    std::vector<double> rows(dim * c.rows);
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t j = 0; j < c.rows; ++j) rows[j * dim + d] = c.x[d * c.rows + j];
    }
    return rows;
  }

  double BiasAt(int64_t h, int64_t i, int64_t j) const {
    if (!s_.spec.bias) return 0.0;
    return LoadElement(s_.data.bias, s_.spec.bias->dtype, s_.BiasIndex(b_, h, i, j));
  }

  bool Visible(int64_t h, int64_t i, int64_t j) const {
    const int64_t position = i + seq_.off;
    if (s_.left >= 0 && j < position - s_.left) return false;
    if (s_.right >= 0 && j > position + s_.right) return false;
    return s_.BlockShown(b_, h, i, j) && BiasAt(h, i, j) != -kInfinity;
  }

  void Row(int64_t h, int64_t i);
  void Scores(int64_t h, int64_t i);
  void Softmax();
  void Keep(int64_t h, int64_t i);
  void ForwardRow(int64_t h, int64_t i);
  void BackwardRow(int64_t h, int64_t i);
  void SinkGradient(int64_t h, double a, double row_dot, double dlse);
  void StoreKeyGradients();

  const Setup& s_;
  const Seq seq_;
  const int64_t b_, kv_head_;
  Result& r_;
  Mutex& shared_mutex_;  // guards dbias, dsink, visible_pairs of r_

  Columns k_, v_;                        // by channel
  std::vector<double> k_rows_, v_rows_;  // [lk][dim]
  std::vector<double> dk_, dk_bound_, dv_, dv_bound_;
  std::vector<bool> touched_;  // seen by any query

  // The current row: over keys.
  int64_t lo_ = 0, hi_ = 0;  // every visible key is in [lo_, hi_)
  std::vector<char> visible_;
  std::vector<double> score_, score_abs_, cap_slope_, p_, dp_, dp_abs_, keep_;
  std::vector<double> q_row_, out_row_;
  bool has_sink_ = false;
  double sink_ = 0.0, lse_ = 0.0;
  double c_ = 0.0;  // error of a logit
};

void HeadGroup::Row(int64_t h, int64_t i) {
  lo_ = seq_.lk;
  hi_ = 0;
  for (int64_t j = 0; j < seq_.lk; ++j) {
    visible_[j] = Visible(h, i, j);
    if (visible_[j]) {
      lo_ = std::min(lo_, j);
      hi_ = j + 1;
    }
  }
  has_sink_ = s_.spec.sinks && s_.data.sinks[h] != -kInfinity;
  sink_ = has_sink_ ? double{s_.data.sinks[h]} : -kInfinity;
  out_row_.assign(s_.dim_v, 0.0);
  lse_ = sink_;
  c_ = 0.0;
  if (lo_ < hi_) {
    Scores(h, i);
    Softmax();
    Keep(h, i);
    ForwardRow(h, i);
  }
  const int64_t lse_index = s_.LseIndex(b_, h, i);
  r_.lse.value[lse_index] = lse_;
  if (lo_ < hi_) r_.lse.bound[lse_index] = 1e-5 * std::max(1.0, std::abs(lse_)) + c_;
  if (s_.backward) BackwardRow(h, i);
  const int64_t pairs = std::count(visible_.begin(), visible_.end(), 1);
  MutexLock lock(shared_mutex_);
  r_.visible_pairs += pairs;
}

// s_ij, its absolute parts, and c_i.
void HeadGroup::Scores(int64_t h, int64_t i) {
  q_row_.resize(s_.dim);
  for (int64_t d = 0; d < s_.dim; ++d) q_row_[d] = s_.q.At(b_, seq_.q0 + i, h, d);
  k_.Dot(q_row_, lo_, hi_, score_, score_abs_);
  double largest = has_sink_ ? std::abs(sink_) : 0.0;
  for (int64_t j = lo_; j < hi_; ++j) {
    if (!visible_[j]) continue;
    double t = s_.scale * score_[j];
    cap_slope_[j] = 1.0;
    if (s_.softcap > 0.0) {
      // sech² rather than 1 - tanh²: right where the cap saturates, too.
      const double cosh = std::cosh(t / s_.softcap);
      cap_slope_[j] = 1.0 / (cosh * cosh);
      t = s_.softcap * std::tanh(t / s_.softcap);
    }
    const double bias = BiasAt(h, i, j);
    const double alibi = s_.Slope(b_, h) * std::abs(static_cast<double>(i + seq_.off - j));
    score_[j] = t + bias - alibi;
    largest =
        std::max(largest, std::abs(s_.scale) * score_abs_[j] + std::abs(bias) + std::abs(alibi));
  }
  c_ = kEps20 * largest + (s_.softcap > 0.0 ? kEps20 : 0.0);
}

void HeadGroup::Softmax() {
  double top = sink_;
  for (int64_t j = lo_; j < hi_; ++j) {
    if (visible_[j]) top = std::max(top, score_[j]);
  }
  double sum = has_sink_ ? std::exp(sink_ - top) : 0.0;
  for (int64_t j = lo_; j < hi_; ++j) {
    p_[j] = visible_[j] ? std::exp(score_[j] - top) : 0.0;
    sum += p_[j];
  }
  for (int64_t j = lo_; j < hi_; ++j) p_[j] /= sum;
  lse_ = top + std::log(sum);
}

// What dropout multiplies each probability by.
void HeadGroup::Keep(int64_t h, int64_t i) {
  std::fill(keep_.begin() + lo_, keep_.begin() + hi_, 1.0);
  if (!s_.spec.dropout) return;
  const double rescale = 65536.0 / s_.dropout_threshold;
  const uint32_t head = static_cast<uint32_t>(b_ * s_.heads + h);
  for (int64_t j = lo_; j < hi_; ++j) {
    const auto words = DropoutWords(s_.spec.dropout->seed, s_.spec.dropout->offset, head,
                                    static_cast<uint32_t>(i), static_cast<uint32_t>(j / 8));
    const bool kept = DropoutKeeps(words, static_cast<uint32_t>(j % 8), s_.dropout_threshold);
    keep_[j] = kept ? rescale : 0.0;
  }
}

void HeadGroup::ForwardRow(int64_t h, int64_t i) {
  const Units& u = s_.units;
  std::vector<double> weighted(s_.dim_v, 0.0), plain(s_.dim_v, 0.0);
  for (int64_t j = lo_; j < hi_; ++j) {
    if (!visible_[j]) continue;
    const double* v = &v_rows_[j * s_.dim_v];
    AddScaled(p_[j] * keep_[j], p_[j] * keep_[j], v, s_.dim_v, out_row_.data(), weighted.data());
    for (int64_t d = 0; d < s_.dim_v; ++d) plain[d] += std::abs(v[d]);
  }
  const int64_t base = s_.OutIndex(b_, i, h, s_.heads, s_.dim_v, true);
  for (int64_t d = 0; d < s_.dim_v; ++d) {
    r_.out.value[base + d] = out_row_[d];
    r_.out.bound[base + d] = u.u_out * std::abs(out_row_[d]) + (u.u_in + c_) * weighted[d] +
                             u.eta_out + u.eta_in * plain[d];
  }
}

void HeadGroup::BackwardRow(int64_t h, int64_t i) {
  const Units& u = s_.units;
  const bool any = lo_ < hi_;
  if (!any && !has_sink_) return;
  const double dlse = s_.data.dlse != nullptr ? s_.data.dlse[s_.LseIndex(b_, h, i)] : 0.0;
  std::vector<double> dout(s_.dim_v), dq(s_.dim, 0.0), dq_bound(s_.dim, 0.0);
  double row_dot = 0.0, a = 0.0;
  for (int64_t d = 0; d < s_.dim_v; ++d) {
    dout[d] = s_.dout.At(b_, seq_.q0 + i, h, d);
    row_dot += dout[d] * out_row_[d];
    a += std::abs(dout[d] * out_row_[d]);
  }
  if (has_sink_) SinkGradient(h, a, row_dot, dlse);
  if (!any) return;
  v_.Dot(dout, lo_, hi_, dp_, dp_abs_);
  for (int64_t j = lo_; j < hi_; ++j) {
    if (!visible_[j]) continue;
    touched_[j] = true;
    const double ds = p_[j] * (keep_[j] * dp_[j] - row_dot + dlse);
    const double w = (u.u_in + c_) * (std::abs(ds) + p_[j] * (a + std::abs(dlse))) +
                     kEps22 * p_[j] * keep_[j] * dp_abs_[j];
    if (s_.spec.bias) {
      MutexLock lock(shared_mutex_);
      r_.dbias.value[s_.BiasIndex(b_, h, i, j)] += ds;
      r_.dbias.bound[s_.BiasIndex(b_, h, i, j)] += w + u.eta_in;
    }
    const double ds_capped = ds * cap_slope_[j];
    const double w_capped = w * cap_slope_[j] + u.eta_in;
    AddScaled(ds_capped, w_capped, &k_rows_[j * s_.dim], s_.dim, dq.data(), dq_bound.data());
    AddScaled(ds_capped, w_capped, q_row_.data(), s_.dim, &dk_[j * s_.dim], &dk_bound_[j * s_.dim]);
    const double p = p_[j] * keep_[j];
    AddScaled(p, (u.u_in + c_) * p + u.eta_in, dout.data(), s_.dim_v, &dv_[j * s_.dim_v],
              &dv_bound_[j * s_.dim_v]);
  }
  const int64_t base = s_.OutIndex(b_, i, h, s_.heads, s_.dim, true);
  for (int64_t d = 0; d < s_.dim; ++d) {
    r_.dq.value[base + d] = s_.scale * dq[d];
    r_.dq.bound[base + d] =
        u.u_out * std::abs(s_.scale * dq[d]) + std::abs(s_.scale) * dq_bound[d] + u.eta_out;
  }
}

// A sink is a key whose score is the sink and whose value is 0, so its term of the bound is w_ij
// with dp = 0.
void HeadGroup::SinkGradient(int64_t h, double a, double row_dot, double dlse) {
  const double p = std::exp(sink_ - lse_);
  const double ds = p * (dlse - row_dot);
  MutexLock lock(shared_mutex_);
  r_.dsink.value[h] += ds;
  r_.dsink.bound[h] +=
      (s_.units.u_in + c_) * (std::abs(ds) + p * (a + std::abs(dlse))) + s_.units.eta_in;
}

void HeadGroup::StoreKeyGradients() {
  const Units& u = s_.units;
  for (int64_t j = 0; j < seq_.lk; ++j) {
    if (!touched_[j]) continue;
    const int64_t k_base = s_.OutIndex(b_, j, kv_head_, s_.kv_heads, s_.dim, false);
    for (int64_t d = 0; d < s_.dim; ++d) {
      const double value = s_.scale * dk_[j * s_.dim + d];
      r_.dk.value[k_base + d] = value;
      r_.dk.bound[k_base + d] =
          u.u_out * std::abs(value) + std::abs(s_.scale) * dk_bound_[j * s_.dim + d] + u.eta_out;
    }
    const int64_t v_base = s_.OutIndex(b_, j, kv_head_, s_.kv_heads, s_.dim_v, false);
    for (int64_t d = 0; d < s_.dim_v; ++d) {
      const double value = dv_[j * s_.dim_v + d];
      r_.dv.value[v_base + d] = value;
      r_.dv.bound[v_base + d] = u.u_out * std::abs(value) + dv_bound_[j * s_.dim_v + d] + u.eta_out;
    }
  }
}

// The last rounding of sums that many rows add to. FP32, whatever the inputs.
void CloseBounds(Tensor& t) {
  for (size_t i = 0; i < t.value.size(); ++i) {
    if (t.bound[i] > 0.0) t.bound[i] += kEps22 * std::abs(t.value[i]) + Underflow(DType::kFp32);
  }
}

}  // namespace

Result Compute(const AttentionSpec& spec, const Data& data, const Options& options) {
  const Setup setup = MakeSetup(spec, data, options.backward);
  Result result = MakeResult(setup);
  Mutex shared;
  std::atomic<int64_t> next{0};
  const int64_t groups = setup.batch * setup.kv_heads;
  const auto work = [&] {
    for (int64_t g = next++; g < groups; g = next++) {
      HeadGroup(setup, g / setup.kv_heads, g % setup.kv_heads, result, shared).Run();
    }
  };
  const int wanted =
      options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int t = 1; t < wanted && t < groups; ++t) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  CloseBounds(result.dbias);
  CloseBounds(result.dsink);
  return result;
}

}  // namespace attn::reference
