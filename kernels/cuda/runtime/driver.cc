#include "kernels/cuda/runtime/driver.h"

namespace attn::cuda {
namespace {

class Runtime final : public Driver {
 public:
  std::vector<DeviceProperties> FindDevices(std::string* why) override {
    return cuda::FindDevices(why);
  }
  cudaError_t SetDevice(int index) override { return cudaSetDevice(index); }
  cudaError_t FreeMemory(int64_t* bytes) override {
    size_t free = 0, total = 0;
    const cudaError_t error = cudaMemGetInfo(&free, &total);
    *bytes = static_cast<int64_t>(free);
    return error;
  }
  absl::Status MeasureRoofline(const DeviceProperties& device, Roofline* roofline) override {
    return cuda::MeasureRoofline(device, roofline);
  }

  cudaError_t Malloc(void** data, size_t bytes) override { return cudaMalloc(data, bytes); }
  cudaError_t Free(void* data) override { return cudaFree(data); }
  cudaError_t MallocHost(void** data, size_t bytes) override {
    const cudaError_t error = cudaHostAlloc(data, bytes, cudaHostAllocPortable);
    if (error == cudaSuccess) __builtin_memset(*data, 0, bytes);
    return error;
  }
  cudaError_t FreeHost(void* data) override { return cudaFreeHost(data); }
  bool IsPinned(const void* data, size_t bytes) override {
    const char* first = static_cast<const char*>(data);
    return bytes > 0 && IsHostByte(first) && IsHostByte(first + bytes - 1);
  }

  cudaError_t CreateStream(cudaStream_t* stream) override {
    return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
  }
  cudaError_t DestroyStream(cudaStream_t stream) override { return cudaStreamDestroy(stream); }
  cudaError_t SynchronizeStream(cudaStream_t stream) override {
    return cudaStreamSynchronize(stream);
  }
  cudaError_t CreateEvent(cudaEvent_t* event) override {
    return cudaEventCreateWithFlags(event, cudaEventBlockingSync);
  }
  cudaError_t DestroyEvent(cudaEvent_t event) override { return cudaEventDestroy(event); }
  cudaError_t RecordEvent(cudaEvent_t event, cudaStream_t stream) override {
    return cudaEventRecord(event, stream);
  }
  cudaError_t QueryEvent(cudaEvent_t event) override { return cudaEventQuery(event); }
  cudaError_t SynchronizeEvent(cudaEvent_t event) override { return cudaEventSynchronize(event); }
  cudaError_t Elapsed(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) override {
    return cudaEventElapsedTime(milliseconds, begin, end);
  }

  cudaError_t CopyToDevice(void* to, const void* from, size_t bytes, cudaStream_t stream) override {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
  }
  cudaError_t CopyToHost(void* to, const void* from, size_t bytes, cudaStream_t stream) override {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  }
  cudaError_t Fill(void* to, int byte, size_t bytes, cudaStream_t stream) override {
    return cudaMemsetAsync(to, byte, bytes, stream);
  }
  cudaError_t Pack(const PackJob& job, cudaStream_t stream) override {
    return LaunchPack(job, stream);
  }

  cudaError_t TakeError() override { return cudaGetLastError(); }

 private:
  static bool IsHostByte(const char* address) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) == cudaSuccess) {
      return attributes.type == cudaMemoryTypeHost;
    }
    cudaGetLastError();
    return false;
  }
};

}  // namespace

bool PinHostMemory(void* data, size_t bytes) {
  if (cudaHostRegister(data, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

void UnpinHostMemory(void* data) {
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

Driver* CudaDriver() {
  static Runtime* const kRuntime = new Runtime;
  return kRuntime;
}

}  // namespace attn::cuda
