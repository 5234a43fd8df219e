// Merges the partial results of split keys: lse = log sum exp lse_s, out = sum of exp(lse_s - lse)
// out_s.
#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/math.cuh"

namespace attn::cuda {
namespace {

constexpr int kMergeThreads = 128;
static_assert(kMaxSplits <= kMergeThreads);  // a thread per split

// The largest value or the sum over the block. Leaves `shared` in use until the next barrier.
template <bool kMax>
__device__ __forceinline__ float BlockReduce(float x, float* shared) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    const float y = __shfl_xor_sync(~0u, x, o);
    x = kMax ? fmaxf(x, y) : x + y;
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int w = 1; w < kMergeThreads / 32; ++w) x = kMax ? fmaxf(x, shared[w]) : x + shared[w];
  return x;
}

// One block per row of the lse-shaped space. Half the threads take the even splits, half the odd
// ones.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) Merge(const __grid_constant__ MergeParams p) {
  __shared__ float weights[kMaxSplits], largest[kMergeThreads / 32], sums[kMergeThreads / 32];
  __shared__ float2 odd[kMergeThreads / 2];
  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x, half = thread / (kMergeThreads / 2);
  const int pair = thread % (kMergeThreads / 2);
  const int h = static_cast<int>(row / p.lse_head % p.num_heads);
  const int64_t token = row / (p.lse_head * p.num_heads) * p.lse_head + row % p.lse_head;
  ptx::AwaitPredecessors();

  const float part =
      thread < p.splits ? p.partial_lse[thread * p.partial_rows + row] : -CUDART_INF_F;
  const float top = BlockReduce<true>(part, largest);
  const bool valid = top != CUDART_INF_F;  // +infinity marks rows beyond len_q
  const float sink = valid && p.sinks != nullptr ? __ldg(p.sinks + h) : -CUDART_INF_F;
  const bool has_keys = valid && top != -CUDART_INF_F;
  const float base = has_keys ? fmaxf(top, sink) : 0.0f;
  const float weight = has_keys ? ptx::Exp2((part - base) * kLog2E) : 0.0f;
  if (thread < p.splits) weights[thread] = weight;
  float sum = BlockReduce<false>(weight, sums);
  if (has_keys) sum += ptx::Exp2((sink - base) * kLog2E);
  if (thread == 0) {
    // Without keys exactly the sink.
    p.lse[row] = has_keys ? base + logf(sum) : (valid ? sink : -CUDART_INF_F);
  }
  const float factor = has_keys ? 1.0f / sum : 0.0f;
  const float* parts = p.partial_out + row * p.head_dim_v;
  const int64_t out = (token * p.num_heads + h) * p.head_dim_v;
  for (int c = pair * 2; c - pair * 2 < p.head_dim_v; c += kMergeThreads) {
    float2 acc = make_float2(0.0f, 0.0f);
    if (has_keys && c < p.head_dim_v) {
#pragma unroll 8
      for (int s = half; s < p.splits; s += 2) {
        const float2 o =
            *reinterpret_cast<const float2*>(parts + s * p.partial_rows * p.head_dim_v + c);
        acc.x = fmaf(weights[s], o.x, acc.x);
        acc.y = fmaf(weights[s], o.y, acc.y);
      }
    }
    if (half == 1) odd[pair] = acc;
    __syncthreads();
    if (half == 0 && c < p.head_dim_v) {
      StorePair<T>(p.out, p.out_fp32, out + c, (acc.x + odd[pair].x) * factor,
                   (acc.y + odd[pair].y) * factor);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchMerge(const MergeParams& p, DType type, bool early, cudaStream_t stream) {
  if (p.partial_rows == 0) return cudaSuccess;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.partial_rows));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return type == DType::kBf16 ? cudaLaunchKernelEx(&config, &Merge<__nv_bfloat16>, p)
                              : cudaLaunchKernelEx(&config, &Merge<__half>, p);
}

}  // namespace attn::cuda
