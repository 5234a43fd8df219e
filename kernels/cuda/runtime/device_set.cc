#include "kernels/cuda/runtime/device_set.h"

#include <algorithm>
#include <utility>

#include "kernels/api/text.h"
#include "kernels/cuda/runtime/token_wait.h"

namespace attn::cuda {
namespace {

// What cudaMalloc() hands out in one piece anyway.
constexpr int64_t kSmallestBlock = int64_t{2} << 20;

MemoryPool::Source DeviceMemory(Driver* driver, int index) {
  return {.allocate = [driver, index](int64_t bytes) -> absl::StatusOr<void*> {
            void* data = nullptr;
            cudaError_t error = driver->SetDevice(index);
            if (error == cudaSuccess) error = driver->Malloc(&data, static_cast<size_t>(bytes));
            if (error == cudaSuccess) return data;
            driver->TakeError();
            return ToStatus(error, Cat("allocating ", bytes, " bytes on CUDA device ", index));
          },
          .free =
              [driver, index](void* data) {
                driver->SetDevice(index);
                driver->Free(data);  // fails only where the device has, and then it does not matter
              }};
}

MemoryPool::Source PinnedMemory(Driver* driver) {
  return {.allocate = [driver](int64_t bytes) -> absl::StatusOr<void*> {
            void* data = nullptr;
            const cudaError_t error = driver->MallocHost(&data, static_cast<size_t>(bytes));
            if (error == cudaSuccess) return data;
            driver->TakeError();
            return ToStatus(error, Cat("allocating ", bytes, " bytes of page-locked memory"));
          },
          .free = [driver](void* data) { driver->FreeHost(data); }};
}

std::string Describe(const Device& device) {
  return Cat("CUDA device ", device.properties().index, " (", device.properties().name, ")");
}

absl::StatusOr<std::vector<DeviceProperties>> Wanted(const DeviceSetOptions& options,
                                                     std::vector<DeviceProperties> found,
                                                     const std::string& why) {
  if (!options.indices) return found;
  std::vector<DeviceProperties> wanted;
  for (int index : *options.indices) {
    const auto it = std::find_if(found.begin(), found.end(),
                                 [index](const DeviceProperties& d) { return d.index == index; });
    if (it == found.end()) {
      return absl::InvalidArgumentError(Cat("CUDA device ", index,
                                            " does not exist: this host has ", found.size(),
                                            why.empty() ? "" : Cat(" (", why, ")")));
    }
    wanted.push_back(*it);
  }
  return wanted;
}

}  // namespace

DeviceSet::DeviceSet(const DeviceSetOptions& options, Driver* driver)
    : driver_(driver), poison_(options.poison) {}

DeviceSet::~DeviceSet() {
  for (const auto& device : devices_) driver_->SetDevice(device->properties().index);
}

absl::StatusOr<std::shared_ptr<DeviceSet>> DeviceSet::Create(const DeviceSetOptions& options,
                                                             Driver* driver) {
  std::shared_ptr<DeviceSet> set(new DeviceSet(options, driver));
  if (options.indices && options.indices->empty()) {
    set->why_empty_ = "the configuration names no device";
    return set;
  }
  absl::StatusOr<std::vector<DeviceProperties>> wanted =
      Wanted(options, driver->FindDevices(&set->why_empty_), set->why_empty_);
  if (!wanted.ok()) return wanted.status();
  for (DeviceProperties& properties : *wanted) {
    auto device = std::make_unique<Device>();
    device->properties_ = std::move(properties);
    if (absl::Status s = set->Ready(options, device.get()); !s.ok()) {
      set->why_empty_ += Cat(set->why_empty_.empty() ? "" : "; ", Describe(*device), ": ",
                             std::string(s.message()));
      continue;
    }
    set->devices_.push_back(std::move(device));
  }
  MutexLock lock(set->mutex_);
  set->calls_.resize(set->devices_.size());
  return set;
}

absl::Status DeviceSet::Ready(const DeviceSetOptions& options, Device* device) {
  const int index = device->properties_.index;
  cudaError_t error = driver_->SetDevice(index);
  int64_t free_bytes = 0;
  if (error == cudaSuccess) error = driver_->FreeMemory(&free_bytes);  // makes the context
  if (error != cudaSuccess) {
    driver_->TakeError();
    return ToStatus(error, "starting the device");
  }
  if (options.measure_roofline) {
    if (absl::Status s = driver_->MeasureRoofline(device->properties_, &device->roofline_);
        !s.ok()) {
      return s;
    }
  }
  const int lanes = std::max(options.lanes, 1);
  device->pinned_ = std::make_unique<MemoryPool>(
      MemoryPool::Options{.name = Cat("page-locked memory of CUDA device ", index),
                          .budget_bytes = lanes * Lane::kPinnedBytes,
                          .smallest_bytes = Lane::kChunkBytes},
      PinnedMemory(driver_));
  const int64_t limit =
      options.memory_limit_bytes > 0 ? options.memory_limit_bytes : free_bytes / 10 * 9;
  device->memory_ =
      std::make_unique<MemoryPool>(MemoryPool::Options{.name = Cat("memory of CUDA device ", index),
                                                       .budget_bytes = limit,
                                                       .smallest_bytes = kSmallestBlock},
                                   DeviceMemory(driver_, index));
  for (int i = 0; i < lanes; ++i) {
    absl::StatusOr<std::unique_ptr<Lane>> lane = Lane::Create(driver_, device->pinned_.get());
    if (!lane.ok()) return lane.status();
    device->free_lanes_.push_back(lane->get());
    device->lanes_.push_back(*std::move(lane));
  }
  return absl::OkStatus();
}

DeviceSet::Lease& DeviceSet::Lease::operator=(Lease&& other) noexcept {
  std::swap(set_, other.set_);
  std::swap(device_, other.device_);
  std::swap(lane_, other.lane_);
  std::swap(seconds_, other.seconds_);
  return *this;
}

DeviceSet::Lease::~Lease() {
  if (set_ != nullptr) set_->Release(this);
}

Device* DeviceSet::Choose(const std::vector<bool>& eligible, bool* any) const {
  Device* best = nullptr;
  size_t best_at = 0;
  for (size_t i = 0; i < devices_.size(); ++i) {
    Device* device = devices_[i].get();
    if (!eligible[i] || !device->healthy()) continue;
    *any = true;
    if (device->free_lanes_.empty()) continue;
    const bool better =
        best == nullptr || device->load_seconds_ < best->load_seconds_ ||
        (device->load_seconds_ == best->load_seconds_ && calls_[i] < calls_[best_at]);
    if (!better) continue;
    best = device;
    best_at = i;
  }
  return best;
}

absl::Status DeviceSet::NoHealthyDevice(const std::vector<bool>& eligible) const {
  std::string text = "no healthy CUDA device can run this call";
  std::string_view separator = ": ";
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (!eligible[i] || devices_[i]->healthy()) continue;
    text += Cat(separator, Describe(*devices_[i]),
                " failed earlier: ", std::string(devices_[i]->error_.message()));
    separator = "; ";
  }
  return absl::UnavailableError(text);
}

absl::StatusOr<DeviceSet::Lease> DeviceSet::Acquire(const std::vector<bool>& eligible,
                                                    double seconds, const CancelToken* cancel) {
  Lease lease;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    waiting_.push_back(ticket);
    while (true) {
      if (cancel != nullptr) status = cancel->Check();
      if (!status.ok()) break;
      bool any = false;
      Device* device = Choose(eligible, &any);
      if (!any) {
        status = NoHealthyDevice(eligible);
        break;
      }
      if (device != nullptr && waiting_.front() == ticket) {
        lease.set_ = this;
        lease.device_ = device;
        lease.lane_ = device->free_lanes_.back();
        lease.seconds_ = seconds;
        device->free_lanes_.pop_back();
        device->load_seconds_ += seconds;
        const auto at = std::find_if(devices_.begin(), devices_.end(),
                                     [device](const auto& d) { return d.get() == device; });
        ++calls_[static_cast<size_t>(at - devices_.begin())];
        break;
      }
      WaitOnce(changed_, mutex_, cancel);
    }
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), ticket));
  }
  changed_.NotifyAll();
  if (!status.ok()) return status;
  if (const cudaError_t error = driver_->SetDevice(lease.device_->properties().index);
      error != cudaSuccess) {
    status = ToStatus(error, Describe(*lease.device_));
    if (IsSticky(error)) MarkUnhealthy(lease.device_, status);
    return status;
  }
  return lease;
}

void DeviceSet::Release(Lease* lease) {
  {
    MutexLock lock(mutex_);
    Device* device = lease->device_;
    device->free_lanes_.push_back(lease->lane_);
    // Sums of doubles drift: nothing under way is exactly nothing.
    device->load_seconds_ = device->free_lanes_.size() == device->lanes_.size()
                                ? 0
                                : device->load_seconds_ - lease->seconds_;
  }
  changed_.NotifyAll();
}

void DeviceSet::MarkUnhealthy(Device* device, const absl::Status& error) {
  {
    MutexLock lock(mutex_);
    if (!device->healthy()) return;
    device->error_ = error;
    device->healthy_.store(false, std::memory_order_release);
  }
  changed_.NotifyAll();
  MutexLock lock(callback_mutex_);
  if (on_unhealthy_) {
    on_unhealthy_({.index = device->properties().index,
                   .healthy = false,
                   .error = std::string(error.message())});
  }
}

void DeviceSet::set_on_unhealthy(std::function<void(const Health&)> callback) {
  MutexLock lock(callback_mutex_);
  on_unhealthy_ = std::move(callback);
}

std::vector<DeviceSet::Health> DeviceSet::health() const {
  MutexLock lock(mutex_);
  std::vector<Health> all;
  for (const auto& device : devices_) {
    all.push_back({.index = device->properties().index,
                   .healthy = device->healthy(),
                   .error = std::string(device->error_.message())});
  }
  return all;
}

int DeviceSet::healthy_devices() const {
  return static_cast<int>(std::count_if(devices_.begin(), devices_.end(),
                                        [](const auto& device) { return device->healthy(); }));
}

DeviceSet::Stats DeviceSet::stats(const Device& device) const {
  Stats stats;
  stats.memory = device.memory_->stats();
  MutexLock lock(mutex_);
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].get() != &device) continue;
    stats.calls = calls_[i];
    stats.busy_lanes = static_cast<int>(device.lanes_.size() - device.free_lanes_.size());
  }
  return stats;
}

int DeviceSet::waiting() const {
  MutexLock lock(mutex_);
  return static_cast<int>(waiting_.size());
}

void DeviceSet::Trim() {
  for (const auto& device : devices_) {
    if (device->healthy()) device->memory_->Trim();
  }
}

}  // namespace attn::cuda
