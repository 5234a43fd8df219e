// Sensors of NVIDIA devices, through the driver's NVML library. It is loaded at run time, so that
// attnd starts on hosts without a driver, and what is used of it is declared in nvml.cc.
#ifndef ATTN_SERVER_METRICS_NVML_H_
#define ATTN_SERVER_METRICS_NVML_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/sensors.h"

namespace attn::server {

// Loads the library, under the name that the driver installs it as or from a path. Errors:
// UNAVAILABLE: there is no such library, it lacks a function, or NVML does not start; says which.
absl::StatusOr<std::shared_ptr<const DeviceSensors>> OpenNvml(
    const std::string& library = "libnvidia-ml.so.1");

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_NVML_H_
