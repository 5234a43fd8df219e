// Decides which calls may hold memory: by count and by bytes.
#ifndef ATTN_SERVER_EXECUTION_ADMISSION_H_
#define ATTN_SERVER_EXECUTION_ADMISSION_H_

#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/mutex.h"
#include "server/execution/clock.h"

namespace attn::server {

// Thread-safe.
class Admission {
 public:
  struct Limits {
    int64_t max_requests = 256;
    uint64_t max_bytes = 0;          // of all calls at once
    uint64_t max_request_bytes = 0;  // of one call
  };

  // The right to hold the bytes that were asked for, until destroyed.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept { *this = std::move(other); }
    Ticket& operator=(Ticket&& other) noexcept {
      std::swap(admission_, other.admission_);
      std::swap(bytes_, other.bytes_);
      std::swap(since_, other.since_);
      return *this;
    }
    ~Ticket() { Release(); }
    void Release();
    bool valid() const { return admission_ != nullptr; }
    uint64_t bytes() const { return bytes_; }

   private:
    friend class Admission;
    Ticket(Admission* admission, uint64_t bytes, TimePoint since)
        : admission_(admission), bytes_(bytes), since_(since) {}
    Admission* admission_ = nullptr;
    uint64_t bytes_ = 0;
    TimePoint since_;
  };

  struct Stats {
    int64_t requests = 0;
    uint64_t bytes = 0;
  };

  Admission(const Limits& limits, const Clock* clock) : limits_(limits), clock_(clock) {}
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  // `tensor_bytes` go in and out of the call; `workspace_bytes` is its scratch memory. Errors:
  // UNAVAILABLE while draining. RESOURCE_EXHAUSTED: the call is over a limit by itself (retrying is
  // pointless and `*retry` is left alone), or the server is full now (`*retry` is set to when to
  // try again). Messages name both numbers.
  absl::StatusOr<Ticket> Admit(uint64_t tensor_bytes, uint64_t workspace_bytes,
                               std::chrono::milliseconds* retry) ATTN_EXCLUDES(mutex_);

  // From now on Admit() answers UNAVAILABLE.
  void BeginDrain() ATTN_EXCLUDES(mutex_);
  bool draining() const ATTN_EXCLUDES(mutex_);

  // Waits until no ticket is out; false where `deadline` comes first or Hasten() is called.
  bool WaitIdle(TimePoint deadline) ATTN_EXCLUDES(mutex_);
  void Hasten() ATTN_EXCLUDES(mutex_);

  Stats stats() const ATTN_EXCLUDES(mutex_);

 private:
  void Release(uint64_t bytes, TimePoint since) ATTN_EXCLUDES(mutex_);

  const Limits limits_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  CondVar idle_;
  Stats stats_ ATTN_GUARDED_BY(mutex_);
  bool draining_ ATTN_GUARDED_BY(mutex_) = false;
  bool hasten_ ATTN_GUARDED_BY(mutex_) = false;
  // Moving average of how long tickets are held, for the retry hint.
  std::chrono::nanoseconds average_hold_ ATTN_GUARDED_BY(mutex_) = std::chrono::milliseconds(10);
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_ADMISSION_H_
