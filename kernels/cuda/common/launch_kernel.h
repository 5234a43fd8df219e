// Launching a kernel that a triple-angle-bracket launch does not suffice for.
#ifndef ATTN_KERNELS_CUDA_COMMON_LAUNCH_KERNEL_H_
#define ATTN_KERNELS_CUDA_COMMON_LAUNCH_KERNEL_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace attn::cuda {

struct LaunchShape {
  int64_t blocks;
  int threads;           // of a block
  int shared_bytes = 0;  // dynamic; beyond 48 KiB too
  int cluster = 1;       // blocks of a cluster; more than 1 from compute capability 9.0 on
  // The kernel may start before its predecessor in the stream has ended (9.0 and later).
  bool early = false;
};

// Lets a kernel use `bytes` of shared memory on the current device; asks the driver once per
// device.
template <auto kKernel>
cudaError_t AllowShared(int bytes) {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return e;
}

// Launches kKernel, a __global__ function of one argument, unless there are no blocks. Returns the
// launch's error.
template <auto kKernel, class Params>
cudaError_t LaunchKernel(const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  if (shape.blocks == 0) return cudaSuccess;
  if (shape.shared_bytes > 0) {
    if (cudaError_t e = AllowShared<kKernel>(shape.shared_bytes); e != cudaSuccess) return e;
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_LAUNCH_KERNEL_H_
