// The backends of this build on this host. The one place, with main, that names them.
#ifndef ATTN_SERVER_BACKENDS_H_
#define ATTN_SERVER_BACKENDS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "kernels/cpu/thread_pool.h"
#include "server/config/config.h"
#include "server/execution/device_hooks.h"
#include "server/metrics/sensors.h"

namespace attn::server {

struct Backends {
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<Rejection> absent;  // why a CUDA path that is compiled in has no backend
  std::vector<::attention::v1::DeviceInfo> devices;  // CUDA devices first
  DeviceHooks hooks;
  std::shared_ptr<const DeviceSensors> sensors;  // null: none
  int lanes = 0;                                 // of all CUDA devices together
};

// Finds and readies the CUDA devices, where the binary has CUDA paths, and makes all backends.
// `pool` outlives them. Errors: INVALID_ARGUMENT (--cuda-devices names a device that is not there).
absl::StatusOr<Backends> MakeBackends(const Config& config, ThreadPool* pool);

}  // namespace attn::server

#endif  // ATTN_SERVER_BACKENDS_H_
