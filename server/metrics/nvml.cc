#include "server/metrics/nvml.h"

#include <dlfcn.h>

#include <map>
#include <utility>

#include "kernels/api/mutex.h"
#include "kernels/api/text.h"
#include "server/metrics/nvml_abi.h"

namespace attn::server {
namespace {

// Declarations of what is used. Source: NVML API Reference Guide; the ABI has been stable since
// driver 4xx.
using Handle = void*;  // nvmlDevice_t
using Return = int;    // nvmlReturn_t
constexpr Return kSuccess = 0;
constexpr int kClockSm = 1;      // NVML_CLOCK_SM
constexpr int kClockMemory = 2;  // NVML_CLOCK_MEM
constexpr int kTemperatureGpu = 0;
struct Api {
  Return (*init)();
  Return (*shutdown)();
  const char* (*error_string)(Return);
  Return (*by_pci_bus_id)(const char*, Handle*);
  Return (*clock)(Handle, int, unsigned int*);        // MHz
  Return (*max_clock)(Handle, int, unsigned int*);    // MHz
  Return (*power)(Handle, unsigned int*);             // milliwatts
  Return (*power_limit)(Handle, unsigned int*);       // milliwatts
  Return (*temperature)(Handle, int, unsigned int*);  // degrees Celsius
  Return (*memory)(Handle, NvmlMemory*);
  Return (*utilization)(Handle, NvmlUtilization*);
  Return (*throttle_reasons)(Handle, unsigned long long*);  // NOLINT(google-runtime-int)
};

// Bits of nvmlDeviceGetCurrentClocksThrottleReasons, by Throttle.
constexpr std::array<uint64_t, kNumThrottles> kThrottleBits = {0x2,  0x4,  0x8, 0x10,
                                                               0x20, 0x40, 0x80};

class Nvml final : public DeviceSensors {
 public:
  Nvml(void* library, const Api& api) : library_(library), api_(api) {}
  ~Nvml() override {
    api_.shutdown();
    dlclose(library_);
  }

  std::optional<double> Read(const std::string& pci_bus_id, Sensor sensor) const override {
    const Handle device = Find(pci_bus_id);
    if (device == nullptr) return std::nullopt;
    unsigned int value = 0;
    const auto scaled = [&value](Return result, double unit) -> std::optional<double> {
      if (result != kSuccess) return std::nullopt;
      return unit * value;
    };
    switch (sensor) {
      case Sensor::kSmClock:
        return scaled(api_.clock(device, kClockSm, &value), 1e6);
      case Sensor::kSmClockMax:
        return scaled(api_.max_clock(device, kClockSm, &value), 1e6);
      case Sensor::kMemoryClock:
        return scaled(api_.clock(device, kClockMemory, &value), 1e6);
      case Sensor::kPower:
        return scaled(api_.power(device, &value), 1e-3);
      case Sensor::kPowerLimit:
        return scaled(api_.power_limit(device, &value), 1e-3);
      case Sensor::kTemperature:
        return scaled(api_.temperature(device, kTemperatureGpu, &value), 1);
      case Sensor::kMemoryUsed:
      case Sensor::kMemoryTotal: {
        NvmlMemory memory{};
        if (api_.memory(device, &memory) != kSuccess) return std::nullopt;
        return static_cast<double>(sensor == Sensor::kMemoryUsed ? memory.used : memory.total);
      }
      case Sensor::kUtilization: {
        NvmlUtilization utilization{};
        if (api_.utilization(device, &utilization) != kSuccess) return std::nullopt;
        return 0.01 * utilization.gpu;
      }
    }
    return std::nullopt;
  }

  std::optional<std::array<bool, kNumThrottles>> Throttles(
      const std::string& pci_bus_id) const override {
    const Handle device = Find(pci_bus_id);
    unsigned long long bits = 0;  // NOLINT(google-runtime-int)
    if (device == nullptr || api_.throttle_reasons(device, &bits) != kSuccess) return std::nullopt;
    std::array<bool, kNumThrottles> all{};
    for (size_t i = 0; i < kNumThrottles; ++i) all[i] = (bits & kThrottleBits[i]) != 0;
    return all;
  }

 private:
  // Null: NVML does not know the device.
  Handle Find(const std::string& pci_bus_id) const {
    MutexLock lock(mutex_);
    const auto [entry, is_new] = devices_.try_emplace(pci_bus_id, nullptr);
    if (is_new && api_.by_pci_bus_id(pci_bus_id.c_str(), &entry->second) != kSuccess) {
      entry->second = nullptr;
    }
    return entry->second;
  }

  void* const library_;
  const Api api_;
  mutable Mutex mutex_;
  mutable std::map<std::string, Handle> devices_ ATTN_GUARDED_BY(mutex_);
};

// Looks up a function; remembers the first name that is missing.
template <typename Function>
void Load(void* library, const char* name, Function* function, const char** missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && *missing == nullptr) *missing = name;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceSensors>> OpenNvml(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return absl::UnavailableError(Cat("NVML: ", why == nullptr ? name.c_str() : why));
  }
  Api api{};
  const char* missing = nullptr;
  Load(library, "nvmlInit_v2", &api.init, &missing);
  Load(library, "nvmlShutdown", &api.shutdown, &missing);
  Load(library, "nvmlErrorString", &api.error_string, &missing);
  Load(library, "nvmlDeviceGetHandleByPciBusId_v2", &api.by_pci_bus_id, &missing);
  Load(library, "nvmlDeviceGetClockInfo", &api.clock, &missing);
  Load(library, "nvmlDeviceGetMaxClockInfo", &api.max_clock, &missing);
  Load(library, "nvmlDeviceGetPowerUsage", &api.power, &missing);
  Load(library, "nvmlDeviceGetEnforcedPowerLimit", &api.power_limit, &missing);
  Load(library, "nvmlDeviceGetTemperature", &api.temperature, &missing);
  Load(library, "nvmlDeviceGetMemoryInfo", &api.memory, &missing);
  Load(library, "nvmlDeviceGetUtilizationRates", &api.utilization, &missing);
  Load(library, "nvmlDeviceGetCurrentClocksThrottleReasons", &api.throttle_reasons, &missing);
  if (missing != nullptr) {
    dlclose(library);
    return absl::UnavailableError(Cat("NVML: ", name, " has no ", missing));
  }
  if (const Return result = api.init(); result != kSuccess) {
    const std::string why = api.error_string(result);
    dlclose(library);
    return absl::UnavailableError(Cat("NVML does not start: ", why));
  }
  return std::make_shared<const Nvml>(library, api);
}

}  // namespace attn::server
