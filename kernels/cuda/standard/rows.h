// The kernels between the products of the standard CUDA path: softmax forward and backward over
// rows of materialised scores, and the small sums around them.
#ifndef ATTN_KERNELS_CUDA_STANDARD_ROWS_H_
#define ATTN_KERNELS_CUDA_STANDARD_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/api/dtype.h"
#include "kernels/cuda/common/params.h"

namespace attn::cuda::standard {

// Rows of a chunk. Matrix z of a score buffer is (sequence, kv head, head of its group), the last
// innermost; matrices lie rows * ld elements apart.
struct RowsParams {
  // fp32 in, [matrices, rows, ld]: S; P, in the input type, overwrites each row from its start.
  // Forward's P is relative to the largest score of the row, which is so exactly 1, and misses its
  // factor: dividing here would round every probability of a flat row in the same direction.
  float* scores;
  float* factors;  // forward: written, [matrices, rows]
  // Backward: dP; dS overwrites it alike.
  float* gradients;
  // Backward: ds before the softcap's slope, fp32; null: not kept.
  float* kept;
  int64_t ld;
  int32_t rows, keys, off;  // of every sequence of the chunk
  int32_t batch0, batch, kv0, kv_heads, group0, group_heads;
  int32_t group, num_heads;
  bool split;  // forward: what rounding P leaves over goes to the second half of the row
  int64_t q_token0, q_token_step;    // first query row of the first sequence, and to the next
  int64_t lse0, lse_step, lse_head;  // the same in an lse-shaped buffer, and from head to head
  float* lse;                        // forward: written; backward: read
  const float* delta;                // backward: dlse - row_dot, lse-shaped
  // Backward: row_dot is summed from P and dP here instead, and dlse (null: 0) added. See
  // SumsRowDot().
  bool own_row_dot;
  const float* dlse;
  float* dbias;  // backward, where each entry belongs to one head; else null
  ScoreParams score;
};

// lse, factors, and P with dropout applied, in place of S. dtype: of P.
cudaError_t LaunchSoftmax(const RowsParams& p, DType dtype, cudaStream_t stream);
// P with dropout applied in place of S, dS in place of dP.
cudaError_t LaunchSoftmaxGradient(const RowsParams& p, DType dtype, cudaStream_t stream);

// delta = dlse - rowsum(dout * out) of every valid row of every head of a run of sequences.
struct DeltaParams {
  const void* out;
  const void* dout;
  DType out_dtype, dout_dtype;
  // Elements: to row 0 of head 0 of the first sequence, then from sequence to sequence, …
  int64_t out0, out_step, out_token, out_head;
  int64_t dout0, dout_step, dout_token, dout_head;
  const float* dlse;  // null: 0
  const float* lse;
  float* delta;
  int64_t lse0, lse_step, lse_head;
  int32_t rows, head_dim_v, batch, num_heads;
  // dsink: parts [batch, num_heads] of the run; null where there is no sink.
  const float* sinks;
  double* parts;
};
cudaError_t LaunchDelta(const DeltaParams& p, cudaStream_t stream);
// parts = sum over rows of exp(sink - lse) * delta.
cudaError_t LaunchSinkParts(const DeltaParams& p, cudaStream_t stream);
// dsink[h] = sum over b of parts[b, h], in order.
cudaError_t LaunchSinkSum(const double* parts, int64_t batch, int64_t num_heads, float* dsink,
                          cudaStream_t stream);

// dbias += ds, summed over the sequences and heads of a chunk that share an entry, in order.
struct BiasGradientParams {
  const void* ds;  // [matrices, rows, ld], ld in elements of dtype
  DType dtype;
  int64_t ld;
  bool sum_batch, sum_heads;
  float* dbias;
  RowsParams rows;
};
cudaError_t LaunchBiasGradient(const BiasGradientParams& p, cudaStream_t stream);

// to = from, times a factor per row, rounded to dtype: [batch, heads, rows, dim]; strides in
// elements, the last axis contiguous. factors: [batch, heads, rows]; null: 1. In place where to ==
// from.
struct RoundParams {
  const float* from;
  const float* factors;
  void* to;
  DType dtype;
  int32_t batch, heads, rows, dim;
  int64_t from_batch, from_head, from_row;
  int64_t to_batch, to_head, to_row;
};
cudaError_t LaunchRound(const RoundParams& p, cudaStream_t stream);

cudaError_t LaunchFill(float* to, int64_t n, float value, cudaStream_t stream);

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_ROWS_H_
