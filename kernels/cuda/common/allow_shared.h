// Dynamic shared memory beyond 48 KiB, which a kernel has to be allowed.
#ifndef ATTN_KERNELS_CUDA_COMMON_ALLOW_SHARED_H_
#define ATTN_KERNELS_CUDA_COMMON_ALLOW_SHARED_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace attn::cuda {

// Lets a kernel use `bytes` of shared memory on the current device; asks the driver once per
// device. `allowed` is this kernel's own, zero at first.
template <class Kernel>
cudaError_t AllowShared(Kernel kernel, int bytes, std::atomic<uint64_t>* allowed) {
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed->load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) allowed->fetch_or(bit, std::memory_order_relaxed);
  return e;
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_ALLOW_SHARED_H_
