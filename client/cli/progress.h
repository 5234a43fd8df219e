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

// A line on stderr that changes: in place on a terminal, or as a line of its own each second
// otherwise. Not thread-safe.
class StatusLine {
 public:
  // `shown`: whether to print at all. `in_place`: stderr is a terminal.
  StatusLine(bool shown, bool in_place) : shown_(shown), in_place_(in_place) {}
  ~StatusLine() { Clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  bool shown() const { return shown_; }
  // Whether Show() would print now.
  bool due() const;
  void Show(const std::string& line);
  // Takes the line away.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;
  const bool shown_;
  const bool in_place_;
  Clock::time_point last_line_;
  int width_ = 0;
};

// A StatusLine that says how far a transfer is. Not thread-safe.
class ProgressMeter {
 public:
  ProgressMeter(bool shown, bool in_place) : line_(shown, in_place) {}

  bool shown() const { return line_.shown(); }
  void Update(uint64_t sent, uint64_t sent_total, uint64_t received, uint64_t received_total);
  void Clear() { line_.Clear(); }

 private:
  using Clock = std::chrono::steady_clock;
  StatusLine line_;
  Clock::time_point start_ = Clock::now();
  bool receiving_ = false;
};

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_PROGRESS_H_
