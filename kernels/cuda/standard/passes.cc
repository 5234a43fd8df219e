#include "kernels/cuda/standard/passes.h"

#include <cstddef>

namespace attn::cuda::standard {
namespace {

Operand Located(const void* data, DType dtype, int64_t offset, int64_t ld, bool transposed) {
  Operand operand;
  operand.data = static_cast<const std::byte*>(data) + offset * SizeOf(dtype);
  operand.dtype = dtype;
  operand.transposed = transposed;
  operand.ld = ld;
  return operand;
}

// A sequence's place along the batch and token axes.
int64_t QueryPlace(const AttentionProblem& p, int64_t b, const TensorStrides& s) {
  return b * s.batch + p.sequences[b].q_token * s.token;
}
int64_t KeyPlace(const AttentionProblem& p, int64_t b, const TensorStrides& s) {
  return b * s.batch + p.sequences[b].k_token * s.token;
}

}  // namespace

RunOffsets QueryOffsets(const AttentionProblem& p, const SequenceRun& run,
                        const TensorStrides& strides) {
  const int64_t first = QueryPlace(p, run.first, strides);
  return {first, run.count > 1 ? QueryPlace(p, run.first + 1, strides) - first : 0};
}

RunOffsets KeyOffsets(const AttentionProblem& p, const SequenceRun& run,
                      const TensorStrides& strides) {
  const int64_t first = KeyPlace(p, run.first, strides);
  return {first, run.count > 1 ? KeyPlace(p, run.first + 1, strides) - first : 0};
}

RunOffsets LseOffsets(const AttentionProblem& p, const SequenceRun& run) {
  const int64_t first = p.LseOffset(run.first, 0);
  return {first, run.count > 1 ? p.LseOffset(run.first + 1, 0) - first : 0};
}

Operand QueryOperand(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                     const void* data, DType dtype, const TensorStrides& strides, bool transposed) {
  const RunOffsets at = QueryOffsets(p, run, strides);
  const int64_t head = chunk.kv0 * p.group() + chunk.group0;
  const int64_t offset = at.first + (chunk.batch0 - run.first) * at.step + head * strides.head;
  Operand operand = Located(data, dtype, offset, strides.token, transposed);
  operand.batch[0] = at.step;
  operand.batch[1] = p.group() * strides.head;
  operand.batch[2] = strides.head;
  return operand;
}

Operand KeyOperand(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                   const void* data, DType dtype, const TensorStrides& strides, bool transposed) {
  const RunOffsets at = KeyOffsets(p, run, strides);
  const int64_t offset = at.first + (chunk.batch0 - run.first) * at.step + chunk.kv0 * strides.head;
  Operand operand = Located(data, dtype, offset, strides.token, transposed);
  operand.batch[0] = at.step;
  operand.batch[1] = strides.head;
  return operand;
}

Operand ScoreOperand(const AttentionProblem& p, const Chunk& chunk, const float* scores,
                     DType dtype, bool transposed) {
  const Sequence& s = p.sequences[chunk.batch0];
  const int64_t ld = ScoreStride(s.len_k) * (dtype == DType::kFp32 ? 1 : 2);
  Operand operand = Located(scores, dtype, 0, ld, transposed);
  operand.batch[2] = s.len_q * ld;
  operand.batch[1] = chunk.group_heads * operand.batch[2];
  operand.batch[0] = chunk.kv_heads * operand.batch[1];
  return operand;
}

void SetTarget(const Operand& to, Product* product) {
  product->c = const_cast<void*>(to.data);
  product->c_dtype = to.dtype;
  product->ldc = to.ld;
  for (int i = 0; i < kBatchAxes; ++i) product->c_batch[i] = to.batch[i];
}

Product ChunkProduct(const Chunk& chunk, int64_t m, int64_t n, int64_t k) {
  Product product;
  product.m = m;
  product.n = n;
  product.k = k;
  product.extents[0] = chunk.batch;
  product.extents[1] = chunk.kv_heads;
  product.extents[2] = chunk.group_heads;
  return product;
}

absl::Status ScoreProduct(const Call& call, const Chunk& chunk, const Operand& rows,
                          const Operand& keys, int64_t dim, float* scores) {
  const Sequence& s = call.p.sequences[chunk.batch0];
  Product product = ChunkProduct(chunk, s.len_q, s.len_k, dim);
  product.scores = true;
  product.a = rows;
  product.b = keys;
  SetTarget(ScoreOperand(call.p, chunk, scores, DType::kFp32, false), &product);
  return Run(product, call.blas, call.launch.stream);
}

RowsParams MakeRowsParams(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                          float* scores) {
  const Sequence& s = p.sequences[chunk.batch0];
  const RunOffsets lse = LseOffsets(p, run);
  RowsParams r = {};
  r.scores = scores;
  r.ld = ScoreStride(s.len_k);
  r.rows = static_cast<int32_t>(s.len_q);
  r.keys = static_cast<int32_t>(s.len_k);
  r.off = static_cast<int32_t>(s.off);
  r.batch0 = static_cast<int32_t>(chunk.batch0);
  r.batch = static_cast<int32_t>(chunk.batch);
  r.kv0 = static_cast<int32_t>(chunk.kv0);
  r.kv_heads = static_cast<int32_t>(chunk.kv_heads);
  r.group0 = static_cast<int32_t>(chunk.group0);
  r.group_heads = static_cast<int32_t>(chunk.group_heads);
  r.group = static_cast<int32_t>(p.group());
  r.num_heads = static_cast<int32_t>(p.num_heads);
  r.q_token0 = s.q_token;
  r.q_token_step = p.layout == Layout::kThd ? s.rows_q : 0;
  r.lse0 = lse.first + (chunk.batch0 - run.first) * lse.step;
  r.lse_step = lse.step;
  r.lse_head = LseHeadStride(p);
  r.score = MakeScoreParams(p);
  return r;
}

}  // namespace attn::cuda::standard
