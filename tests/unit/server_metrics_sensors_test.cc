// Sensors through NVML's own interface: the library is loaded from a file, which here is a fake.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/metrics/nvml.h"

namespace attn::server {
namespace {

using testing::HasSubstr;
using testing::Not;

int Starts() {
  void* library = dlopen(ATTN_FAKE_NVML, RTLD_NOW);
  const auto starts = reinterpret_cast<int (*)()>(dlsym(library, "attn_fake_nvml_starts"));
  const int count = starts();
  dlclose(library);
  return count;
}

TEST(NvmlTest, ReadsInBaseUnits) {
  absl::StatusOr<std::shared_ptr<const DeviceSensors>> nvml = OpenNvml(ATTN_FAKE_NVML);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto read = [&](Sensor sensor) { return (*nvml)->Read("0000:3B:00.0", sensor); };
  EXPECT_EQ(read(Sensor::kSmClock), 1755e6);
  EXPECT_EQ(read(Sensor::kSmClockMax), 1980e6);
  EXPECT_EQ(read(Sensor::kMemoryClock), 2619e6);
  EXPECT_EQ(read(Sensor::kPower), 412.5);
  EXPECT_EQ(read(Sensor::kPowerLimit), 700);
  EXPECT_EQ(read(Sensor::kTemperature), 61);
  EXPECT_EQ((*nvml)->Read("0000:86:00.0", Sensor::kTemperature), std::nullopt);
  EXPECT_EQ(read(Sensor::kMemoryUsed), 400);
  EXPECT_EQ(read(Sensor::kMemoryTotal), 1000);
  EXPECT_DOUBLE_EQ(*read(Sensor::kUtilization), 0.87);
  const auto throttles = (*nvml)->Throttles("0000:3B:00.0");
  ASSERT_TRUE(throttles);
  for (size_t i = 0; i < kNumThrottles; ++i) {
    const auto throttle = static_cast<Throttle>(i);
    EXPECT_EQ((*throttles)[i],
              throttle == Throttle::kSoftwarePowerCap || throttle == Throttle::kHardwareThermal)
        << Name(throttle);
  }
}

TEST(NvmlTest, UnknownDeviceTellsNothing) {
  const auto nvml = OpenNvml(ATTN_FAKE_NVML);
  ASSERT_TRUE(nvml.ok());
  EXPECT_EQ((*nvml)->Read("0000:00:00.0", Sensor::kPower), std::nullopt);
  EXPECT_EQ((*nvml)->Throttles("0000:00:00.0"), std::nullopt);
}

TEST(NvmlTest, MissingLibraryOrFunctionIsAnErrorThatNamesIt) {
  const auto none = OpenNvml("libattn_no_such_library.so.1");
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("libattn_no_such_library"));
  const auto other = OpenNvml("libm.so.6");
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("has no nvmlInit_v2"));
}

TEST(NvmlTest, IsShutDownWithTheLastUser) {
  void* keep = dlopen(ATTN_FAKE_NVML, RTLD_NOW);  // or the count would go with the library
  const int before = Starts();
  {
    const auto nvml = OpenNvml(ATTN_FAKE_NVML);
    ASSERT_TRUE(nvml.ok());
    EXPECT_EQ(Starts(), before + 1);
  }
  EXPECT_EQ(Starts(), before);
  dlclose(keep);
}

// Absent, not zero: a sensor that is not told, and a device that NVML does not know.
TEST(SensorMetricsTest, WhatIsNotToldHasNoSeries) {
  auto nvml = OpenNvml(ATTN_FAKE_NVML);
  ASSERT_TRUE(nvml.ok());
  Metrics metrics;
  AddSensorMetrics(*std::move(nvml),
                   {{0, "0000:3B:00.0"}, {1, "0000:86:00.0"}, {2, "0000:00:00.0"}}, &metrics);
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_device_power_watts{index=\"0\"} 412.5"));
  EXPECT_THAT(text, HasSubstr("attn_device_sm_clock_hertz{index=\"0\"} 1755000000"));
  EXPECT_THAT(text, HasSubstr("attn_device_throttled{index=\"0\",reason=\"hardware_thermal\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_device_throttled{index=\"0\",reason=\"sync_boost\"} 0"));
  EXPECT_THAT(text, HasSubstr("attn_device_temperature_celsius{index=\"0\"} 61"));
  EXPECT_THAT(text, HasSubstr("attn_device_power_watts{index=\"1\"} 412.5"));
  EXPECT_THAT(text, Not(HasSubstr("attn_device_temperature_celsius{index=\"1\"}")));
  EXPECT_THAT(text, Not(HasSubstr("index=\"2\"")));
}

TEST(SensorMetricsTest, NoSensorsNoSeries) {
  Metrics metrics;
  AddSensorMetrics(nullptr, {{0, "0000:3B:00.0"}}, &metrics);
  EXPECT_THAT(metrics.Scrape(), Not(HasSubstr("attn_device_power")));
}

}  // namespace
}  // namespace attn::server
