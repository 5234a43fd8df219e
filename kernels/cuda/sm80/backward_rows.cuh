// What runs before and after Backward: Prepare and Finish, both by rows of queries.
#ifndef ATTN_KERNELS_CUDA_SM80_BACKWARD_ROWS_CUH_
#define ATTN_KERNELS_CUDA_SM80_BACKWARD_ROWS_CUH_

#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/backward_traits.cuh"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

// The product of eight neighbours, summed.
template <class T>
__device__ __forceinline__ float Dot8(const void* a, bool a_fp32, int64_t a_index, const T* b) {
  const uint4 y = *reinterpret_cast<const uint4*>(b);
  const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
  float2 xs[4];
  if (a_fp32) {
    const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(a) + a_index);
    const float4 low = x[0], high = x[1];
    xs[0] = make_float2(low.x, low.y), xs[1] = make_float2(low.z, low.w);
    xs[2] = make_float2(high.x, high.y), xs[3] = make_float2(high.z, high.w);
  } else {
    const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const T*>(a) + a_index);
    xs[0] = ptx::Element<T>::Unpack(x.x), xs[1] = ptx::Element<T>::Unpack(x.y);
    xs[2] = ptx::Element<T>::Unpack(x.z), xs[3] = ptx::Element<T>::Unpack(x.w);
  }
  float dot = 0.0f;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 other = ptx::Element<T>::Unpack(ys[n]);
    dot = fmaf(xs[n].x, other.x, fmaf(xs[n].y, other.y, dot));
  }
  return dot;
}

inline constexpr int kPrepareRows = kPrepareRowsPerBlock;  // 8 lanes each

// lse2, delta and a zeroed dQ accumulator. Grid: padded rows of the longest sequence / kPrepareRows
// * num_heads * batch.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kPrepareRows * 8)
    Prepare(const __grid_constant__ BackwardParams p) {
  const int blocks = p.prepare_blocks;
  const int h = blockIdx.x / blocks % p.num_heads, b = blockIdx.x / blocks / p.num_heads;
  const DeviceSequence s = SequenceOf(p.sequences, b);
  const int i = blockIdx.x % blocks * kPrepareRows + threadIdx.x / 8, lane = threadIdx.x % 8;
  if (i >= (s.rows_q + kRowPadding - 1) / kRowPadding * kRowPadding) return;
  const int64_t row = h * p.padded_rows + s.padded + i;
  float dot = 0.0f;
  const bool valid = i < s.len_q;
  if (valid) {
    const int64_t out = s.batch * p.out_strides.batch + h * p.out_strides.head +
                        (s.q_token + i) * p.out_strides.token;
    const int64_t dout = s.batch * p.dout_strides.batch + h * p.dout_strides.head +
                         (s.q_token + i) * p.dout_strides.token;
    for (int c = lane * 8; c < p.head_dim_v; c += 64) {
      dot += Dot8(p.out, p.out_fp32, out + c, static_cast<const T*>(p.dout) + dout + c);
    }
  }
#pragma unroll
  for (int o = 4; o > 0; o /= 2) dot += __shfl_xor_sync(~0u, dot, o);
  if (lane == 0) {
    float lse2 = CUDART_INF_F, delta = 0.0f;
    if (valid) {
      const int64_t at = s.lse + h * p.lse_head + i;
      const float lse = p.lse[at];
      if (lse != -CUDART_INF_F) {
        lse2 = lse * kLog2E - p.score.keep_log2;
        delta = (dot - (p.dlse != nullptr ? p.dlse[at] : 0.0f)) * p.score.keep_inverse;
      }
    }
    p.lse2[row] = lse2;
    p.delta[row] = delta;
  }
  if (p.dq_accumulator == nullptr) return;
  float4* accumulator = reinterpret_cast<float4*>(p.dq_accumulator + row * kHeadDim);
  for (int c = lane; c < kHeadDim / 4; c += 8) accumulator[c] = make_float4(0, 0, 0, 0);
}

// dq from the accumulator: 8 columns of a row per thread and turn, so that rows are written in
// whole sectors. Grid: query_tiles * num_heads * batch; threads as Backward.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    Finish(const __grid_constant__ BackwardParams p) {
  constexpr int kChunks = Traits::kQkChunks;
  const int h = blockIdx.x / p.query_tiles % p.num_heads;
  const DeviceSequence s = SequenceOf(p.sequences, blockIdx.x / p.query_tiles / p.num_heads);
  const int m0 = static_cast<int>(blockIdx.x % p.query_tiles) * Traits::kBlockM;
  if (m0 >= s.rows_q) return;
  const float* tile = p.dq_accumulator + (h * p.padded_rows + s.padded + m0) * Traits::kHeadDim;
  const int64_t row0 =
      s.batch * p.dq_strides.batch + h * p.dq_strides.head + (s.q_token + m0) * p.dq_strides.token;
#pragma unroll 4
  for (int n = threadIdx.x; n < Traits::kBlockM * kChunks; n += Traits::kThreads) {
    const int row = n / kChunks, chunk = n % kChunks;
    if (m0 + row >= s.rows_q || chunk * 8 >= p.head_dim) continue;
    // Where AddQueryGradient put it: warp, m16 tile, n8 tile; four lanes of two columns each, rows
    // r and r + 8 beside each other.
    const int m_tile = row / 16, warp_m = m_tile / Traits::kDqQueries;
    const int warp = warp_m + chunk / Traits::kDqDims * Traits::kDqWarpsM;
    const int fragment =
        (warp * Traits::kDqQueries + m_tile % Traits::kDqQueries) * Traits::kDqDims +
        chunk % Traits::kDqDims;
    const float* from = tile + (fragment * 32 + row % 8 * 4) * 4 + row % 16 / 8 * 2;
    float2 x[4];
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      x[lane] = *reinterpret_cast<const float2*>(from + lane * 4);
      x[lane].x *= p.score.scale;
      x[lane].y *= p.score.scale;
    }
    StoreChunk<typename Traits::T>(p.dq, p.grads_fp32, row0 + row * p.dq_strides.token + chunk * 8,
                                   x);
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_BACKWARD_ROWS_CUH_
