// Kernels that do not depend on a tile.
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/sm80/launch.h"

namespace attn::cuda::sm80 {
namespace {

// dsink of one head: the sum of exp(sink - lse) * (dlse - row_dot) over the padded row space, in a
// fixed order. Rows without weight have lse2 = +infinity. Grid: num_heads.
constexpr int kSinkThreads = 256;
__global__ void __launch_bounds__(kSinkThreads)
    SinkGradient(const __grid_constant__ BackwardParams p) {
  __shared__ double sums[kSinkThreads];
  const float sink2 = p.score.sinks[blockIdx.x] * kLog2E;
  const float* lse2 = p.lse2 + blockIdx.x * p.padded_rows;
  const float* delta = p.delta + blockIdx.x * p.padded_rows;
  double sum = 0.0;
  for (int64_t row = threadIdx.x; row < p.padded_rows; row += kSinkThreads) {
    sum -= static_cast<double>(ptx::Exp2(sink2 - lse2[row]) * delta[row]);
  }
  sums[threadIdx.x] = sum;
  for (int o = kSinkThreads / 2; o > 0; o /= 2) {
    __syncthreads();
    if (threadIdx.x < o) sums[threadIdx.x] += sums[threadIdx.x + o];
  }
  if (threadIdx.x == 0) p.dsink[blockIdx.x] = static_cast<float>(sums[0]);
}

}  // namespace

cudaError_t LaunchSinkGradient(const BackwardParams& p, cudaStream_t stream) {
  SinkGradient<<<p.num_heads, kSinkThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace attn::cuda::sm80
