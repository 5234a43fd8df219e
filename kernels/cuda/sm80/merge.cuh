// Merges the partial results of split keys: out = sum of exp(lse_s - lse) out_s, lse = log sum exp
// lse_s.
#ifndef ATTN_KERNELS_CUDA_SM80_MERGE_CUH_
#define ATTN_KERNELS_CUDA_SM80_MERGE_CUH_

#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

inline constexpr int kMergeWarps = 4;

// One warp per row of the lse-shaped space; grid: rows / kMergeWarps.
template <class T>
__global__ void __launch_bounds__(kMergeWarps * 32) Merge(const __grid_constant__ ForwardParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / 32;
  if (row >= p.partial_rows) return;
  const int lane = threadIdx.x % 32;
  const int h = static_cast<int>(row / p.lse_head % p.num_heads);
  const int64_t token = row / (p.lse_head * p.num_heads) * p.lse_head + row % p.lse_head;

  float top = -CUDART_INF_F;
  for (int s = lane; s < p.splits; s += 32) {
    top = fmaxf(top, p.partial_lse[s * p.partial_rows + row]);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  const bool valid = top != CUDART_INF_F;  // +infinity marks rows beyond len_q
  const float sink = valid && p.score.sinks != nullptr ? __ldg(p.score.sinks + h) : -CUDART_INF_F;
  const bool has_keys = valid && top != -CUDART_INF_F;
  float lse = valid ? sink : -CUDART_INF_F, factor = 0.0f, base = 0.0f;
  if (has_keys) {
    base = fmaxf(top, sink);
    float sum = 0.0f;
    for (int s = lane; s < p.splits; s += 32) {
      sum += ptx::Exp2((p.partial_lse[s * p.partial_rows + row] - base) * kLog2E);
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    if (sink != -CUDART_INF_F) sum += ptx::Exp2((sink - base) * kLog2E);
    lse = base + logf(sum);
    factor = 1.0f / sum;
  }
  if (lane == 0) p.lse[row] = lse;

  const int64_t out = (token * p.num_heads + h) * p.head_dim_v;
  for (int c = lane * 2; c < p.head_dim_v; c += 64) {
    float x = 0.0f, y = 0.0f;
    if (has_keys) {
      for (int s = 0; s < p.splits; ++s) {
        const float part = p.partial_lse[s * p.partial_rows + row];
        if (part == -CUDART_INF_F) continue;
        const float weight = ptx::Exp2((part - base) * kLog2E);
        const float2 o = *reinterpret_cast<const float2*>(
            p.partial_out + (s * p.partial_rows + row) * p.head_dim_v + c);
        x += weight * o.x;
        y += weight * o.y;
      }
      x *= factor;
      y *= factor;
    }
    if (p.out_fp32) {
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + out + c) = make_float2(x, y);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + out + c) = ptx::Element<T>::Pack(x, y);
    }
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_MERGE_CUH_
