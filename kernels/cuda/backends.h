// The CUDA paths of this build.
#ifndef ATTN_KERNELS_CUDA_BACKENDS_H_
#define ATTN_KERNELS_CUDA_BACKENDS_H_

#include <memory>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/device_set.h"

namespace attn::cuda {

// Every path that this build contains, fastest first.
std::vector<std::shared_ptr<const DevicePath>> MakeDevicePaths();

// Each of them over host tensors. Empty where the set has no device. Backends keep the set alive.
std::vector<std::unique_ptr<Backend>> MakeCudaBackends(const std::shared_ptr<DeviceSet>& devices);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_BACKENDS_H_
