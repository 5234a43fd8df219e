// Progress of a transfer, on stderr.
#ifndef ATTN_CLIENT_CLI_PROGRESS_H_
#define ATTN_CLIENT_CLI_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "client/cli/format.h"

namespace attn::cli {

// "sending 512 MiB of 2.00 GiB  25.0%  410 MiB/s". Where totals are unknown (0) only what passed is
// said. `seconds` since the direction began.
std::string ProgressLine(uint64_t sent, uint64_t sent_total, uint64_t received,
                         uint64_t received_total, double seconds);

// Shows the line in place on a terminal, or as a line of its own each second otherwise. Not
// thread-safe.
class ProgressMeter {
 public:
  // `shown`: whether to print at all. `in_place`: stderr is a terminal.
  ProgressMeter(bool shown, bool in_place) : shown_(shown), in_place_(in_place) {}
  ~ProgressMeter() { Clear(); }
  ProgressMeter(const ProgressMeter&) = delete;
  ProgressMeter& operator=(const ProgressMeter&) = delete;

  bool shown() const { return shown_; }
  void Update(uint64_t sent, uint64_t sent_total, uint64_t received, uint64_t received_total);
  // Takes the line away.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;
  const bool shown_;
  const bool in_place_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_line_;
  bool receiving_ = false;
  int width_ = 0;
};

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_PROGRESS_H_
