// The time that queues and deadlines go by, so that tests can set it.
#ifndef ATTN_SERVER_EXECUTION_CLOCK_H_
#define ATTN_SERVER_EXECUTION_CLOCK_H_

#include <chrono>

namespace attn::server {

using TimePoint = std::chrono::steady_clock::time_point;

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const { return std::chrono::steady_clock::now(); }

  static const Clock* Real() {
    static const Clock clock;
    return &clock;
  }
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_CLOCK_H_
