#include "kernels/cuda/backends.h"

#include "kernels/cuda/host_backend.h"
#if __has_include("kernels/cuda/sm80/flash_sm80.h")
#include "kernels/cuda/sm80/flash_sm80.h"
#define ATTN_HAVE_FLASH_SM80
#endif
#if __has_include("kernels/cuda/standard/standard_cuda.h")
#include "kernels/cuda/standard/standard_cuda.h"
#define ATTN_HAVE_STANDARD_CUDA
#endif

namespace attn::cuda {

std::vector<std::shared_ptr<const DevicePath>> MakeDevicePaths() {
  std::vector<std::shared_ptr<const DevicePath>> paths;
#ifdef ATTN_HAVE_FLASH_SM80
  paths.push_back(MakeFlashSm80Path());
#endif
#ifdef ATTN_HAVE_STANDARD_CUDA
  paths.push_back(MakeStandardCudaPath());
#endif
  return paths;
}

std::vector<std::unique_ptr<Backend>> MakeCudaBackends(const std::shared_ptr<DeviceSet>& devices) {
  std::vector<std::unique_ptr<Backend>> backends;
  if (devices->empty()) return backends;
  for (auto& path : MakeDevicePaths()) {
    backends.push_back(std::make_unique<HostBackend>(std::move(path), devices));
  }
  return backends;
}

}  // namespace attn::cuda
