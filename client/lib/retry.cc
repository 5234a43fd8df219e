#include "client/lib/retry.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

namespace attn::client {
namespace {

using std::chrono::milliseconds;

constexpr double kFirstDelayMs = 100;
constexpr double kMaxDelayMs = 5000;
constexpr milliseconds kCancelPoll{10};

double Jitter() {
  thread_local std::minstd_rand generator(std::random_device{}());
  return std::uniform_real_distribution<double>(0.0, 1.0)(generator);
}

// False: cancelled meanwhile.
bool Wait(milliseconds delay, const std::atomic<bool>* cancel) {
  const auto end = std::chrono::steady_clock::now() + delay;
  if (cancel == nullptr) {
    std::this_thread::sleep_until(end);
    return true;
  }
  while (!cancel->load()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= end) return true;
    std::this_thread::sleep_until(std::min(end, now + kCancelPoll));
  }
  return false;
}

}  // namespace

std::optional<milliseconds> RetryDelay(const AttemptResult& result, int attempt, int max_retries,
                                       double jitter) {
  if (attempt > max_retries) return std::nullopt;
  const bool exhausted = absl::IsResourceExhausted(result.status);
  if (!exhausted && !absl::IsUnavailable(result.status)) return std::nullopt;
  if (exhausted && !result.pushback_ms) return std::nullopt;
  if (result.pushback_ms) {
    if (*result.pushback_ms < 0) return std::nullopt;
    // No wait that makes sense is longer than a day; the cap keeps the arithmetic in range.
    const int64_t ms = std::min<int64_t>(*result.pushback_ms, 86'400'000);
    return milliseconds(ms + std::llround(static_cast<double>(ms) * jitter / 10));
  }
  const double delay = std::min(kMaxDelayMs, kFirstDelayMs * std::exp2(attempt - 1));
  return milliseconds(std::llround(delay * (0.5 + jitter / 2)));
}

AttemptResult RunWithRetries(const CallControl& control, int max_retries, int* attempts,
                             const std::function<AttemptResult()>& attempt) {
  for (*attempts = 1;; ++*attempts) {
    if (control.cancel != nullptr && control.cancel->load()) {
      return {absl::CancelledError("cancelled by the caller"), std::nullopt, {}};
    }
    AttemptResult result = attempt();
    const std::optional<milliseconds> delay = RetryDelay(result, *attempts, max_retries, Jitter());
    if (!delay) return result;
    // A wait that reaches the deadline cannot help: the reason for the failure is worth more now.
    if (control.deadline && std::chrono::system_clock::now() + *delay >= *control.deadline) {
      return result;
    }
    if (!Wait(*delay, control.cancel)) {
      return {absl::CancelledError("cancelled by the caller"), std::nullopt, result.latency};
    }
  }
}

}  // namespace attn::client
