// The last calls of the server with their reports, for whoever looks at it.
#ifndef ATTN_SERVER_RPC_RECENT_CALLS_H_
#define ATTN_SERVER_RPC_RECENT_CALLS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/mutex.h"
#include "kernels/api/problem.h"
#include "server/metrics/metrics.h"

namespace attn::server {

// What a call was about. All 0 where its header was not valid.
struct CallShape {
  Layout layout = Layout::kBshd;
  DType dtype = DType::kFp32;
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0;  // THD: the longest
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0, head_dim_v = 0;
  bool causal = false;
};
CallShape ShapeOf(const AttentionProblem& problem);

struct CallRecord {
  std::chrono::system_clock::time_point ended;
  Method method = Method::kForward;
  std::string request_id;
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string error;  // of the status, cut; text of callers may be in it
  CallShape shape;
  std::string rejections;  // "flash_sm90:NO_CUDA_DEVICE,…"; also of calls that were refused
  std::chrono::nanoseconds handler{0};
  std::string report;  // serialized; empty: the call was not answered. A copy of the message would
                       // cost each call a dozen allocations
  ::attention::v1::ExecutionReport ParseReport() const;
};

// Bounded: the last kCapacity. Thread-safe.
class RecentCalls {
 public:
  static constexpr size_t kCapacity = 64;
  static constexpr size_t kMaxErrorBytes = 300;

  // Cuts the error.
  void Add(CallRecord record) ATTN_EXCLUDES(mutex_);

  // Newest first.
  std::vector<CallRecord> Snapshot() const ATTN_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::array<CallRecord, kCapacity> ring_ ATTN_GUARDED_BY(mutex_);
  size_t next_ ATTN_GUARDED_BY(mutex_) = 0;
  size_t size_ ATTN_GUARDED_BY(mutex_) = 0;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_RECENT_CALLS_H_
