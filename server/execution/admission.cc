#include "server/execution/admission.h"

#include <algorithm>

#include "kernels/api/text.h"

namespace attn::server {
namespace {

// Bounds of the retry hint: under 5 ms a retry storm costs more than it gains; over 5 s the client
// is better served by its own backoff.
constexpr std::chrono::milliseconds kMinRetry{5};
constexpr std::chrono::milliseconds kMaxRetry{5000};

}  // namespace

absl::StatusOr<Admission::Ticket> Admission::Admit(uint64_t tensor_bytes, uint64_t workspace_bytes,
                                                   std::chrono::milliseconds* retry) {
  const uint64_t bytes = tensor_bytes + workspace_bytes;
  MutexLock lock(mutex_);
  if (draining_) return absl::UnavailableError("the server is draining");
  if (tensor_bytes > limits_.max_request_bytes) {
    return absl::ResourceExhaustedError(Cat("the call moves ", tensor_bytes,
                                            " tensor bytes in and out; the limit is ",
                                            limits_.max_request_bytes, " (--max-request-bytes)"));
  }
  if (bytes > limits_.max_bytes) {
    return absl::ResourceExhaustedError(Cat("the call needs ", bytes, " bytes, of which ",
                                            workspace_bytes,
                                            " scratch memory; the server holds at most ",
                                            limits_.max_bytes, " at once (--max-inflight-bytes)"));
  }
  absl::Status full;
  if (stats_.requests >= limits_.max_requests) {
    full = absl::ResourceExhaustedError(Cat("the server is full: ", stats_.requests,
                                            " calls in flight; the limit is ", limits_.max_requests,
                                            " (--max-inflight-requests)"));
  } else if (bytes > limits_.max_bytes - stats_.bytes) {
    full = absl::ResourceExhaustedError(
        Cat("the server is full: the call needs ", bytes, " bytes, ", stats_.bytes,
            " are in flight; the limit is ", limits_.max_bytes, " (--max-inflight-bytes)"));
  }
  if (!full.ok()) {
    *retry = std::clamp(std::chrono::ceil<std::chrono::milliseconds>(average_hold_), kMinRetry,
                        kMaxRetry);
    return full;
  }
  ++stats_.requests;
  stats_.bytes += bytes;
  return Ticket(this, bytes, clock_->Now());
}

void Admission::Ticket::Release() {
  if (admission_ == nullptr) return;
  std::exchange(admission_, nullptr)->Release(bytes_, since_);
}

void Admission::Release(uint64_t bytes, TimePoint since) {
  const TimePoint now = clock_->Now();
  MutexLock lock(mutex_);
  --stats_.requests;
  stats_.bytes -= bytes;
  average_hold_ += (now - since - average_hold_) / 16;
  if (stats_.requests == 0) idle_.NotifyAll();
}

void Admission::BeginDrain() {
  MutexLock lock(mutex_);
  draining_ = true;
}

bool Admission::draining() const {
  MutexLock lock(mutex_);
  return draining_;
}

bool Admission::WaitIdle(TimePoint deadline) {
  MutexLock lock(mutex_);
  while (stats_.requests > 0 && !hasten_) {
    if (!idle_.WaitUntil(mutex_, deadline)) break;
  }
  return stats_.requests == 0;
}

void Admission::Hasten() {
  MutexLock lock(mutex_);
  hasten_ = true;
  idle_.NotifyAll();
}

Admission::Stats Admission::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

}  // namespace attn::server
