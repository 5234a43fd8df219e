// What every call of the service shares. Owned by Server; outlives all calls.
#ifndef ATTN_SERVER_RPC_SERVICE_CONTEXT_H_
#define ATTN_SERVER_RPC_SERVICE_CONTEXT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/v1/attention.pb.h"
#include "server/config/config.h"
#include "server/execution/admission.h"
#include "server/execution/buffer_pool.h"
#include "server/execution/clock.h"
#include "server/execution/device_hooks.h"
#include "server/execution/executor.h"
#include "server/execution/path_table.h"
#include "server/execution/rates.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_plan.h"
#include "server/rpc/recent_calls.h"
#include "server/rpc/stream_watch.h"

namespace attn::server {

struct ServiceContext {
  // The CUDA device of that index; -1: the first. Null: none.
  const ::attention::v1::DeviceInfo* CudaDevice(int index) const {
    for (const auto& device : devices) {
      if (device.kind() != ::attention::v1::DEVICE_KIND_CUDA) continue;
      if (index < 0 || device.index() == index) return &device;
    }
    return nullptr;
  }

  Config config;  // resolved
  const Clock* clock = nullptr;
  Metrics* metrics = nullptr;
  // Shared: gRPC may hold a reply's slices for a moment after the server has stopped.
  std::shared_ptr<BufferPool> buffers;
  Admission* admission = nullptr;
  Executor* executor = nullptr;
  StreamWatch* watch = nullptr;
  const PathTable* paths = nullptr;
  Rates* rates = nullptr;
  CallPlanCache plans;
  RecentCalls recent;
  DeviceHooks device_hooks;
  std::vector<::attention::v1::DeviceInfo> devices;  // a CPU's rates are filled in when asked for
  // The CPU's rates as measured at start-up: its fastest path, and copying. 0: not measured.
  double host_tflops = 0, host_copy_gb_per_s = 0;
  TimePoint started;
  std::string request_id_prefix;  // differs from process to process
  std::atomic<uint64_t> next_request{1};
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_SERVICE_CONTEXT_H_
