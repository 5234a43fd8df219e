#include <cuda_bf16.h>

#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "tests/gpu/ptx_kernels.h"

namespace attn::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void ReduceAddFp32(float* to) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) float values[kReduceElements];
  for (int i = threadIdx.x; i < kReduceElements; i += kThreads) {
    values[i] = static_cast<float>((blockIdx.x + 1) * (i % 7));
  }
  ptx::FenceAsyncProxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::ReduceAddFp32(to, ptx::SharedAddress(values), sizeof(values));
    ptx::CommitStores();
    ptx::WaitStoresRead<0>();
  }
#endif
}

__global__ void ReduceAddBox(const __grid_constant__ CUtensorMap map, int c0, int head, int token,
                             int batch) {
#if __CUDA_ARCH__ >= 900
  // The swizzle moves pieces within a row alone, so that rows can be written as they are.
  __shared__ alignas(1024) __nv_bfloat16 values[kReduceRows * 64];
  for (int i = threadIdx.x; i < kReduceRows * 64; i += kThreads) {
    values[i] = __float2bfloat16(static_cast<float>(1 + i / 64));
  }
  ptx::FenceAsyncProxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::ReduceAddBox4(&map, ptx::SharedAddress(values), c0, head, token, batch);
    ptx::CommitStores();
    ptx::WaitStoresRead<0>();
  }
#endif
}

}  // namespace

cudaError_t LaunchReduceAddFp32(float* to, int blocks) {
  ReduceAddFp32<<<blocks, kThreads>>>(to);
  return cudaGetLastError();
}

cudaError_t LaunchReduceAddBox(const CUtensorMap& map, int c0, int head, int token, int batch,
                               int blocks) {
  ReduceAddBox<<<blocks, kThreads>>>(map, c0, head, token, batch);
  return cudaGetLastError();
}

}  // namespace attn::cuda
