// When a failed attempt is tried again.
#ifndef ATTN_CLIENT_LIB_RETRY_H_
#define ATTN_CLIENT_LIB_RETRY_H_

#include <chrono>
#include <functional>
#include <optional>

#include "client/lib/transport.h"

namespace attn::client {

// How long to wait before attempt `attempt` + 1 (attempts count from 1); nullopt: do not try again.
// UNAVAILABLE, and RESOURCE_EXHAUSTED with a pushback, are retried; a pushback is the least wait, a
// negative one forbids. Without one the wait doubles from 100 ms up to 5 s, and is multiplied by
// 0.5 + jitter / 2, so that clients which failed together do not come back together. `jitter` is in
// [0, 1). A pushback gets up to a tenth on top for the same reason.
std::optional<std::chrono::milliseconds> RetryDelay(const AttemptResult& result, int attempt,
                                                    int max_retries, double jitter);

// Runs `attempt` until it succeeds, may not be retried, or cannot be retried within the deadline;
// gives the last result, the number of attempts in `attempts`. Waits are cut short by
// `control.cancel`, with CANCELLED.
AttemptResult RunWithRetries(const CallControl& control, int max_retries, int* attempts,
                             const std::function<AttemptResult()>& attempt);

}  // namespace attn::client

#endif  // ATTN_CLIENT_LIB_RETRY_H_
