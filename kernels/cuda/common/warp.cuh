// Reductions over the lanes of a warp.
#ifndef ATTN_KERNELS_CUDA_COMMON_WARP_CUH_
#define ATTN_KERNELS_CUDA_COMMON_WARP_CUH_

namespace attn::cuda {

struct MaxOp {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  static constexpr float kEmpty = -__builtin_huge_valf();
};
struct SumOp {
  __device__ float operator()(float a, float b) const { return a + b; }
  static constexpr float kEmpty = 0.0f;
};

// Over each group of kLanes neighbours, a power of two; every lane gets the same bits.
template <int kLanes = 32, class Op>
__device__ __forceinline__ float WarpReduce(float x, Op op) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_WARP_CUH_
