// All CUDA devices that this process uses: their lanes, memory and health, and who gets which.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_DEVICE_SET_H_
#define ATTN_KERNELS_CUDA_RUNTIME_DEVICE_SET_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "kernels/cuda/runtime/driver.h"
#include "kernels/cuda/runtime/lane.h"
#include "kernels/cuda/runtime/memory_pool.h"

namespace attn::cuda {

struct DeviceSetOptions {
  std::optional<std::vector<int>> indices = std::nullopt;  // as the CUDA runtime counts; unset: all
  int64_t memory_limit_bytes = 0;  // of each device; 0: nine tenths of what is free at the start
  // Calls under way at once on each device. Three keep the copy engines of both directions and the
  // multiprocessors busy; the fourth hides the host's part.
  int lanes = 4;
  // Outputs and scratch memory are NaN before the kernels run, so that what a kernel forgets shows.
#ifdef NDEBUG
  bool poison = false;
#else
  bool poison = true;
#endif
  bool measure_roofline = true;
};

// One device. Thread-safe.
class Device {
 public:
  const DeviceProperties& properties() const { return properties_; }
  const Roofline& roofline() const { return roofline_; }
  int64_t memory_limit_bytes() const { return memory_->stats().budget_bytes; }
  MemoryPool& memory() { return *memory_; }
  bool healthy() const { return healthy_.load(std::memory_order_acquire); }

 private:
  friend class DeviceSet;
  DeviceProperties properties_;
  Roofline roofline_;
  std::unique_ptr<MemoryPool> pinned_;  // before what is made of it
  std::unique_ptr<MemoryPool> memory_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<bool> healthy_{true};
  // Guarded by DeviceSet::mutex_:
  std::vector<Lane*> free_lanes_;
  double load_seconds_ = 0;  // predicted time of the calls under way
  absl::Status error_;       // what made it unhealthy
};

// Thread-safe.
class DeviceSet {
 public:
  struct Health {
    int index = 0;
    bool healthy = true;
    std::string error;  // empty where healthy
  };
  struct Stats {
    int64_t calls = 0;  // begun, ever
    int busy_lanes = 0;
    MemoryPool::Stats memory;
  };

  // Finds the devices and readies each: context, lanes, memory, roofline. A host without one gives
  // an empty set, and why_empty() says why. A device that cannot be readied is left out, with its
  // reason there. Errors: INVALID_ARGUMENT (an index that the host does not have; names it).
  static absl::StatusOr<std::shared_ptr<DeviceSet>> Create(const DeviceSetOptions& options,
                                                           Driver* driver);
  // No call may be under way.
  ~DeviceSet();
  DeviceSet(const DeviceSet&) = delete;
  DeviceSet& operator=(const DeviceSet&) = delete;

  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  bool empty() const { return devices_.empty(); }
  const std::string& why_empty() const { return why_empty_; }
  Driver* driver() const { return driver_; }
  bool poison() const { return poison_; }

  // The right to run one call on a device, until destroyed.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    Device* device() const { return device_; }
    Lane* lane() const { return lane_; }

   private:
    friend class DeviceSet;
    DeviceSet* set_ = nullptr;
    Device* device_ = nullptr;
    Lane* lane_ = nullptr;
    double seconds_ = 0;
  };

  // A free lane on the healthy device with the least predicted work under way, among those that
  // `eligible` (one entry per device) allows. Waits, first come first served. `seconds` is the
  // predicted time of the call. Makes the device the current one. Errors: UNAVAILABLE (no eligible
  // device is healthy: names each and its error), CANCELLED, DEADLINE_EXCEEDED.
  absl::StatusOr<Lease> Acquire(const std::vector<bool>& eligible, double seconds,
                                const CancelToken* cancel) ATTN_EXCLUDES(mutex_);

  // From now on the device gets no call. For errors that leave its context unusable.
  void MarkUnhealthy(Device* device, const absl::Status& error)
      ATTN_EXCLUDES(mutex_, callback_mutex_);
  // Called whenever a device turns unhealthy, on the thread that found out. Once this returns the
  // callback before it is not running any more. The callback must not call back into the set but
  // for health() and healthy_devices().
  void set_on_unhealthy(std::function<void(const Health&)> callback) ATTN_EXCLUDES(callback_mutex_);
  std::vector<Health> health() const ATTN_EXCLUDES(mutex_);
  int healthy_devices() const;

  Stats stats(const Device& device) const ATTN_EXCLUDES(mutex_);
  int waiting() const ATTN_EXCLUDES(mutex_);  // calls in Acquire() now
  // Gives kept device memory back.
  void Trim();

 private:
  explicit DeviceSet(const DeviceSetOptions& options, Driver* driver);
  absl::Status Ready(const DeviceSetOptions& options, Device* device);
  absl::Status NoHealthyDevice(const std::vector<bool>& eligible) const ATTN_REQUIRES(mutex_);
  // Null: none is free now. *any: whether an eligible device is healthy.
  Device* Choose(const std::vector<bool>& eligible, bool* any) const ATTN_REQUIRES(mutex_);
  void Release(Lease* lease) ATTN_EXCLUDES(mutex_);

  Driver* const driver_;
  const bool poison_;
  std::string why_empty_;
  std::vector<std::unique_ptr<Device>> devices_;
  Mutex callback_mutex_;
  std::function<void(const Health&)> on_unhealthy_ ATTN_GUARDED_BY(callback_mutex_);
  mutable Mutex mutex_;
  CondVar changed_;  // a lane was freed, the head of the queue left, or a device turned unhealthy
  uint64_t next_ticket_ ATTN_GUARDED_BY(mutex_) = 0;
  std::vector<uint64_t> waiting_ ATTN_GUARDED_BY(mutex_);
  std::vector<int64_t> calls_ ATTN_GUARDED_BY(mutex_);  // per device
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_DEVICE_SET_H_
