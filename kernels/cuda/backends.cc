#include "kernels/cuda/backends.h"

#include "kernels/cuda/host_backend.h"
#include "kernels/cuda/sm80/flash_sm80.h"
#include "kernels/cuda/sm90/flash_sm90.h"
#include "kernels/cuda/standard/standard_cuda.h"

namespace attn::cuda {

std::vector<std::shared_ptr<const DevicePath>> MakeDevicePaths() {
  return {
#ifdef ATTN_HAVE_SM90
      MakeFlashSm90Path(),
#endif
      MakeFlashSm80Path(), MakeStandardCudaPath()};
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
