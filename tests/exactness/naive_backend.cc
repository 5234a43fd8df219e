#include "tests/exactness/naive_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/api/philox.h"

namespace attn::exactness {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Round(DType dtype, float x) {
  if (dtype == DType::kBf16) return Bf16ToFloat(FloatToBf16(x));
  if (dtype == DType::kFp16) return Fp16ToFloat(FloatToFp16(x));
  return x;
}

// One call of one pass.
class Engine {
 public:
  Engine(const AttentionProblem& p, Mutation m, const void* q, const void* k, const void* v)
      : p_(p), m_(m), q_(q), k_(k), v_(v) {}

  void ForwardRow(int64_t b, int64_t h, int64_t i, const ForwardTensors& t);
  void BackwardRow(int64_t b, int64_t h, int64_t i, const BackwardTensors& t);
  void PrepareGradients();
  void StoreGradients(const BackwardTensors& t) const;

 private:
  bool Is(Mutation m) const { return m_ == m; }
  int64_t KvHead(int64_t h) const {
    return Is(Mutation::kWrongKvHead) ? h % p_.num_kv_heads : h / p_.group();
  }
  static int64_t At(const Strides& s, int64_t b, int64_t token, int64_t head) {
    return b * s.batch + token * s.token + head * s.head;
  }
  int64_t OutRow(int64_t b, int64_t i) const {
    return p_.layout == Layout::kThd ? p_.sequences[b].q_token + i : b * p_.seqlen_q + i;
  }
  float Operand(float x) const {
    if (!Is(Mutation::kTf32)) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x1000u) & ~0x1FFFu;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  float Probability(float p) const {
    return Is(Mutation::kRoundedOperands) ? Round(p_.dtype, p) : Operand(p);
  }
  float Dot(const void* a, int64_t a_at, const void* c, int64_t c_at, int64_t n,
            DType a_dtype) const {
    float sum = 0.0f;
    for (int64_t d = 0; d < n; ++d) {
      sum +=
          Operand(LoadElement(a, a_dtype, a_at + d)) * Operand(LoadElement(c, p_.dtype, c_at + d));
    }
    return sum;
  }
  KeyRange Keys(int64_t b, int64_t i) const;
  bool Shown(int64_t b, int64_t h, int64_t i, int64_t j) const;
  void Scores(int64_t b, int64_t h, int64_t i);
  float Exp(float x) const;
  float Sink(int64_t h) const { return p_.has_sinks ? p_.sinks[h] : -kInfinity; }

  const AttentionProblem& p_;
  const Mutation m_;
  const void *q_, *k_, *v_;
  std::vector<int64_t> keys_;                // visible ones of the current row
  std::vector<float> s_, cap_slope_, keep_;  // of each
  std::vector<float> dk_, dv_, dbias_, dsink_;
};

KeyRange Engine::Keys(int64_t b, int64_t i) const {
  Sequence s = p_.sequences[b];
  if (Is(Mutation::kTopLeft)) s.off = 0;
  AttentionProblem p;
  p.window_left = p_.window_left + (Is(Mutation::kWindowLeftLong) ? 1 : 0);
  p.window_right = p_.window_right + (Is(Mutation::kSeesNextKey) ? 1 : 0) -
                   (Is(Mutation::kMissesOwnKey) ? 1 : 0);
  KeyRange range = p.VisibleKeys(s, i);
  if (Is(Mutation::kDropsLastKey)) range.end = std::min(range.end, s.len_k - 1);
  return range;
}

bool Engine::Shown(int64_t b, int64_t h, int64_t i, int64_t j) const {
  if (!Is(Mutation::kBlockTransposed) || !p_.block_mask) return p_.BlockVisible(b, h, i, j);
  const BlockMaskOption& m = *p_.block_mask;
  const int64_t block = i / m.block_q + j / m.block_k * m.rows;
  return m.data[((m.batch == 1 ? 0 : b) * m.heads + (m.heads == 1 ? 0 : h)) * m.rows * m.cols +
                block] != 0;
}

float Engine::Exp(float x) const {
  const float e = std::exp(x);
  return Is(Mutation::kCoarseExp) ? e * (1.0f + 1e-4f * std::sin(40.0f * x)) : e;
}

void Engine::Scores(int64_t b, int64_t h, int64_t i) {
  const Sequence& seq = p_.sequences[b];
  keys_.clear();
  s_.clear();
  cap_slope_.clear();
  keep_.clear();
  const KeyRange range = Keys(b, i);
  const float scale = Is(Mutation::kNoScale) ? 1.0f : p_.softmax_scale;
  for (int64_t j = range.begin; j < range.end; ++j) {
    if (!Shown(b, h, i, j)) continue;
    float bias = 0.0f;
    if (p_.bias) bias = LoadElement(p_.bias->data, p_.bias->dtype, p_.BiasRowOffset(b, h, i) + j);
    if (bias == -kInfinity) continue;
    float t = scale * Dot(q_, At(p_.q, b, seq.q_token + i, h), k_,
                          At(p_.k, b, seq.k_token + j, KvHead(h)), p_.head_dim, p_.dtype);
    float slope = 1.0f;
    if (Is(Mutation::kCapAfterBias)) t += bias;
    if (p_.softcap > 0.0f) {
      const float e = std::exp(-2.0f * std::abs(t / p_.softcap));
      float tanh = std::copysign((1.0f - e) / (1.0f + e), t);
      if (Is(Mutation::kTanhApprox)) tanh *= 1.0f + std::ldexp(std::sin(100.0f * t), -11);
      if (!Is(Mutation::kNoCapGradient)) slope = 4.0f * e / ((1.0f + e) * (1.0f + e));
      t = p_.softcap * tanh;
    }
    if (!Is(Mutation::kCapAfterBias)) t += bias;
    if (p_.alibi) {
      const float m = p_.alibi->slopes[(p_.alibi->batch == 1 ? 0 : b) * p_.num_heads + h];
      t -= m * static_cast<float>(Is(Mutation::kAlibiByKey) ? -j : std::abs(i + seq.off - j));
    }
    float keep = 1.0f;
    if (p_.dropout) {
      const int64_t lane = Is(Mutation::kDropoutByTile) ? j % 64 : j;
      const auto words = DropoutWords(p_.dropout->seed, p_.dropout->offset,
                                      static_cast<uint32_t>(b * p_.num_heads + h),
                                      static_cast<uint32_t>(i), static_cast<uint32_t>(lane / 8));
      const bool kept = DropoutKeeps(words, static_cast<uint32_t>(lane % 8), p_.dropout->threshold);
      const float rescale =
          Is(Mutation::kDropoutUnscaled) ? 1.0f : 65536.0f / p_.dropout->threshold;
      keep = kept ? rescale : 0.0f;
    }
    keys_.push_back(j);
    s_.push_back(t);
    cap_slope_.push_back(slope);
    keep_.push_back(keep);
  }
}

void Engine::ForwardRow(int64_t b, int64_t h, int64_t i, const ForwardTensors& t) {
  const Sequence& seq = p_.sequences[b];
  const int64_t out_at = (OutRow(b, i) * p_.num_heads + h) * p_.head_dim_v;
  float* lse = t.lse + p_.LseOffset(b, h) + i;
  std::vector<float> out(p_.head_dim_v, 0.0f);
  const bool valid = i < seq.len_q;
  *lse = valid ? Sink(h) : -kInfinity;
  if (valid) Scores(b, h, i);
  if (valid && !keys_.empty()) {
    const float top = std::max(Sink(h), *std::max_element(s_.begin(), s_.end()));
    double denominator = std::exp(Sink(h) - top), lse_sum = denominator;
    if (Is(Mutation::kSinkNotInLse)) lse_sum = 0.0;
    for (size_t n = 0; n < keys_.size(); ++n) {
      const float e = Exp(s_[n] - top);
      denominator += e;
      lse_sum += Is(Mutation::kDropoutInLse) ? e * keep_[n] : e;
      const int64_t at = At(p_.v, b, seq.k_token + keys_[n], KvHead(h));
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        out[d] += Probability(e) * keep_[n] * Operand(LoadElement(v_, p_.dtype, at + d));
        if (Is(Mutation::kLowAccumulator)) out[d] = Round(p_.dtype, out[d]);
      }
    }
    for (float& x : out) x = static_cast<float>(x / denominator);
    *lse = static_cast<float>(top + std::log(lse_sum));
  }
  if (Is(Mutation::kFiniteLse) && *lse == -kInfinity) *lse = -1e30f;
  if (Is(Mutation::kLseBase2)) *lse *= 1.44269504f;
  for (int64_t d = 0; d < p_.head_dim_v; ++d) StoreElement(t.out, p_.out_dtype, out_at + d, out[d]);
}

void Engine::PrepareGradients() {
  dk_.assign(DkElements(p_), 0.0f);
  dv_.assign(DvElements(p_), 0.0f);
  dbias_.assign(DbiasElements(p_), 0.0f);
  dsink_.assign(p_.num_heads, 0.0f);
}

void Engine::BackwardRow(int64_t b, int64_t h, int64_t i, const BackwardTensors& t) {
  const Sequence& seq = p_.sequences[b];
  const int64_t dq_at = (OutRow(b, i) * p_.num_heads + h) * p_.head_dim;
  std::vector<float> dq(p_.head_dim, 0.0f);
  const float lse = t.lse[p_.LseOffset(b, h) + i];
  if (i < seq.len_q || Is(Mutation::kReadsPaddedDout)) {
    Scores(b, h, std::min(i, seq.len_q - 1));
    const int64_t out_at = At(p_.bwd_out, b, seq.q_token + i, h);
    const int64_t dout_at = At(p_.bwd_dout, b, seq.q_token + i, h);
    float row_dot = 0.0f, dlse = 0.0f;
    for (int64_t d = 0; d < p_.head_dim_v; ++d) {
      row_dot += LoadElement(t.out, p_.bwd_out_dtype, out_at + d) *
                 LoadElement(t.dout, p_.bwd_dout_dtype, dout_at + d);
    }
    if (Is(Mutation::kNoRowDot)) row_dot = 0.0f;
    if (t.dlse != nullptr && !Is(Mutation::kNoDlse)) dlse = t.dlse[p_.LseOffset(b, h) + i];
    if (Sink(h) != -kInfinity) {
      const float ds = std::exp(Sink(h) - lse) * (dlse - row_dot);
      dsink_[h] += Is(Mutation::kDsinkSign) ? -ds : ds;
    }
    const int64_t kv_rows = p_.layout == Layout::kThd ? seq.k_token : b * p_.seqlen_k;
    const bool last = (h + 1) % p_.group() == 0;
    for (size_t n = 0; n < keys_.size(); ++n) {
      const int64_t j = keys_[n];
      const int64_t k_at = At(p_.k, b, seq.k_token + j, KvHead(h));
      const int64_t v_at = At(p_.v, b, seq.k_token + j, KvHead(h));
      const float dp = keep_[n] * Dot(t.dout, dout_at, v_, v_at, p_.head_dim_v, p_.bwd_dout_dtype);
      const float p = Exp(s_[n] - lse);
      const float ds = p * (dp - row_dot + dlse);
      if (p_.bias) {
        float& to = dbias_[p_.BiasRowOffset(b, h, i) + j];
        to = Is(Mutation::kDbiasNotSummed) ? ds : to + ds;
      }
      const float dt = Probability(ds * cap_slope_[n]);
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        const float q = LoadElement(q_, p_.dtype, At(p_.q, b, seq.q_token + i, h) + d);
        dq[d] += dt * Operand(LoadElement(k_, p_.dtype, k_at + d));
        float& dk = dk_[((kv_rows + j) * p_.num_kv_heads + KvHead(h)) * p_.head_dim + d];
        if (!Is(Mutation::kGroupNotSummed) || last) dk += dt * Operand(q);
      }
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        float& dv = dv_[((kv_rows + j) * p_.num_kv_heads + KvHead(h)) * p_.head_dim_v + d];
        dv += Probability(p * keep_[n]) *
              Operand(LoadElement(t.dout, p_.bwd_dout_dtype, dout_at + d));
      }
    }
  }
  for (int64_t d = 0; d < p_.head_dim; ++d) {
    StoreElement(t.dq, p_.out_dtype, dq_at + d, p_.softmax_scale * dq[d]);
  }
}

void Engine::StoreGradients(const BackwardTensors& t) const {
  for (size_t n = 0; n < dk_.size(); ++n) {
    const int64_t row = static_cast<int64_t>(n) / (p_.num_kv_heads * p_.head_dim);
    const bool padding =
        p_.layout == Layout::kBshd && row % p_.seqlen_k >= p_.sequences[row / p_.seqlen_k].len_k;
    if (padding && Is(Mutation::kPaddingUntouched)) continue;
    StoreElement(t.dk, p_.out_dtype, static_cast<int64_t>(n), p_.softmax_scale * dk_[n]);
  }
  for (size_t n = 0; n < dv_.size(); ++n) {
    StoreElement(t.dv, p_.out_dtype, static_cast<int64_t>(n), dv_[n]);
  }
  if (p_.bias) std::copy(dbias_.begin(), dbias_.end(), t.dbias);
  if (p_.has_sinks) std::copy(dsink_.begin(), dsink_.end(), t.dsink);
}

template <typename Fn>
void ForEachRow(const AttentionProblem& p, const Fn& fn) {
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      for (int64_t i = 0; i < p.sequences[b].rows_q; ++i) fn(b, h, i);
    }
  }
}

}  // namespace

absl::Status NaiveBackend::Forward(const AttentionProblem& problem, const ForwardTensors& t,
                                   const RunContext&) const {
  Engine engine(problem, mutation_, t.q, t.k, t.v);
  ForEachRow(problem, [&](int64_t b, int64_t h, int64_t i) { engine.ForwardRow(b, h, i, t); });
  if (mutation_ == Mutation::kWritesPastEnd) {
    StoreElement(t.out, problem.out_dtype, OutElements(problem), 0.0f);
  }
  return absl::OkStatus();
}

absl::Status NaiveBackend::Backward(const AttentionProblem& problem, const BackwardTensors& t,
                                    const RunContext&) const {
  Engine engine(problem, mutation_, t.q, t.k, t.v);
  engine.PrepareGradients();
  ForEachRow(problem, [&](int64_t b, int64_t h, int64_t i) { engine.BackwardRow(b, h, i, t); });
  engine.StoreGradients(t);
  return absl::OkStatus();
}

std::string Name(Mutation mutation) {
  static constexpr const char* kNames[] = {"None",           "RoundedOperands", "SeesNextKey",
                                           "MissesOwnKey",   "WindowLeftLong",  "DropsLastKey",
                                           "TopLeft",        "NoScale",         "LowAccumulator",
                                           "Tf32",           "CoarseExp",       "TanhApprox",
                                           "NoCapGradient",  "CapAfterBias",    "FiniteLse",
                                           "LseBase2",       "SinkNotInLse",    "AlibiByKey",
                                           "WrongKvHead",    "DropoutUnscaled", "DropoutInLse",
                                           "DropoutByTile",  "BlockTransposed", "NoRowDot",
                                           "NoDlse",         "ReadsPaddedDout", "GroupNotSummed",
                                           "DbiasNotSummed", "DsinkSign",       "PaddingUntouched",
                                           "WritesPastEnd"};
  return kNames[static_cast<size_t>(mutation)];
}

}  // namespace attn::exactness
