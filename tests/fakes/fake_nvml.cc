// A library with the functions of NVML that attnd uses, over two made-up devices, so that loading
// it is tested on hosts without a GPU. The second does not tell its temperature.
#include <cstring>

#include "server/metrics/nvml_abi.h"

namespace {

int g_starts = 0;
char g_devices[2];  // their addresses are the handles
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;

}  // namespace

extern "C" {

int nvmlInit_v2() {
  ++g_starts;
  return 0;
}
int nvmlShutdown() {
  --g_starts;
  return 0;
}
// For the test alone.
int attn_fake_nvml_starts() { return g_starts; }

const char* nvmlErrorString(int) { return "an error"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  constexpr const char* kIds[] = {"0000:3B:00.0", "0000:86:00.0"};
  for (int i = 0; i < 2; ++i) {
    if (std::strcmp(id, kIds[i]) != 0) continue;
    *device = &g_devices[i];
    return 0;
  }
  return kNotFound;
}
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned int* mhz) {
  *mhz = kind == 1 ? 1755 : 2619;
  return device != nullptr && (kind == 1 || kind == 2) ? 0 : kNotFound;
}
int nvmlDeviceGetMaxClockInfo(void*, int kind, unsigned int* mhz) {
  *mhz = 1980;
  return kind == 1 ? 0 : kNotFound;
}
int nvmlDeviceGetPowerUsage(void*, unsigned int* milliwatts) {
  *milliwatts = 412'500;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned int* milliwatts) {
  *milliwatts = 700'000;
  return 0;
}
int nvmlDeviceGetTemperature(void* device, int, unsigned int* celsius) {
  if (device != &g_devices[0]) return kNotSupported;
  *celsius = 61;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, attn::server::NvmlMemory* memory) {
  *memory = {1000, 600, 400};
  return 0;
}
int nvmlDeviceGetUtilizationRates(void*, attn::server::NvmlUtilization* utilization) {
  *utilization = {87, 40};
  return 0;
}
// A software power cap and a hardware thermal slowdown; the idle bit is no throttling.
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* bits) {
  *bits = 0x1 | 0x4 | 0x40;
  return 0;
}

}  // extern "C"
