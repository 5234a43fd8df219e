// Stops the workers of one call early.
#ifndef ATTN_KERNELS_CPU_STOP_FLAG_H_
#define ATTN_KERNELS_CPU_STOP_FLAG_H_

#include <atomic>

#include "absl/status/status.h"
#include "kernels/api/backend.h"

namespace attn {

// Looks at the caller's CancelToken and remembers that it said stop. Thread-safe.
class StopFlag {
 public:
  explicit StopFlag(const CancelToken* cancel) : cancel_(cancel) {}

  // Whether to give up; called between tiles.
  bool ShouldStop() {
    if (cancel_ == nullptr) return false;
    if (stopped_.load(std::memory_order_relaxed)) return true;
    if (!cancel_->cancelled() && !cancel_->expired()) return false;
    stopped_.store(true, std::memory_order_relaxed);
    return true;
  }

  // OK unless some worker stopped.
  absl::Status status() const {
    return stopped_.load(std::memory_order_relaxed) ? cancel_->Check() : absl::OkStatus();
  }

 private:
  const CancelToken* cancel_;
  std::atomic<bool> stopped_{false};
};

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_STOP_FLAG_H_
