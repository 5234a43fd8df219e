#include "kernels/cpu/standard_forward.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/standard_common.h"

namespace attn::standard {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Sums over a row are taken in pieces of this many terms, and the pieces in double: a sum of 64 Ki
// terms in fp32 alone would lose more than the exactness rule grants.
constexpr int64_t kSumPiece = 1024;

// row [n]: scores in; out: probabilities times their sum, which is divided out of the row of out at
// the end: dividing here would round every probability of a flat row in the same direction.
// Returns lse.
float SoftmaxRow(int64_t n, float sink, float* row, float* inverse_sum) {
  const float max = std::max(MaxRow(row, n), sink);
  *inverse_sum = 1.0f;
  if (max == kNegInf) {  // nothing visible: exp(-inf - -inf) must not be evaluated
    std::fill_n(row, n, 0.0f);
    return kNegInf;
  }
  double sum = std::exp(static_cast<double>(sink) - max);
  for (int64_t j = 0; j < n; j += kSumPiece) {
    sum += ExpRow(max, std::min(kSumPiece, n - j), row + j);
  }
  *inverse_sum = static_cast<float>(1.0 / sum);
  return static_cast<float>(max + std::log(sum));
}

void ForwardHead(const AttentionProblem& p, const ForwardTensors& tensors, int64_t b, int64_t h,
                 const Slot& slot, StopFlag& stop, TrafficCount& count) {
  const Sequence& s = p.sequences[b];
  const int64_t n = s.len_q;
  const int64_t m = s.len_k;
  const int64_t stride = ScoreStride(m);
  const int64_t kv_head = h / p.group();
  const Rows q = QueryRows(p, tensors.q, p.dtype, p.q, b, h, p.head_dim);
  const Rows k = KeyRows(p, tensors.k, p.k, b, kv_head, p.head_dim);
  const Rows v = KeyRows(p, tensors.v, p.v, b, kv_head, p.head_dim_v);
  float* scores = slot.scores[0];

  if (!ScoreProduct(q, n, k, m, slot, scores, stop, count)) return;

  const HeadScores head(p, b, h, slot, count);
  float* lse = tensors.lse + p.LseOffset(b, h);
  const OutRows out = QueryOutRows(p, tensors.out, b, h, p.head_dim_v);
  std::array<float, kOutTile> inverse_sums;
  for (int64_t begin = 0; begin < n; begin += kOutTile) {
    const int64_t rows = std::min(kOutTile, n - begin);
    for (int64_t i = begin; i < begin + rows; ++i) {
      if (stop.ShouldStop()) return;
      float* row = scores + i * stride;
      count.Load(m * 4);
      head.Apply(i, row, nullptr, count);
      StoreValue(count, SoftmaxRow(m, head.sink(), row, &inverse_sums[i - begin]), lse + i);
      if (const float* keep = head.Keep(i)) {
        for (int64_t j = 0; j < m; ++j) row[j] *= keep[j];
      }
      count.Store(m * 4);
    }
    OutRows block = out;
    block.data = static_cast<std::byte*>(out.Row(begin));
    if (!OutProduct({scores + begin * stride, stride, 1}, rows, v, m, 1.0f, inverse_sums.data(),
                    slot, block, stop, count)) {
      return;
    }
  }
  out.Zero(n, s.rows_q, count);
  for (int64_t i = n; i < s.rows_q; ++i) StoreValue(count, kNegInf, lse + i);
}

}  // namespace

absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                     const RunContext& context, ThreadPool& pool) {
  const int64_t heads = p.batch * p.num_heads;
  const Workspace workspace(p, Pass::kForward, NumSlots(p, pool.num_workers()));
  // With fewer heads than workers a worker's number may be past the slots; a head's is not.
  const bool slot_per_head = heads <= workspace.num_slots();
  StopFlag stop(context.cancel);
  pool.ParallelFor(heads, [&](int64_t index, int worker) {
    if (stop.ShouldStop()) return;
    TrafficCount count(context.counters);
    const Slot slot =
        workspace.GetSlot(context.workspace, slot_per_head ? static_cast<int>(index) : worker);
    ForwardHead(p, tensors, index / p.num_heads, index % p.num_heads, slot, stop, count);
  });
  return stop.status();
}

}  // namespace attn::standard
