#include "kernels/cpu/flash_backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/flash_forward.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/stop_flag.h"

namespace attn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Items aimed at, and the most copies of dq. Fixed, not the number of threads (see BackwardPlan).
constexpr int64_t kEnoughItems = 16;
constexpr int64_t kMaxChunks = 8;

size_t Bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

// What every phase needs to find its rows.
struct Call {
  const AttentionProblem& p;
  const BackwardTensors& t;
  const BackwardPlan& plan;
  float* delta;      // [lse-shaped]: row_dot − dlse
  float* dq_copies;  // [dq_copies()][dq-shaped]
  TrafficCounters* counters;

  int64_t QueryToken(int64_t b, int64_t i) const {
    return p.layout == Layout::kBshd ? b * p.seqlen_q + i : p.sequences[b].q_token + i;
  }
  int64_t KeyToken(int64_t b, int64_t j) const {
    return p.layout == Layout::kBshd ? b * p.seqlen_k + j : p.sequences[b].k_token + j;
  }
  int64_t DqAt(int64_t b, int64_t i, int64_t h) const {
    return (QueryToken(b, i) * p.num_heads + h) * p.head_dim;
  }
  // Row `at` (DqAt) of a chunk's dq sum.
  float* DqSum(int64_t chunk, int64_t at) const {
    if (plan.direct_dq && chunk == 0) return static_cast<float*>(t.dq) + at;
    return dq_copies + (chunk - (plan.direct_dq ? 1 : 0)) * DqElements(p) + at;
  }
  // A row of q, out or dout.
  static int64_t RowAt(const Strides& strides, int64_t b, int64_t token, int64_t h) {
    return b * strides.batch + token * strides.token + h * strides.head;
  }
};

// Per tile of rows: delta, of which row_dot is left out where SumsRowDot(), and zeros in every dq
// sum and in dq's padding.
class RowsWorker {
 public:
  explicit RowsWorker(const Call& call) : call_(call), traffic_(call.counters) {}

  void Prepare(const ForwardTile& tile) {
    const AttentionProblem& p = call_.p;
    const Sequence& s = p.sequences[tile.batch];
    const bool own_row_dot = SumsRowDot(p);
    for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
      const int64_t i = r / p.group(), h = tile.kv_head * p.group() + r % p.group();
      const int64_t dq_at = call_.DqAt(tile.batch, i, h);
      if (r >= tile.row + tile.valid) {
        StoreZeros(traffic_, p.head_dim, p.out_dtype, ElementAt(call_.t.dq, p.out_dtype, dq_at));
        continue;
      }
      for (int64_t chunk = 0; chunk < call_.plan.chunks; ++chunk) {
        StoreZeros(traffic_, p.head_dim, DType::kFp32, call_.DqSum(chunk, dq_at));
      }
      float delta = own_row_dot ? 0.0f : RowDot(tile.batch, s.q_token + i, h);
      const int64_t lse_at = p.LseOffset(tile.batch, h) + i;
      if (call_.t.dlse != nullptr) delta -= LoadValue(traffic_, call_.t.dlse + lse_at);
      StoreValue(traffic_, delta, call_.delta + lse_at);
    }
  }

  // The sum of the dq copies, in order, in dq's type.
  void SumDq(const ForwardTile& tile) {
    const AttentionProblem& p = call_.p;
    alignas(64) float sum[kMaxHeadDim], part[kMaxHeadDim];
    for (int64_t r = tile.row; r < tile.row + tile.valid; ++r) {
      const int64_t i = r / p.group(), h = tile.kv_head * p.group() + r % p.group();
      const int64_t at = call_.DqAt(tile.batch, i, h);
      LoadRow(traffic_, call_.DqSum(0, at), DType::kFp32, p.head_dim, sum);
      for (int64_t chunk = 1; chunk < call_.plan.chunks; ++chunk) {
        LoadRow(traffic_, call_.DqSum(chunk, at), DType::kFp32, p.head_dim, part);
        AddScaledRow(part, 1.0f, p.head_dim, sum);
      }
      StoreRow(traffic_, sum, p.head_dim, p.out_dtype, ElementAt(call_.t.dq, p.out_dtype, at));
    }
  }

  // dsink_h = Σ exp(sink − lse)·(dlse − row_dot), summed per sequence and then over the batch.
  void SumDsink(int64_t h) {
    const AttentionProblem& p = call_.p;
    const float sink = LoadValue(traffic_, p.sinks + h);
    double total = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t first = p.LseOffset(b, h);
      double sum = 0;
      for (int64_t i = 0; i < p.sequences[b].len_q; ++i) {
        const float lse = LoadValue(traffic_, call_.t.lse + first + i);
        const float delta = LoadValue(traffic_, call_.delta + first + i);
        // Neither is −inf, or the sink has no share in this row.
        if (sink == -kInfinity || lse == -kInfinity) continue;
        sum -= std::exp(static_cast<double>(sink) - static_cast<double>(lse)) * delta;
      }
      total += sum;
    }
    StoreValue(traffic_, static_cast<float>(total), call_.t.dsink + h);
  }

 private:
  // row_dot of out and dout.
  float RowDot(int64_t b, int64_t token, int64_t h) {
    const AttentionProblem& p = call_.p;
    alignas(64) float out[kMaxHeadDim], dout[kMaxHeadDim];
    LoadRow(traffic_, ElementAt(call_.t.out, p.bwd_out_dtype, Call::RowAt(p.bwd_out, b, token, h)),
            p.bwd_out_dtype, p.head_dim_v, out);
    LoadRow(traffic_,
            ElementAt(call_.t.dout, p.bwd_dout_dtype, Call::RowAt(p.bwd_dout, b, token, h)),
            p.bwd_dout_dtype, p.head_dim_v, dout);
    return DotRow(out, dout, p.head_dim_v);
  }

  const Call& call_;
  TrafficCount traffic_;
};

// What one worker keeps on chip.
struct Buffers {
  float *k, *v, *dk, *dv;          // [kKeySpan, padded head_dim or head_dim_v]
  float *q, *dout, *dq;            // [kPanelRows, padded …]
  float *q_t, *dout_t;             // [head_dim, cols], [head_dim_v, cols]
  float *s, *ds;                   // [kKeyTile, cols]
  float *keep, *grad, *bias;       // [kKeyTile, cols]; dropout, softcap, bias only
  float* rows;                     // [kPanelRows, kKeyTile]; bias only
  float *lse2, *lse2_low, *delta;  // [kPanelRows]

  static int64_t Floats(const AttentionProblem& p) {
    const int64_t d = RoundUp(p.head_dim, kColumnStep), dv = RoundUp(p.head_dim_v, kColumnStep);
    return 2 * kKeySpan * (d + dv) + kPanelRows * (3 * d + 2 * dv) + 6 * kKeyTile * kPanelRows +
           3 * kPanelRows;
  }
  explicit Buffers(const AttentionProblem& p) {
    Scratch scratch(Floats(p));
    const int64_t d = RoundUp(p.head_dim, kColumnStep),
                  dv_width = RoundUp(p.head_dim_v, kColumnStep);
    for (float** x : {&k, &dk}) *x = scratch.Take(kKeySpan * d);
    for (float** x : {&v, &dv}) *x = scratch.Take(kKeySpan * dv_width);
    for (float** x : {&q, &dq, &q_t}) *x = scratch.Take(kPanelRows * d);
    for (float** x : {&dout, &dout_t}) *x = scratch.Take(kPanelRows * dv_width);
    for (float** x : {&s, &ds, &keep, &grad, &bias, &rows}) {
      *x = scratch.Take(kKeyTile * kPanelRows);
    }
    for (float** x : {&lse2, &lse2_low, &delta}) *x = scratch.Take(kPanelRows);
  }
};

// dk, dv, a share of dq, and dbias, span of keys by span of keys; and row_dot, where that is
// summed.
class SpanWorker {
 public:
  SpanWorker(const Call& call, StopFlag& stop)
      : call_(call),
        p_(call.p),
        stop_(stop),
        traffic_(call.counters),
        d_(RoundUp(p_.head_dim, kColumnStep)),
        dv_(RoundUp(p_.head_dim_v, kColumnStep)),
        buffers_(p_) {}

  void RunSpan(int64_t batch, int64_t kv_head, int64_t chunk, int64_t begin, int64_t end) {
    const Sequence& s = p_.sequences[batch];
    batch_ = batch;
    kv_head_ = kv_head;
    chunk_ = chunk;
    OpenSpan(begin, end);
    if (span_.begin < span_.end) {
      const KeyRange rows = RowsThatSee(p_, s, span_.begin, span_.end);
      for (int64_t row = rows.begin; row < rows.end; row += kPanelRows) {
        if (stop_.ShouldStop()) return;
        RunPanel(row, std::min(kPanelRows, s.len_q * p_.group() - row));
      }
    }
    StoreKeyGradients(begin, end);
  }

  // Adds row_dot, summed from P and dP, to delta of the tile's rows.
  void AddRowDots(const ForwardTile& tile) {
    batch_ = tile.batch;
    kv_head_ = tile.kv_head;
    for (int64_t i = 0; i < tile.panels(); ++i) {
      panel_.Init(p_, batch_, kv_head_, tile.row + i * kPanelRows, tile.panel_rows(i), traffic_);
      bool loaded = false;
      const int64_t end = panel_.keys().end;
      for (int64_t at = panel_.keys().begin / kKeySpan * kKeySpan; at < end; at += kKeySpan) {
        if (stop_.ShouldStop()) return;
        OpenSpan(at, at + kKeySpan);
        ForTiles([&](const KeyRange& range) {
          if (!keys_loaded_) LoadKeys();
          if (!loaded) LoadPanel();
          loaded = true;
          ScoreTiles(range);
          RowDotTile(range.end - range.begin, panel_.cols(), p_.dropout ? buffers_.keep : nullptr,
                     buffers_.s, buffers_.ds, buffers_.delta);
        });
      }
      for (int64_t c = 0; loaded && c < panel_.count(); ++c) {
        StoreValue(traffic_, buffers_.delta[c],
                   call_.delta + p_.LseOffset(batch_, panel_.head(c)) + panel_.query(c));
      }
    }
  }

 private:
  void OpenSpan(int64_t begin, int64_t end) {
    span_ = {begin, std::min(end, p_.sequences[batch_].len_k)};
    keys_loaded_ = false;
  }

  // Calls body(range) for each tile of the span's keys of which the panel sees something.
  template <class Body>
  void ForTiles(const Body& body) {
    const KeyRange seen = {std::max(panel_.keys().begin, span_.begin),
                           std::min(panel_.keys().end, span_.end)};
    const int64_t step = KeyTileOf(p_);
    for (int64_t base = seen.begin / step * step; base < seen.end; base += step) {
      const KeyRange range = {std::max(base, seen.begin), std::min(base + step, seen.end)};
      if (panel_.LoadBlockMask(range.begin, traffic_)) body(range);
    }
  }

  void RunPanel(int64_t row, int64_t count) {
    panel_.Init(p_, batch_, kv_head_, row, count, traffic_);
    bool loaded = false;
    ForTiles([&](const KeyRange& range) {
      if (!keys_loaded_) {
        LoadKeys();
        ClearKeyGradients();
      }
      if (!loaded) LoadPanel();
      RunTile(range, /*first=*/!loaded);
      loaded = true;
    });
    if (!loaded) return;
    for (int64_t c = 0; c < panel_.count(); ++c) {
      AccumulateRow(traffic_, buffers_.dq + c * d_, p_.softmax_scale, p_.head_dim,
                    call_.DqSum(chunk_, call_.DqAt(batch_, panel_.query(c), panel_.head(c))));
    }
  }

  // A row into a padded buffer. The padding is multiplied, so it must be 0.
  void LoadPadded(const void* tensor, DType dtype, int64_t at, int64_t n, int64_t width,
                  float* row) {
    LoadRow(traffic_, ElementAt(tensor, dtype, at), dtype, n, row);
    std::fill(row + n, row + width, 0.0f);
  }

  void LoadKeys() {
    const Sequence& s = p_.sequences[batch_];
    const int64_t rows = span_.end - span_.begin;
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t token = s.k_token + span_.begin + j;
      LoadPadded(call_.t.k, p_.dtype, Call::RowAt(p_.k, batch_, token, kv_head_), p_.head_dim, d_,
                 buffers_.k + j * d_);
      LoadPadded(call_.t.v, p_.dtype, Call::RowAt(p_.v, batch_, token, kv_head_), p_.head_dim_v,
                 dv_, buffers_.v + j * dv_);
    }
    keys_loaded_ = true;
  }

  void ClearKeyGradients() {
    const int64_t rows = span_.end - span_.begin;
    std::memset(buffers_.dk, 0, Bytes(rows * d_));
    std::memset(buffers_.dv, 0, Bytes(rows * dv_));
  }

  // q and dout, as they are and transposed; lse; delta.
  void LoadPanel() {
    const Sequence& s = p_.sequences[batch_];
    const int64_t count = panel_.count(), cols = panel_.cols();
    for (int64_t c = 0; c < cols; ++c) {
      // Past the last row, and in a row without keys, p is 2^(s − ∞) = 0.
      buffers_.lse2[c] = kInfinity;
      buffers_.lse2_low[c] = 0.0f;
      buffers_.delta[c] = 0.0f;
      if (c >= count) continue;
      const int64_t token = s.q_token + panel_.query(c), head = panel_.head(c);
      LoadPadded(call_.t.q, p_.dtype, Call::RowAt(p_.q, batch_, token, head), p_.head_dim, d_,
                 buffers_.q + c * d_);
      LoadPadded(call_.t.dout, p_.bwd_dout_dtype, Call::RowAt(p_.bwd_dout, batch_, token, head),
                 p_.head_dim_v, dv_, buffers_.dout + c * dv_);
      const int64_t lse_at = p_.LseOffset(batch_, head) + panel_.query(c);
      const float lse = LoadValue(traffic_, call_.t.lse + lse_at);
      const float delta = LoadValue(traffic_, call_.delta + lse_at);
      if (lse == -kInfinity) {
        std::memset(buffers_.dout + c * dv_, 0, Bytes(dv_));
        continue;
      }
      const double lse2 = static_cast<double>(lse) * kLog2e;
      buffers_.lse2[c] = static_cast<float>(lse2);
      buffers_.lse2_low[c] = static_cast<float>(lse2 - static_cast<double>(buffers_.lse2[c]));
      buffers_.delta[c] = delta;
    }
    std::memset(buffers_.q + count * d_, 0, Bytes((cols - count) * d_));
    std::memset(buffers_.dout + count * dv_, 0, Bytes((cols - count) * dv_));
    TransposeTile(buffers_.q, d_, cols, p_.head_dim, buffers_.q_t, cols);
    ScaleRow(QueryFactor(p_), p_.head_dim * cols, buffers_.q_t);
    TransposeTile(buffers_.dout, dv_, cols, p_.head_dim_v, buffers_.dout_t, cols);
  }

  // P and dP of one tile, and what dropout keeps.
  void ScoreTiles(const KeyRange& range) {
    const int64_t keys = range.end - range.begin, cols = panel_.cols();
    const int64_t row = range.begin - span_.begin;
    float *s = buffers_.s, *ds = buffers_.ds;
    Gemm(keys, cols, p_.head_dim, {buffers_.k + row * d_, d_, 1}, buffers_.q_t, cols, s, cols,
         GemmOutput::kStore);
    panel_.AddScoreTerms(range.begin, keys, s, p_.softcap > 0 ? buffers_.grad : nullptr,
                         buffers_.rows, buffers_.bias, traffic_);
    ProbabilityTile(keys, cols, buffers_.lse2, buffers_.lse2_low, s);
    Gemm(keys, cols, p_.head_dim_v, {buffers_.v + row * dv_, dv_, 1}, buffers_.dout_t, cols, ds,
         cols, GemmOutput::kStore);
    if (p_.dropout) panel_.Dropout(range.begin, keys, buffers_.keep);
  }

  // The five products of one tile of scores. first: the first tile of this panel in this span.
  void RunTile(const KeyRange& range, bool first) {
    const int64_t keys = range.end - range.begin, cols = panel_.cols(), count = panel_.count();
    const int64_t row = range.begin - span_.begin;
    float *s = buffers_.s, *ds = buffers_.ds;
    ScoreTiles(range);
    ScoreGradientTile(keys, cols, buffers_.delta, p_.dropout ? buffers_.keep : nullptr, s, ds);
    if (p_.bias) AddDbias(range.begin, keys);
    if (p_.softcap > 0) MultiplyTile(keys, cols, buffers_.grad, ds);
    Gemm(keys, dv_, count, {s, cols, 1}, buffers_.dout, dv_, buffers_.dv + row * dv_, dv_,
         GemmOutput::kAdd);
    Gemm(keys, d_, count, {ds, cols, 1}, buffers_.q, d_, buffers_.dk + row * d_, d_,
         GemmOutput::kAdd);
    Gemm(count, d_, keys, {ds, 1, cols}, buffers_.k + row * d_, d_, buffers_.dq, d_,
         first ? GemmOutput::kStore : GemmOutput::kAdd);
  }

  void AddDbias(int64_t j0, int64_t keys) {
    TransposeTile(buffers_.ds, panel_.cols(), keys, panel_.count(), buffers_.rows, kKeyTile);
    for (int64_t c = 0; c < panel_.count(); ++c) {
      AccumulateRow(traffic_, buffers_.rows + c * kKeyTile, 1.0f, keys,
                    call_.t.dbias + p_.BiasRowOffset(batch_, panel_.head(c), panel_.query(c)) + j0);
    }
  }

  void StoreKeyGradients(int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t at = call_.KeyToken(batch_, j) * p_.num_kv_heads + kv_head_;
      std::byte* dk = ElementAt(call_.t.dk, p_.out_dtype, at * p_.head_dim);
      std::byte* dv = ElementAt(call_.t.dv, p_.out_dtype, at * p_.head_dim_v);
      if (!keys_loaded_ || j >= span_.end) {
        StoreZeros(traffic_, p_.head_dim, p_.out_dtype, dk);
        StoreZeros(traffic_, p_.head_dim_v, p_.out_dtype, dv);
        continue;
      }
      float* dk_row = buffers_.dk + (j - begin) * d_;
      ScaleRow(p_.softmax_scale, p_.head_dim, dk_row);
      StoreRow(traffic_, dk_row, p_.head_dim, p_.out_dtype, dk);
      StoreRow(traffic_, buffers_.dv + (j - begin) * dv_, p_.head_dim_v, p_.out_dtype, dv);
    }
  }

  const Call& call_;
  const AttentionProblem& p_;
  StopFlag& stop_;
  TrafficCount traffic_;
  const int64_t d_, dv_;  // padded row widths
  Buffers buffers_;
  Panel panel_;
  int64_t batch_ = 0, kv_head_ = 0, chunk_ = 0;
  KeyRange span_;  // its valid keys
  bool keys_loaded_ = false;
};

// All spans of one chunk of one group.
void RunChunk(const Call& call, int64_t group, int64_t chunk, StopFlag& stop) {
  const AttentionProblem& p = call.p;
  const BackwardPlan& plan = call.plan;
  const int64_t head_groups = p.num_kv_heads / plan.group_heads;
  const int64_t first_batch = group / head_groups * plan.group_batches;
  const int64_t first_head = group % head_groups * plan.group_heads;
  SpanWorker worker(call, stop);
  for (int64_t b = first_batch; b < first_batch + plan.group_batches; ++b) {
    for (int64_t h = first_head; h < first_head + plan.group_heads; ++h) {
      const int64_t rows_k = p.sequences[b].rows_k;
      for (int64_t begin = chunk * kKeySpan; begin < rows_k; begin += plan.chunks * kKeySpan) {
        if (stop.ShouldStop()) return;
        worker.RunSpan(b, h, chunk, begin, std::min(begin + kKeySpan, rows_k));
      }
    }
  }
}

}  // namespace

BackwardPlan::BackwardPlan(const AttentionProblem& p) {
  if (p.bias && p.bias->heads == 1) group_heads = p.num_kv_heads;
  // With THD the rows of the bias are tokens, so sequences do not share them.
  if (p.bias && p.bias->batch == 1 && p.layout == Layout::kBshd) {
    group_batches = std::max<int64_t>(p.batch, 1);
  }
  groups = p.batch / group_batches * (p.num_kv_heads / group_heads);
  if (groups > 0 && groups < kEnoughItems) {
    chunks = std::clamp<int64_t>(
        std::min(CeilDiv(kEnoughItems, groups), CeilDiv(p.seqlen_k, kKeySpan)), 1, kMaxChunks);
  }
  direct_dq = p.out_dtype == DType::kFp32;
}

KeyRange RowsThatSee(const AttentionProblem& p, const Sequence& s, int64_t begin, int64_t end) {
  const int64_t first = std::max<int64_t>(0, begin - s.off - p.window_right);
  const int64_t last = std::min(s.len_q - 1, end - 1 - s.off + p.window_left);
  if (first > last) return {0, 0};
  const int64_t group = p.group();
  return {first * group / kPanelRows * kPanelRows, (last + 1) * group};
}

absl::Status RunFlashBackward(const AttentionProblem& p, const BackwardTensors& tensors,
                              const RunContext& context, ThreadPool* pool) {
  const BackwardPlan plan(p);
  const ForwardPlan rows(p);
  float* workspace = reinterpret_cast<float*>(context.workspace.data());
  const Call call{
      p, tensors, plan, workspace, workspace + BackwardPlan::DeltaFloats(p), context.counters};
  StopFlag stop(context.cancel);
  const auto for_rows = [&](void (RowsWorker::*work)(const ForwardTile&)) {
    pool->ParallelFor(rows.total_tiles, [&](int64_t number, int) {
      if (stop.ShouldStop()) return;
      (RowsWorker(call).*work)(rows.Tile(p, number));
    });
  };
  for_rows(&RowsWorker::Prepare);
  if (SumsRowDot(p)) {
    pool->ParallelFor(rows.total_tiles, [&](int64_t number, int) {
      if (!stop.ShouldStop()) SpanWorker(call, stop).AddRowDots(rows.Tile(p, number));
    });
  }
  if (p.bias) {
    constexpr int64_t kPiece = int64_t{1} << 18;
    const int64_t floats = DbiasElements(p);
    pool->ParallelFor(CeilDiv(floats, kPiece), [&](int64_t piece, int) {
      TrafficCount traffic(context.counters);
      StoreZeros(traffic, std::min(kPiece, floats - piece * kPiece), DType::kFp32,
                 tensors.dbias + piece * kPiece);
    });
  }
  pool->ParallelFor(plan.groups * plan.chunks, [&](int64_t item, int) {
    if (!stop.ShouldStop()) RunChunk(call, item / plan.chunks, item % plan.chunks, stop);
  });
  if (plan.dq_copies() > 0) for_rows(&RowsWorker::SumDq);
  if (p.has_sinks) {
    pool->ParallelFor(p.num_heads, [&](int64_t h, int) {
      if (!stop.ShouldStop()) RowsWorker(call).SumDsink(h);
    });
  }
  return stop.status();
}

}  // namespace attn
