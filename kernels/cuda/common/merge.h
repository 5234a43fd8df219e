// Merging the partial results of split keys: what the host side launches.
#ifndef ATTN_KERNELS_CUDA_COMMON_MERGE_H_
#define ATTN_KERNELS_CUDA_COMMON_MERGE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/api/problem.h"
#include "kernels/cuda/common/divisor.h"

namespace attn::cuda {

inline constexpr int kMaxSplits = 128;  // of the keys

// partial_out [splits][partial_rows][head_dim_v] and partial_lse [splits][partial_rows], a row of
// either being a row of an lse-shaped buffer. partial_lse is -infinity in rows without keys in that
// split, +infinity in rows beyond len_q. There are fewer than 2^31 rows.
struct MergeParams {
  const float *partial_out, *partial_lse;
  int64_t partial_rows;
  void* out;  // contiguous, layout of q
  float* lse;
  const float* sinks;  // [num_heads]; null: none
  int64_t lse_head;    // elements between heads of an lse-shaped buffer
  int32_t num_heads, head_dim_v, splits;
  Divisor by_lse_head, by_num_heads;
  bool out_fp32;
};

// Of a flash path's ForwardParams.
template <class ForwardParams>
MergeParams MergeParamsOf(const ForwardParams& p) {
  return {.partial_out = p.partial_out,
          .partial_lse = p.partial_lse,
          .partial_rows = p.partial_rows,
          .out = p.out,
          .lse = p.lse,
          .sinks = p.score.sinks,
          .lse_head = p.lse_head,
          .num_heads = p.num_heads,
          .head_dim_v = p.head_dim_v,
          .splits = p.splits,
          .by_lse_head = MakeDivisor(static_cast<uint32_t>(p.lse_head)),
          .by_num_heads = MakeDivisor(static_cast<uint32_t>(p.num_heads)),
          .out_fp32 = p.out_fp32};
}

// `type`: of q, k and v. early: the device is 9.0 or later, and the kernel may be launched before
// the one that makes the parts has ended, which says AllowDependents() for that. Returns the
// launch's error.
cudaError_t LaunchMerge(const MergeParams& params, DType type, bool early, cudaStream_t stream);

// Regions of the workspace of split keys, in bytes from its start; `bytes` in all. Regions start at
// multiples of 256. One split needs none.
struct SplitWorkspace {
  int64_t partial_out = 0, partial_lse = 0, bytes = 0;
};
SplitWorkspace PlanSplitWorkspace(const AttentionProblem& p, int splits);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_MERGE_H_
