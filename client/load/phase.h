// One phase of load: calls sent closed loop (a new one when one ends) or open loop (when a schedule
// says so), and what they add up to.
#ifndef ATTN_CLIENT_LOAD_PHASE_H_
#define ATTN_CLIENT_LOAD_PHASE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/load/schedule.h"
#include "client/load/stats.h"
#include "client/load/target.h"
#include "client/load/verify.h"

namespace attn::load {

struct PhaseOptions {
  // Open loop: when calls are due; warm-up included. Null: closed loop.
  std::shared_ptr<Schedule> schedule;
  // Calls in flight at once. Closed loop: exactly this many; open loop: at most. A call that is due
  // while all places are taken waits, its intended time kept, and is sent when a place is free.
  int max_in_flight = 1;

  std::chrono::nanoseconds warm_up{0};
  std::chrono::nanoseconds duration{std::chrono::seconds(10)};  // after the warm-up
  std::optional<int64_t> max_calls;  // no more than this many are sent after the warm-up
  std::chrono::nanoseconds window{std::chrono::seconds(1)};
  // How long calls may still be sent and answered once the time is over. What is then in flight is
  // cancelled; what was due and never sent counts as unsent.
  std::chrono::nanoseconds drain{std::chrono::seconds(10)};

  double stability_tolerance = 0.1;  // see JudgeStability()
  bool judge_stability = true;
  bool until_stable = false;  // end as soon as it is stable
  // Give up when a window's share of failed calls, or its p99 from the intended send, is over this.
  std::optional<double> abort_failed_share;
  std::optional<std::chrono::nanoseconds> abort_p99;

  std::vector<double> weights;  // of the mix's entries; at least one
  uint64_t seed = 0;            // of what is drawn from the mix
  int64_t verify_every = 0;     // every n-th call's results go to the verifier; 0: none
};

enum class PhaseEnd : uint8_t {
  kTime,         // its time was over, or its schedule
  kCalls,        // max_calls were sent
  kStable,       // until_stable
  kAborted,      // a threshold was passed: see `abort_reason`
  kInterrupted,  // by the caller
};

struct PhaseResult {
  explicit PhaseResult(PhaseStats stats_begun) : stats(std::move(stats_begun)) {}

  PhaseStats stats;
  bool open_loop = false;
  int max_in_flight = 1;
  PhaseEnd end = PhaseEnd::kTime;
  std::string abort_reason;
  double measured_seconds = 0;  // after the warm-up, drain not counted
  int64_t offered = 0;          // calls due in that time
  int64_t unsent = 0;           // of those, never sent: latencies are then a lower bound
  Stability stability;
  double cpu_seconds = 0;  // of this process, from start to end, and calls in it, warm-up included
  int64_t cpu_calls = 0;
};

// How a running phase looks, for a person who waits.
struct PhaseProgress {
  double seconds = 0;  // since measuring began; below 0: warming up
  double total_seconds = 0;
  int64_t in_flight = 0;
  const PhaseStats* stats = nullptr;
};

struct PhaseHooks {
  // Set by the user: ends the phase early, with what there is so far.
  const std::atomic<bool>* interrupt = nullptr;
  // Called from the thread in RunPhase(), about ten times a second.
  std::function<void(const PhaseProgress&)> progress;
  // Every call that was measured, from the same thread.
  std::function<void(const CallRecord&)> record;
  Verifier* verifier = nullptr;
};

// Runs the phase on threads of its own, one per place in flight, and returns when all calls have
// ended. Errors: RESOURCE_EXHAUSTED: so many threads cannot be had.
absl::StatusOr<PhaseResult> RunPhase(Target* target, const PhaseOptions& options,
                                     const PhaseHooks& hooks);

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_PHASE_H_
