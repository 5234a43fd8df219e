#include "kernels/api/backend.h"

namespace attn {

absl::Status CancelToken::Check() const {
  if (cancelled()) return absl::CancelledError("the call was cancelled");
  // No clock is read where there is no deadline: this runs once per tile.
  if (deadline_ != std::chrono::steady_clock::time_point::max() && expired()) {
    return absl::DeadlineExceededError("the deadline passed while attention was running");
  }
  return absl::OkStatus();
}

}  // namespace attn
