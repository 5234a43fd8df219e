// The server calls itself now and then, so that its path is known to be right also while nobody
// calls, and known to be slow before somebody complains.
#ifndef ATTN_SERVER_EXECUTION_CANARY_H_
#define ATTN_SERVER_EXECUTION_CANARY_H_

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "server/execution/clock.h"
#include "server/execution/executor.h"
#include "server/execution/path_table.h"

namespace attn::server {

// One round is a forward and a backward call of the self-test's problem in BF16, queued as any
// other call, on the path that such a call would take, on each CUDA device where that is a CUDA
// path; results are checked as the self-test checks them. Thread-safe.
class Canary : private Job {
 public:
  struct Result {
    Pass pass = Pass::kForward;
    std::optional<PathId> path;  // nullopt: no path takes the call, or it was not run
    int device = -1;             // of a CUDA path, as the CUDA runtime counts
    // What the path answered, INTERNAL where the result is wrong; DEADLINE_EXCEEDED: the round
    // still waited for a worker after `timeout`.
    absl::Status status;
    std::chrono::nanoseconds latency{0};  // from the round's start
  };

  // `report` is called for each result, on the worker's thread. All arguments must outlive this
  // object, and the executor must be shut down before it goes.
  Canary(const PathTable* paths, Executor* executor, const Clock* clock,
         std::vector<int> cuda_devices, std::chrono::nanoseconds timeout,
         std::function<void(const Result&)> report);
  Canary(const Canary&) = delete;
  Canary& operator=(const Canary&) = delete;

  // Queues a round, unless the one before is not over.
  void Start() ATTN_EXCLUDES(mutex_);

  // Since the last round that ran was over; where none has been, since this object was made.
  std::chrono::nanoseconds age() const ATTN_EXCLUDES(mutex_);

 private:
  void Run() override;
  void Drop(const absl::Status& status) override;
  const CancelToken& token() const override { return token_; }
  TimePoint deadline() const override { return started_ + timeout_; }
  uint64_t bytes() const override { return 0; }

  void RunPass(Pass pass);
  void Report(Pass pass, std::optional<PathId> path, int device, const absl::Status& status) const;

  const PathTable* const paths_;
  Executor* const executor_;
  const Clock* const clock_;
  const std::vector<int> cuda_devices_;
  const std::chrono::nanoseconds timeout_;
  const std::function<void(const Result&)> report_;
  const CancelToken token_;
  TimePoint started_;  // of the round under way; constant while there is one
  mutable Mutex mutex_;
  bool under_way_ ATTN_GUARDED_BY(mutex_) = false;
  TimePoint last_ran_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_CANARY_H_
