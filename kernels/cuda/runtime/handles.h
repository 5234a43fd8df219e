// Owners of CUDA streams, events and small pieces of device memory.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_HANDLES_H_
#define ATTN_KERNELS_CUDA_RUNTIME_HANDLES_H_

#include <utility>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime/driver.h"

namespace attn::cuda {

// Move-only; of the device that was current when it was made. Errors of Create(): as ToStatus().
class Stream {
 public:
  static absl::StatusOr<Stream> Create(Driver* driver) {
    Stream stream;
    if (absl::Status s = ToStatus(driver->CreateStream(&stream.stream_), "cudaStreamCreate");
        !s.ok()) {
      return s;
    }
    stream.driver_ = driver;
    return stream;
  }
  Stream() = default;
  Stream(Stream&& other) noexcept { *this = std::move(other); }
  Stream& operator=(Stream&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream() {
    if (driver_ != nullptr) driver_->DestroyStream(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  Driver* driver_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  static absl::StatusOr<Event> Create(Driver* driver) {
    Event event;
    if (absl::Status s = ToStatus(driver->CreateEvent(&event.event_), "cudaEventCreate"); !s.ok()) {
      return s;
    }
    event.driver_ = driver;
    return event;
  }
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (driver_ != nullptr) driver_->DestroyEvent(event_);
  }
  cudaEvent_t get() const { return event_; }

 private:
  Driver* driver_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

// Memory of the device that was current when it was made; uninitialised. For what lives long: calls
// take theirs from a MemoryPool.
class DeviceBlock {
 public:
  static absl::StatusOr<DeviceBlock> Create(Driver* driver, int64_t bytes) {
    DeviceBlock memory;
    if (absl::Status s =
            ToStatus(driver->Malloc(&memory.data_, static_cast<size_t>(bytes)), "cudaMalloc");
        !s.ok()) {
      return s;
    }
    memory.driver_ = driver;
    return memory;
  }
  DeviceBlock() = default;
  DeviceBlock(DeviceBlock&& other) noexcept { *this = std::move(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBlock() {
    if (driver_ != nullptr) driver_->Free(data_);
  }
  void* get() const { return data_; }

 private:
  Driver* driver_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_HANDLES_H_
