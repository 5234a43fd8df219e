// What a device has been measured to do: the roof that "fraction of roofline" is a fraction of.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_H_
#define ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_H_

#include "absl/status/status.h"
#include "kernels/cuda/runtime/device.h"

namespace attn::cuda {

// A rate of 0 means: not measured.
struct Roofline {
  double copy_bytes_per_second = 0;      // device memory, read + written by one large copy
  double read_bytes_per_second = 0;      // device memory, read only
  double matrix_flops_per_second = 0;    // bf16 products with fp32 sums on the tensor cores
  double upload_bytes_per_second = 0;    // pinned host memory to the device
  double download_bytes_per_second = 0;  // and back
};

// Measures on the device, which becomes the current one. Takes about 0.2 s and 300 MB of device
// memory (less on a small device), all given back. Errors: INTERNAL, RESOURCE_EXHAUSTED (names the
// CUDA error). Not for use while calls run: they would share the device.
absl::Status MeasureRoofline(const DeviceProperties& device, Roofline* roofline);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_H_
