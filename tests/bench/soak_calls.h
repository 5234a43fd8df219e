// The random calls of the soak.
#ifndef ATTN_TESTS_BENCH_SOAK_CALLS_H_
#define ATTN_TESTS_BENCH_SOAK_CALLS_H_

#include <cstdint>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "client/lib/client.h"

namespace attn::bench {

using Rng = std::mt19937_64;

enum class CallKind {
  kForward,       // random shape and options, checked where the answer is known
  kBackward,      // as above
  kLargeForward,  // some MiB, unary or streaming
  kCancelled,     // long, cancelled after a random time
  kDeadline,      // long, with a random short deadline
  kInvalid,       // refused: INVALID_ARGUMENT
  kUnmetPolicy,   // refused: FAILED_PRECONDITION
  kPlan,
};
inline constexpr int kNumCallKinds = 8;
const char* Name(CallKind kind);
CallKind RandomKind(Rng& rng);

// Makes one call. OK where it ended as its kind allows; RESOURCE_EXHAUSTED from a full server and,
// for cancelled calls and deadlines, any of OK, CANCELLED and DEADLINE_EXCEEDED are allowed. Sets
// `*code` to how the call ended.
absl::Status MakeCall(client::Client& client, CallKind kind, Rng& rng, absl::StatusCode* code);

}  // namespace attn::bench

#endif  // ATTN_TESTS_BENCH_SOAK_CALLS_H_
