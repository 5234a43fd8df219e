// CUDA devices that are host memory: streams are queues that run when somebody waits for them, so a
// buffer that is reused or freed too early shows; errors come when ordered.
#ifndef ATTN_TESTS_UNIT_CUDA_FAKE_DRIVER_H_
#define ATTN_TESTS_UNIT_CUDA_FAKE_DRIVER_H_

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/mutex.h"
#include "kernels/cuda/runtime/driver.h"

namespace attn::cuda {

class FakeDriver : public Driver {
 public:
  explicit FakeDriver(int devices, std::string why = "") : why_(std::move(why)), states_(devices) {}
  ~FakeDriver() override {
    for (const auto& [data, allocation] : device_memory_) std::free(data);
    for (const auto& [data, bytes] : pinned_) std::free(data);
  }

  // ---- what tests order and ask for

  // From now on the n-th (0: the next) call of `what` ("Malloc", "CopyToDevice", …, or "work" for a
  // piece of a stream's work) fails. A sticky error stays with the device.
  void FailNext(const std::string& what, cudaError_t error, int n = 0) {
    MutexLock lock(mutex_);
    orders_[what] = {error, n};
  }
  void RegisterPinned(void* data, size_t bytes) {
    MutexLock lock(mutex_);
    registered_[static_cast<std::byte*>(data)] = bytes;
  }
  // Adds work to a stream, as a kernel launch does.
  void Enqueue(cudaStream_t stream, std::function<void()> work) {
    MutexLock lock(mutex_);
    Of(stream).work.push_back({std::move(work), nullptr});
  }
  // Device memory of the device of `stream`, all of it.
  bool OwnsRange(cudaStream_t stream, const void* data, size_t bytes) {
    MutexLock lock(mutex_);
    auto it = device_memory_.upper_bound(const_cast<void*>(data));
    if (it == device_memory_.begin()) return false;
    --it;
    const auto* begin = static_cast<const std::byte*>(it->first);
    const auto* at = static_cast<const std::byte*>(data);
    return it->second.device == Of(stream).device && at + bytes <= begin + it->second.bytes;
  }
  int DeviceOf(cudaStream_t stream) {
    MutexLock lock(mutex_);
    return Of(stream).device;
  }
  int mallocs() const {
    MutexLock lock(mutex_);
    return mallocs_;
  }
  int copies_to_device() const {
    MutexLock lock(mutex_);
    return copies_to_device_;
  }
  size_t bytes_to_device() const {
    MutexLock lock(mutex_);
    return bytes_to_device_;
  }
  size_t live_allocations() const {
    MutexLock lock(mutex_);
    return device_memory_.size();
  }
  void set_memory_bytes(int64_t bytes) { memory_bytes_ = bytes; }
  void set_capability(int device, int major, int minor) {
    states_[device].major = major;
    states_[device].minor = minor;
  }

  // ---- Driver

  std::vector<DeviceProperties> FindDevices(std::string* why) override {
    std::vector<DeviceProperties> all;
    for (size_t i = 0; i < states_.size(); ++i) {
      DeviceProperties d;
      d.index = static_cast<int>(i);
      d.name = "Fake";
      d.major = states_[i].major;
      d.minor = states_[i].minor;
      d.multiprocessors = 132;  // as an H200 has them
      d.l2_bytes = int64_t{60} << 20;
      d.shared_bytes = 227 << 10;
      d.memory_bytes = memory_bytes_;
      all.push_back(d);
    }
    if (why != nullptr) *why = why_;
    return all;
  }
  cudaError_t SetDevice(int index) override {
    current_ = index;
    return cudaSuccess;
  }
  cudaError_t FreeMemory(int64_t* bytes) override {
    *bytes = memory_bytes_;
    MutexLock lock(mutex_);
    return Ordered("FreeMemory");
  }
  absl::Status MeasureRoofline(const DeviceProperties&, Roofline* roofline) override {
    *roofline = {.copy_bytes_per_second = 1e9, .matrix_flops_per_second = 1e9};
    return absl::OkStatus();
  }
  cudaError_t Malloc(void** data, size_t bytes) override {
    MutexLock lock(mutex_);
    if (const cudaError_t error = Ordered("Malloc"); error != cudaSuccess) return error;
    ++mallocs_;
    *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*data, 0xA5, bytes);
    device_memory_[*data] = {bytes, current_};
    return cudaSuccess;
  }
  cudaError_t Free(void* data) override {
    MutexLock lock(mutex_);
    device_memory_.erase(data);
    std::free(data);
    return cudaSuccess;
  }
  cudaError_t MallocHost(void** data, size_t bytes) override {
    MutexLock lock(mutex_);
    if (const cudaError_t error = Ordered("MallocHost"); error != cudaSuccess) return error;
    *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*data, 0, bytes);
    pinned_[*data] = bytes;
    return cudaSuccess;
  }
  cudaError_t FreeHost(void* data) override {
    MutexLock lock(mutex_);
    pinned_.erase(data);
    std::free(data);
    return cudaSuccess;
  }
  bool IsPinned(const void* data, size_t bytes) override {
    MutexLock lock(mutex_);
    for (const auto& [begin, size] : registered_) {
      const auto* at = static_cast<const std::byte*>(data);
      if (at >= begin && at + bytes <= begin + size) return true;
    }
    return false;
  }
  cudaError_t CreateStream(cudaStream_t* stream) override {
    MutexLock lock(mutex_);
    streams_.push_back({.device = current_, .work = {}});
    *stream = reinterpret_cast<cudaStream_t>(streams_.size());
    return cudaSuccess;
  }
  cudaError_t DestroyStream(cudaStream_t) override { return cudaSuccess; }
  cudaError_t SynchronizeStream(cudaStream_t stream) override {
    MutexLock lock(mutex_);
    return Drain(stream, nullptr);
  }
  cudaError_t CreateEvent(cudaEvent_t* event) override {
    MutexLock lock(mutex_);
    events_.push_back({});
    *event = reinterpret_cast<cudaEvent_t>(events_.size());
    return cudaSuccess;
  }
  cudaError_t DestroyEvent(cudaEvent_t) override { return cudaSuccess; }
  cudaError_t RecordEvent(cudaEvent_t event, cudaStream_t stream) override {
    MutexLock lock(mutex_);
    if (const cudaError_t error = Ordered("RecordEvent"); error != cudaSuccess) return error;
    Stream& s = Of(stream);
    s.work.push_back({nullptr, event});
    Of(event) = {.stream = stream, .pending = true, .looked_at = false};
    return StickyOf(s.device);
  }
  cudaError_t QueryEvent(cudaEvent_t event) override {
    MutexLock lock(mutex_);
    EventState& e = Of(event);
    if (e.stream == nullptr) return cudaSuccess;
    if (e.pending && !e.looked_at) {
      e.looked_at = true;
      return cudaErrorNotReady;
    }
    return e.pending ? Drain(e.stream, event) : StickyOf(Of(e.stream).device);
  }
  cudaError_t SynchronizeEvent(cudaEvent_t event) override {
    MutexLock lock(mutex_);
    EventState& e = Of(event);
    if (e.stream == nullptr) return cudaSuccess;
    return e.pending ? Drain(e.stream, event) : StickyOf(Of(e.stream).device);
  }
  cudaError_t Elapsed(float* milliseconds, cudaEvent_t, cudaEvent_t) override {
    *milliseconds = 0.5f;
    return cudaSuccess;
  }
  cudaError_t CopyToDevice(void* to, const void* from, size_t bytes, cudaStream_t stream) override {
    MutexLock lock(mutex_);
    ++copies_to_device_;
    bytes_to_device_ += bytes;
    return Copy("CopyToDevice", to, from, bytes, stream);
  }
  cudaError_t CopyToHost(void* to, const void* from, size_t bytes, cudaStream_t stream) override {
    MutexLock lock(mutex_);
    return Copy("CopyToHost", to, from, bytes, stream);
  }
  cudaError_t Fill(void* to, int byte, size_t bytes, cudaStream_t stream) override {
    MutexLock lock(mutex_);
    Of(stream).work.push_back({[=] { std::memset(to, byte, bytes); }, nullptr});
    return StickyOf(Of(stream).device);
  }
  cudaError_t Pack(const PackJob& job, cudaStream_t stream) override {
    MutexLock lock(mutex_);
    if (const cudaError_t error = Ordered("Pack"); error != cudaSuccess) return error;
    Of(stream).work.push_back({[job] { PackOnHost(job); }, nullptr});
    return StickyOf(Of(stream).device);
  }
  cudaError_t TakeError() override {
    MutexLock lock(mutex_);
    return Ordered("TakeError");
  }

 private:
  struct Work {
    std::function<void()> run;
    cudaEvent_t event;
  };
  struct Stream {
    int device;
    std::deque<Work> work;
  };
  struct EventState {
    cudaStream_t stream = nullptr;
    bool pending = false;
    bool looked_at = false;
  };
  struct Order {
    cudaError_t error;
    int n;
  };
  struct Allocation {
    size_t bytes;
    int device;
  };
  struct DeviceState {
    int major = 9, minor = 0;
    cudaError_t sticky = cudaSuccess;
  };

  Stream& Of(cudaStream_t stream) ATTN_REQUIRES(mutex_) {
    return streams_[reinterpret_cast<size_t>(stream) - 1];
  }
  EventState& Of(cudaEvent_t event) ATTN_REQUIRES(mutex_) {
    return events_[reinterpret_cast<size_t>(event) - 1];
  }
  cudaError_t StickyOf(int device) ATTN_REQUIRES(mutex_) { return states_[device].sticky; }

  cudaError_t Ordered(const std::string& what) ATTN_REQUIRES(mutex_) {
    const auto it = orders_.find(what);
    if (it == orders_.end() || it->second.n-- > 0) return cudaSuccess;
    const cudaError_t error = it->second.error;
    orders_.erase(it);
    return error;
  }
  cudaError_t Copy(const char* what, void* to, const void* from, size_t bytes, cudaStream_t stream)
      ATTN_REQUIRES(mutex_) {
    if (const cudaError_t error = Ordered(what); error != cudaSuccess) return error;
    Of(stream).work.push_back({[=] { std::memcpy(to, from, bytes); }, nullptr});
    return StickyOf(Of(stream).device);
  }
  // Runs the stream up to the event, or all of it. After a sticky error nothing runs any more.
  cudaError_t Drain(cudaStream_t stream, cudaEvent_t until) ATTN_REQUIRES(mutex_) {
    Stream& s = Of(stream);
    while (!s.work.empty()) {
      const Work work = std::move(s.work.front());
      s.work.pop_front();
      if (work.event != nullptr) {
        Of(work.event).pending = false;
        if (work.event == until) break;
        continue;
      }
      if (StickyOf(s.device) != cudaSuccess) continue;
      if (const cudaError_t error = Ordered("work"); error != cudaSuccess) {
        states_[s.device].sticky = error;
        continue;
      }
      work.run();
    }
    return StickyOf(s.device);
  }

  const std::string why_;
  int64_t memory_bytes_ = int64_t{1} << 30;
  static thread_local int current_;
  mutable Mutex mutex_;
  std::vector<DeviceState> states_;
  std::deque<Stream> streams_ ATTN_GUARDED_BY(mutex_);
  std::deque<EventState> events_ ATTN_GUARDED_BY(mutex_);
  std::map<std::string, Order> orders_ ATTN_GUARDED_BY(mutex_);
  std::map<void*, Allocation> device_memory_ ATTN_GUARDED_BY(mutex_);
  std::map<void*, size_t> pinned_ ATTN_GUARDED_BY(mutex_);
  std::map<std::byte*, size_t> registered_ ATTN_GUARDED_BY(mutex_);
  int mallocs_ ATTN_GUARDED_BY(mutex_) = 0;
  int copies_to_device_ ATTN_GUARDED_BY(mutex_) = 0;
  size_t bytes_to_device_ ATTN_GUARDED_BY(mutex_) = 0;
};

inline thread_local int FakeDriver::current_ = 0;

}  // namespace attn::cuda

#endif  // ATTN_TESTS_UNIT_CUDA_FAKE_DRIVER_H_
