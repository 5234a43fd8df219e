// The CUDA calls that the host side makes, as one class: a test puts a stand-in over host memory in
// its place, so that queueing, staging, layouts and error handling are tested without a GPU.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_DRIVER_H_
#define ATTN_KERNELS_CUDA_RUNTIME_DRIVER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/pack.h"
#include "kernels/cuda/runtime/roofline.h"

namespace attn::cuda {

// Each call means what the CUDA runtime's call of that name means. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::vector<DeviceProperties> FindDevices(std::string* why) = 0;
  virtual cudaError_t SetDevice(int index) = 0;        // of the calling thread
  virtual cudaError_t FreeMemory(int64_t* bytes) = 0;  // of the current device
  virtual absl::Status MeasureRoofline(const DeviceProperties& device, Roofline* roofline) = 0;

  virtual cudaError_t Malloc(void** data, size_t bytes) = 0;
  virtual cudaError_t Free(void* data) = 0;
  // Page-locked, for every device. Zeroed.
  virtual cudaError_t MallocHost(void** data, size_t bytes) = 0;
  virtual cudaError_t FreeHost(void* data) = 0;
  // Whether all of the range is page-locked memory that CUDA knows, so that a copy needs no
  // staging.
  virtual bool IsPinned(const void* data, size_t bytes) = 0;

  virtual cudaError_t CreateStream(cudaStream_t* stream) = 0;  // does not wait for the null stream
  virtual cudaError_t DestroyStream(cudaStream_t stream) = 0;
  virtual cudaError_t SynchronizeStream(cudaStream_t stream) = 0;
  // With timing; SynchronizeEvent() sleeps instead of spinning.
  virtual cudaError_t CreateEvent(cudaEvent_t* event) = 0;
  virtual cudaError_t DestroyEvent(cudaEvent_t event) = 0;
  virtual cudaError_t RecordEvent(cudaEvent_t event, cudaStream_t stream) = 0;
  virtual cudaError_t QueryEvent(cudaEvent_t event) = 0;
  virtual cudaError_t SynchronizeEvent(cudaEvent_t event) = 0;
  virtual cudaError_t Elapsed(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) = 0;

  virtual cudaError_t CopyToDevice(void* to, const void* from, size_t bytes,
                                   cudaStream_t stream) = 0;
  virtual cudaError_t CopyToHost(void* to, const void* from, size_t bytes, cudaStream_t stream) = 0;
  virtual cudaError_t Fill(void* to, int byte, size_t bytes, cudaStream_t stream) = 0;
  virtual cudaError_t Pack(const PackJob& job, cudaStream_t stream) = 0;

  // The latest error of the calling thread, which is then forgotten unless it is sticky.
  virtual cudaError_t TakeError() = 0;
};

// Page-locks memory for every device, so that copies go without staging, and lets it go again.
// False where that fails. Thread-safe.
bool PinHostMemory(void* data, size_t bytes);
void UnpinHostMemory(void* data);

// The CUDA runtime. Lives until the process ends.
Driver* CudaDriver();

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_DRIVER_H_
