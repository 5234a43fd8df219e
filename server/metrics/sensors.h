// What a GPU's driver tells of the device itself: clocks, power, temperature, memory, throttling.
#ifndef ATTN_SERVER_METRICS_SENSORS_H_
#define ATTN_SERVER_METRICS_SENSORS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/metrics/metrics.h"

namespace attn::server {

enum class Sensor : uint8_t {
  kSmClock,
  kSmClockMax,
  kMemoryClock,
  kPower,
  kPowerLimit,
  kTemperature,
  kMemoryUsed,
  kMemoryTotal,
  kUtilization
};

// Why a device runs below the clocks it could have. An idle device is not throttled.
enum class Throttle : uint8_t {
  kApplicationClocks,
  kSoftwarePowerCap,
  kHardwareSlowdown,
  kSyncBoost,
  kSoftwareThermal,
  kHardwareThermal,
  kHardwarePowerBrake
};
inline constexpr size_t kNumThrottles = 7;
std::string_view Name(Throttle throttle);  // "application_clocks", …

// Thread-safe. Devices are named by PCI bus id, because the driver's count and the CUDA runtime's
// may differ.
class DeviceSensors {
 public:
  virtual ~DeviceSensors() = default;

  // In base units: hertz, watts, degrees Celsius, bytes; utilisation 0 to 1. nullopt: not told.
  virtual std::optional<double> Read(const std::string& pci_bus_id, Sensor sensor) const = 0;
  // By Throttle. nullopt: not told.
  virtual std::optional<std::array<bool, kNumThrottles>> Throttles(
      const std::string& pci_bus_id) const = 0;
};

struct SensedDevice {
  int index = 0;  // as the CUDA runtime counts: the label
  std::string pci_bus_id;
};

// Adds a live gauge for each sensor. A series that the driver does not tell is absent.
void AddSensorMetrics(std::shared_ptr<const DeviceSensors> sensors,
                      const std::vector<SensedDevice>& devices, Metrics* metrics);

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_SENSORS_H_
