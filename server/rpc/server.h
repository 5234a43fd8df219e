// A running attnd: everything but the process around it, so that tests can start one.
#ifndef ATTN_SERVER_RPC_SERVER_H_
#define ATTN_SERVER_RPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/backend.h"
#include "server/config/config.h"
#include "server/execution/clock.h"
#include "server/execution/device_hooks.h"
#include "server/execution/path_table.h"
#include "server/execution/self_test.h"
#include "server/metrics/metrics.h"
#include "server/metrics/sensors.h"
#include "server/rpc/recent_calls.h"

namespace attn::server {

struct ServerOptions {
  Config config;  // checked; Resolve() is called by Start()
  std::vector<std::unique_ptr<Backend>> backends;
  // Why a path that is compiled in has no backend; other paths without one stand as NOT_BUILT.
  std::vector<Rejection> absent = {};
  std::vector<::attention::v1::DeviceInfo> devices;
  DeviceHooks device_hooks = {};
  std::shared_ptr<const DeviceSensors> sensors = nullptr;  // null: none
  const Clock* clock = Clock::Real();
  bool self_test = true;      // run SelfTestAll() before serving
  bool measure_rates = true;  // for Plan's predictions
};

// Thread-safe.
class Server {
 public:
  // Returns when the server takes calls. Errors: INVALID_ARGUMENT (a setting; a TLS file),
  // UNAVAILABLE (an address is in use; names it), INTERNAL.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);

  // Stops at once where Drain() was not called.
  virtual ~Server() = default;

  // The addresses of --listen with the ports that were bound.
  virtual const std::vector<std::string>& addresses() const = 0;
  virtual std::string metrics_address() const = 0;  // empty: none

  // Stops serving, in this order: health turns NOT_SERVING and /readyz 503, and from then on new
  // calls are refused with UNAVAILABLE; calls in flight may finish within config.drain_timeout;
  // what is left is cancelled; the listeners close; workers stop. True where every call finished by
  // itself. Call once.
  virtual bool Drain() = 0;
  // Makes a Drain() in progress stop waiting.
  virtual void Hasten() = 0;

  // Applies what may change while serving: disable_path, where a path that comes back and was not
  // tested yet passes its self-test first, and log_level. Other differences from the settings in
  // force are named in the log and wait for a restart. Errors: INVALID_ARGUMENT; nothing is changed
  // then.
  virtual absl::Status Reload(const Config& config) = 0;

  virtual Metrics& metrics() = 0;
  virtual const PathTable& paths() const = 0;
  virtual const RecentCalls& recent_calls() const = 0;
  virtual const std::vector<SelfTestResult>& self_test_results() const = 0;
};

// Which of the devices are CUDA devices, as the CUDA runtime counts.
std::vector<int> CudaIndices(const std::vector<::attention::v1::DeviceInfo>& devices);

// Writes {"listen": [...], "metrics": "..."} to `path`, so that a reader sees all of it or nothing.
absl::Status WritePortsFile(const std::string& path, const Server& server);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_SERVER_H_
