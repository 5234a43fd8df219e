// What flash_sm80's kernels are told, beside what every CUDA kernel is told.
#ifndef ATTN_KERNELS_CUDA_SM80_KERNEL_PARAMS_H_
#define ATTN_KERNELS_CUDA_SM80_KERNEL_PARAMS_H_

#include "kernels/cuda/common/params.h"

namespace attn::cuda::sm80 {

inline constexpr int kLockstepHeads = 2;         // kv heads that Decode reads in step
inline constexpr int kPrepareRowsPerBlock = 32;  // of the padded row space

// What Forward and Backward are compiled for. kPlain: the softmax scale folds into the exponent's
// multiply-add. kDropout: dropout too. kOptions: softcap, ALiBi, bias, or a scale that is not
// positive, with or without dropout. Lengths, windows, block masks and sinks are in all.
enum class Mode { kPlain, kDropout, kOptions };
inline constexpr int kModes = 3;

struct ForwardParams {
  const void *q, *k, *v;
  void* out;  // contiguous, layout of q
  float* lse;
  TensorStrides q_strides, k_strides, v_strides, out_strides;
  SequenceParams sequences;
  int64_t lse_head;  // elements between heads of an lse-shaped buffer
  int32_t num_heads, num_kv_heads, head_dim, head_dim_v;
  bool out_fp32;
  bool causal_order;  // hand out the last query tiles first: they have most keys
  int32_t tiles;      // query tiles of the longest sequence
  // Split keys: partial results [splits][lse-shaped] and [splits][lse-shaped][head_dim_v], merged
  // by another kernel. partial_lse is +infinity in rows beyond len_q.
  int32_t splits;       // 1: none
  int32_t split_tiles;  // key tiles per split
  float *partial_out, *partial_lse;
  int64_t partial_rows;  // rows of an lse-shaped buffer
  bool lockstep;         // Decode: launched as clusters of kLockstepHeads
  ScoreParams score;
};

struct BackwardParams {
  const void *q, *k, *v, *out, *dout;
  const float *lse, *dlse;  // dlse may be null
  bool out_fp32;            // out is FP32
  // Scratch in the padded row space: [num_heads][padded_rows].
  // With dropout both are shifted so that P becomes keep_scale P and its gradient need not be
  // scaled: lse2 - keep_log2, delta / keep_scale.
  float* lse2;            // lse * log2(e); +infinity where the row has no weight
  float* delta;           // row_dot - dlse
  float* dq_accumulator;  // [num_heads][padded_rows][tile head_dim], in fragment order; null: dq is
                          // computed by a kernel of its own
  int64_t padded_rows;
  void *dq, *dk, *dv;    // contiguous
  float *dbias, *dsink;  // null: none
  TensorStrides q_strides, k_strides, v_strides, out_strides, dout_strides;
  TensorStrides dq_strides, dk_strides, dv_strides;
  SequenceParams sequences;
  int64_t lse_head;
  int32_t num_heads, num_kv_heads, head_dim, head_dim_v;
  bool grads_fp32;
  bool dbias_atomic;  // several thread blocks of one launch add to one element of dbias
  // The sequences and kv heads of this launch; all, unless dbias must be summed in a fixed order.
  int32_t batch_begin, batch_count, kv_begin, kv_count;
  int32_t prepare_blocks, query_tiles, key_tiles;  // of the longest sequence
  ScoreParams score;
};

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_KERNEL_PARAMS_H_
