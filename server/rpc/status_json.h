// /status.json: everything that the status page shows.
#ifndef ATTN_SERVER_RPC_STATUS_JSON_H_
#define ATTN_SERVER_RPC_STATUS_JSON_H_

#include <optional>
#include <string>
#include <vector>

#include "kernels/api/mutex.h"
#include "server/execution/self_test.h"
#include "server/rpc/canary_report.h"
#include "server/rpc/service_context.h"
#include "server/status/history.h"
#include "server/status/serving_state.h"

namespace attn::server {

// Thread-safe, except that SetCanary() comes before the first Json().
class StatusJson {
 public:
  // However many pages look on, the server is read this often at most.
  static constexpr std::chrono::milliseconds kMaxAge{500};

  // All must outlive this object.
  StatusJson(const ServiceContext* context, const ServingState* serving, const History* history);
  StatusJson(const StatusJson&) = delete;
  StatusJson& operator=(const StatusJson&) = delete;

  void SetCanary(const CanaryReport* canary) { canary_ = canary; }  // null: there is none
  void NoteSelfTest(const std::vector<SelfTestResult>& results) ATTN_EXCLUDES(mutex_);

  // The document, ASCII; server/README.md has the keys. It was made at most kMaxAge ago. Text of
  // callers and devices may be in it: whoever shows it must show it as text.
  std::string Json() ATTN_EXCLUDES(mutex_);

 private:
  std::string Make() ATTN_REQUIRES(mutex_);

  const ServiceContext* const context_;
  const ServingState* const serving_;
  const History* const history_;
  const CanaryReport* canary_ = nullptr;
  Mutex mutex_;
  std::vector<SelfTestResult> self_test_ ATTN_GUARDED_BY(mutex_);
  std::string plans_ ATTN_GUARDED_BY(mutex_);  // made from this version of the path table
  std::optional<uint64_t> plans_version_ ATTN_GUARDED_BY(mutex_);
  std::string made_ ATTN_GUARDED_BY(mutex_);
  TimePoint made_at_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_STATUS_JSON_H_
