#include "server/metrics/sensors.h"

#include <utility>

#include "kernels/api/text.h"

namespace attn::server {

std::string_view Name(Throttle throttle) {
  constexpr std::array<std::string_view, kNumThrottles> kNames = {
      "application_clocks", "software_power_cap", "hardware_slowdown",   "sync_boost",
      "software_thermal",   "hardware_thermal",   "hardware_power_brake"};
  return kNames[static_cast<size_t>(throttle)];
}

void AddSensorMetrics(std::shared_ptr<const DeviceSensors> sensors,
                      const std::vector<SensedDevice>& devices, Metrics* metrics) {
  if (sensors == nullptr || devices.empty()) return;
  const auto add = [&](const char* name, const char* help, Sensor sensor) {
    std::vector<Metrics::LiveSeries> series;
    series.reserve(devices.size());
    for (const SensedDevice& device : devices) {
      series.push_back({{{"index", Cat(device.index)}}, [sensors, device, sensor] {
                          return sensors->Read(device.pci_bus_id, sensor);
                        }});
    }
    metrics->AddLive(name, help, std::move(series));
  };
  add("attn_device_sm_clock_hertz", "Clock of the multiprocessors now.", Sensor::kSmClock);
  add("attn_device_sm_clock_max_hertz", "The highest such clock.", Sensor::kSmClockMax);
  add("attn_device_memory_clock_hertz", "Clock of the device's memory now.", Sensor::kMemoryClock);
  add("attn_device_power_watts", "Power drawn by the device.", Sensor::kPower);
  add("attn_device_power_limit_watts", "Power the device is held to.", Sensor::kPowerLimit);
  add("attn_device_temperature_celsius", "Temperature of the chip.", Sensor::kTemperature);
  add("attn_device_memory_used_bytes", "Device memory in use, by whichever process.",
      Sensor::kMemoryUsed);
  add("attn_device_memory_total_bytes", "Device memory.", Sensor::kMemoryTotal);
  add("attn_device_utilization_ratio", "Share of the last second or less in which a kernel ran.",
      Sensor::kUtilization);
  std::vector<Metrics::LiveSeries> throttles;
  for (const SensedDevice& device : devices) {
    for (size_t i = 0; i < kNumThrottles; ++i) {
      throttles.push_back(
          {{{"index", Cat(device.index)}, {"reason", std::string(Name(static_cast<Throttle>(i)))}},
           [sensors, device, i]() -> std::optional<double> {
             const auto all = sensors->Throttles(device.pci_bus_id);
             if (!all) return std::nullopt;
             return (*all)[i] ? 1 : 0;
           }});
    }
  }
  metrics->AddLive("attn_device_throttled", "1 where the device's clocks are held down, by reason.",
                   std::move(throttles));
}

}  // namespace attn::server
