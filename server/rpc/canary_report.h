// The canary of a server: its timer, what it exports, what it logs.
#ifndef ATTN_SERVER_RPC_CANARY_REPORT_H_
#define ATTN_SERVER_RPC_CANARY_REPORT_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/execution/canary.h"
#include "server/execution/periodic.h"
#include "server/rpc/service_context.h"

namespace attn::server {

// Made where --canary-interval is not 0. The metrics' live gauges must be removed, and the executor
// shut down, before this object goes.
class CanaryReport {
 public:
  explicit CanaryReport(const ServiceContext& context);

  // No round starts after this. Call before the executor is shut down.
  void Stop() { timer_.reset(); }

  // The last result on each device where one is known, and the time since a round last ran. Both
  // thread-safe.
  struct Last {
    std::string device;  // "cpu", "cuda:0", …
    Pass pass = Pass::kForward;
    bool ok = false;
  };
  std::vector<Last> last() const ATTN_EXCLUDES(mutex_);
  std::chrono::nanoseconds age() const { return canary_.age(); }

 private:
  void Note(const Canary::Result& result);
  std::optional<double> Ok(Pass pass, const std::string& device) const;

  Metrics* const metrics_;
  mutable Mutex mutex_;
  // The last result by pass and device: "cpu", "cuda:0", …
  std::map<std::pair<Pass, std::string>, bool> ok_ ATTN_GUARDED_BY(mutex_);
  Canary canary_;
  std::unique_ptr<Periodic> timer_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_CANARY_REPORT_H_
