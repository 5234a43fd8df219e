#include "kernels/cpu/standard_backward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/standard_common.h"

namespace attn::standard {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// One call: what its tasks share.
struct Call {
  const AttentionProblem& p;
  const BackwardTensors& tensors;
  const RunContext& context;
  const Workspace workspace;
  const bool dbias_shared;
  StopFlag stop;
};

// row_dot of out and dout.
double RowDot(const Rows& a, const Rows& b, int64_t i, float* scratch, TrafficCount& count) {
  const Tile x = LoadTile(a, i, 1, scratch, count);
  const Tile y = LoadTile(b, i, 1, scratch + a.dim, count);
  double sum = 0.0;
  for (int64_t d = 0; d < a.dim; ++d) sum += static_cast<double>(x.data[d]) * y.data[d];
  return sum;
}

// The same of p and dp [n], after dropout. An entry whose p is 0 adds nothing, whatever its dp.
double RowDot(int64_t n, const float* keep, const float* p_row, const float* dp_row) {
  constexpr int64_t kParts = 8;  // sums side by side: one waits for its own last addition
  double parts[kParts] = {};
  for (int64_t j = 0; j < n; ++j) {
    const double kept = keep == nullptr ? 1.0 : keep[j];
    const double p = p_row[j];
    parts[j % kParts] += p == 0.0 ? 0.0 : p * kept * dp_row[j];
  }
  double sum = 0.0;
  for (const double part : parts) sum += part;
  return sum;
}

// p_row [n]: probabilities in, the same as dropout leaves them out. ds_row [n]: dp in, the gradient
// of the score out. `delta` = dlse - row_dot.
void GradientRow(int64_t n, float delta, const float* keep, float* p_row, float* ds_row) {
  for (int64_t j = 0; j < n; ++j) {
    const float kept = keep == nullptr ? 1.0f : keep[j];
    const float p = p_row[j];
    const float gradient = p * (kept * ds_row[j] + delta);
    // A hidden entry is exactly 0, whatever its dp.
    ds_row[j] = p == 0.0f ? 0.0f : gradient;
    p_row[j] = p * kept;
  }
}

// The rows of one head: S and dP in, P and dS out; dbias where this head has it to itself. Returns
// the head's share of dsink.
double RowPass(Call& call, int64_t b, int64_t h, const Slot& slot, TrafficCount& count) {
  const AttentionProblem& p = call.p;
  const Sequence& s = p.sequences[b];
  const int64_t m = s.len_k;
  const int64_t stride = ScoreStride(m);
  const Rows out = QueryRows(p, call.tensors.out, p.bwd_out_dtype, p.bwd_out, b, h, p.head_dim_v);
  const Rows dout =
      QueryRows(p, call.tensors.dout, p.bwd_dout_dtype, p.bwd_dout, b, h, p.head_dim_v);
  const HeadScores head(p, b, h, slot, count);
  const int64_t lse_at = p.LseOffset(b, h);
  const bool own_dbias = p.bias && !call.dbias_shared;
  const bool own_row_dot = SumsRowDot(p);
  float* cap_row = p.softcap > 0 ? slot.cap_row : nullptr;
  double dsink = 0.0;
  for (int64_t i = 0; i < s.len_q; ++i) {
    if (call.stop.ShouldStop()) return 0.0;
    float* p_row = slot.scores[0] + i * stride;
    float* ds_row = slot.scores[1] + i * stride;
    const float lse = LoadValue(count, call.tensors.lse + lse_at + i);
    double delta =
        call.tensors.dlse == nullptr ? 0.0 : LoadValue(count, call.tensors.dlse + lse_at + i);
    if (!own_row_dot) delta -= RowDot(dout, out, i, slot.left, count);
    count.Load(2 * m * 4);
    head.Apply(i, p_row, cap_row, count);
    if (lse == kNegInf) {  // no visible key: exp(s - lse) must not be evaluated
      std::fill_n(p_row, m, 0.0f);
      std::fill_n(ds_row, m, 0.0f);
    } else {
      ExpRow(lse, m, p_row);
      const float* keep = head.Keep(i);
      if (own_row_dot) delta -= RowDot(m, keep, p_row, ds_row);
      GradientRow(m, static_cast<float>(delta), keep, p_row, ds_row);
      dsink += std::exp(static_cast<double>(head.sink()) - lse) * delta;
    }
    if (own_dbias) {
      float* dbias = call.tensors.dbias + p.BiasRowOffset(b, h, i);
      std::copy_n(ds_row, m, dbias);
      std::fill_n(dbias + m, p.bias->cols - m, 0.0f);
      count.Store(p.bias->cols * 4);
    }
    if (slot.scores[2] != nullptr) {
      std::copy_n(ds_row, m, slot.scores[2] + i * stride);
      count.Store(m * 4);
    }
    if (cap_row != nullptr && lse != kNegInf) {
      for (int64_t j = 0; j < m; ++j) ds_row[j] *= ds_row[j] == 0.0f ? 0.0f : cap_row[j];
    }
    count.Store(2 * m * 4);
  }
  return dsink;
}

void BackwardHead(Call& call, int64_t b, int64_t h, const Slot& slot, TrafficCount& count) {
  const AttentionProblem& p = call.p;
  const BackwardTensors& t = call.tensors;
  const Sequence& s = p.sequences[b];
  const int64_t n = s.len_q;
  const int64_t m = s.len_k;
  const int64_t stride = ScoreStride(m);
  const int64_t kv_head = h / p.group();
  const Rows q = QueryRows(p, t.q, p.dtype, p.q, b, h, p.head_dim);
  const Rows k = KeyRows(p, t.k, p.k, b, kv_head, p.head_dim);
  const Rows v = KeyRows(p, t.v, p.v, b, kv_head, p.head_dim_v);
  const Rows dout = QueryRows(p, t.dout, p.bwd_dout_dtype, p.bwd_dout, b, h, p.head_dim_v);
  if (!ScoreProduct(q, n, k, m, slot, slot.scores[0], call.stop, count)) return;
  if (!ScoreProduct(dout, n, v, m, slot, slot.scores[1], call.stop, count)) return;
  const double dsink = RowPass(call, b, h, slot, count);
  if (p.has_sinks) {
    StoreValue(count, dsink,
               call.workspace.DsinkParts(call.context.workspace) + b * p.num_heads + h);
  }

  // One query head per kv head: straight into dk and dv. Several: into a part for each.
  const bool parts = p.group() > 1;
  const DType kv_dtype = parts ? DType::kFp32 : p.out_dtype;
  const int64_t kv_heads = parts ? p.num_heads : p.num_kv_heads;
  void* dk_data = parts ? call.workspace.DkParts(call.context.workspace) : t.dk;
  void* dv_data = parts ? call.workspace.DvParts(call.context.workspace) : t.dv;
  const OutRows dk = KeyOutRows(p, dk_data, kv_dtype, b, h, kv_heads, p.head_dim);
  const OutRows dv = KeyOutRows(p, dv_data, kv_dtype, b, h, kv_heads, p.head_dim_v);
  const OutRows dq = QueryOutRows(p, t.dq, b, h, p.head_dim);
  const GemmLeft probabilities_t = {slot.scores[0], 1, stride};
  const GemmLeft ds = {slot.scores[1], stride, 1};
  const GemmLeft ds_t = {slot.scores[1], 1, stride};
  const float scale = p.softmax_scale;
  if (!OutProduct(probabilities_t, m, dout, n, 1.0f, nullptr, slot, dv, call.stop, count)) return;
  if (!OutProduct(ds_t, m, q, n, scale, nullptr, slot, dk, call.stop, count)) return;
  if (!OutProduct(ds, n, k, m, scale, nullptr, slot, dq, call.stop, count)) return;
  dq.Zero(n, s.rows_q, count);
  if (!parts) {
    dk.Zero(m, s.rows_k, count);
    dv.Zero(m, s.rows_k, count);
  }
}

// dbias of the heads [first, first + heads), whose ds lie in slots 0 … heads - 1, is added, row by
// row: one thread has row i of every sequence, and takes the heads in order, so that the sum is the
// same on any number of threads.
void AddSharedDbias(Call& call, ThreadPool& pool, int64_t first, int64_t heads) {
  const AttentionProblem& p = call.p;
  const int matrix = p.softcap > 0 ? 2 : 1;
  pool.ParallelFor(p.seqlen_q, [&](int64_t i, int) {
    if (call.stop.ShouldStop()) return;
    TrafficCount count(call.context.counters);
    for (int64_t index = 0; index < heads; ++index) {
      const int64_t b = (first + index) / p.num_heads;
      const int64_t h = (first + index) % p.num_heads;
      const Sequence& s = p.sequences[b];
      if (i >= s.len_q) continue;
      const Slot slot = call.workspace.GetSlot(call.context.workspace, static_cast<int>(index));
      AccumulateRow(count, slot.scores[matrix] + i * ScoreStride(s.len_k), 1.0f, s.len_k,
                    call.tensors.dbias + p.BiasRowOffset(b, h, i));
      count.Load(s.len_k * 4);  // the row of ds, which lies in memory too
    }
  });
}

// Every head; with a shared dbias in rounds of one head per slot, with the sum after each round.
void AllHeads(Call& call, ThreadPool& pool) {
  const AttentionProblem& p = call.p;
  const int64_t heads = p.batch * p.num_heads;
  const int slots = call.workspace.num_slots();
  const int64_t round = call.dbias_shared ? slots : std::max<int64_t>(heads, 1);
  for (int64_t first = 0; first < heads; first += round) {
    const int64_t count = std::min(round, heads - first);
    const bool slot_per_head = count <= slots;
    pool.ParallelFor(count, [&](int64_t index, int worker) {
      if (call.stop.ShouldStop()) return;
      TrafficCount traffic(call.context.counters);
      const Slot slot = call.workspace.GetSlot(call.context.workspace,
                                               slot_per_head ? static_cast<int>(index) : worker);
      BackwardHead(call, (first + index) / p.num_heads, (first + index) % p.num_heads, slot,
                   traffic);
    });
    if (call.dbias_shared) AddSharedDbias(call, pool, first, count);
    if (call.stop.ShouldStop()) return;
  }
}

// Adds `group` parts of each row, in order; `parts` [total_k, num_heads, dim].
void SumGroupRows(const AttentionProblem& p, const float* parts, const OutRows& out, int64_t b,
                  int64_t kv_head, float* sum, StopFlag& stop, TrafficCount& count) {
  const Sequence& s = p.sequences[b];
  const int64_t token = p.layout == Layout::kBshd ? b * p.seqlen_k : s.k_token;
  for (int64_t j = 0; j < s.len_k; ++j) {
    if (j % kSumTile == 0 && stop.ShouldStop()) return;
    const float* row = parts + ((token + j) * p.num_heads + kv_head * p.group()) * out.dim;
    std::copy_n(row, out.dim, sum);
    for (int64_t g = 1; g < p.group(); ++g) AddScaledRow(row + g * out.dim, 1.0f, out.dim, sum);
    count.Load(p.group() * out.dim * 4);
    StoreRow(count, sum, out.dim, out.dtype, out.Row(j));
  }
  out.Zero(s.len_k, s.rows_k, count);
}

void SumGroups(Call& call, ThreadPool& pool) {
  const AttentionProblem& p = call.p;
  pool.ParallelFor(p.batch * p.num_kv_heads, [&](int64_t index, int) {
    if (call.stop.ShouldStop()) return;
    TrafficCount count(call.context.counters);
    float sum[kMaxHeadDim];
    const int64_t b = index / p.num_kv_heads;
    const int64_t kv_head = index % p.num_kv_heads;
    const OutRows dk =
        KeyOutRows(p, call.tensors.dk, p.out_dtype, b, kv_head, p.num_kv_heads, p.head_dim);
    const OutRows dv =
        KeyOutRows(p, call.tensors.dv, p.out_dtype, b, kv_head, p.num_kv_heads, p.head_dim_v);
    const std::span<std::byte> memory = call.context.workspace;
    SumGroupRows(p, call.workspace.DkParts(memory), dk, b, kv_head, sum, call.stop, count);
    SumGroupRows(p, call.workspace.DvParts(memory), dv, b, kv_head, sum, call.stop, count);
  });
}

void SumDsink(Call& call, TrafficCount& count) {
  const AttentionProblem& p = call.p;
  const double* parts = call.workspace.DsinkParts(call.context.workspace);
  for (int64_t h = 0; h < p.num_heads; ++h) {
    double sum = 0.0;
    for (int64_t b = 0; b < p.batch; ++b) sum += LoadValue(count, parts + b * p.num_heads + h);
    StoreValue(count, static_cast<float>(sum), call.tensors.dsink + h);
  }
}

// Rows of dbias beyond the valid queries, where heads write their own rows.
void ZeroDbiasPadding(Call& call, TrafficCount& count) {
  const AttentionProblem& p = call.p;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    if (s.len_q == s.rows_q || p.bias->cols == 0) continue;
    for (int64_t h = 0; h < p.num_heads; ++h) {
      StoreZeros(count, (s.rows_q - s.len_q) * p.bias->cols, DType::kFp32,
                 call.tensors.dbias + p.BiasRowOffset(b, h, s.len_q));
    }
  }
}

}  // namespace

absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                      const RunContext& context, ThreadPool& pool) {
  Call call{p,
            tensors,
            context,
            Workspace(p, Pass::kBackward, NumSlots(p, pool.num_workers())),
            DbiasIsShared(p),
            StopFlag(context.cancel)};
  TrafficCount count(context.counters);
  if (DbiasElements(p) > 0 && call.dbias_shared) {
    StoreZeros(count, DbiasElements(p), DType::kFp32, tensors.dbias);
  }
  AllHeads(call, pool);
  if (!call.stop.ShouldStop()) {
    if (p.bias && !call.dbias_shared) ZeroDbiasPadding(call, count);
    if (p.group() > 1) SumGroups(call, pool);
    if (p.has_sinks) SumDsink(call, count);
  }
  return call.stop.status();
}

}  // namespace attn::standard
