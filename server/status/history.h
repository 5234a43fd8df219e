// The last minutes of the server's counters, second by second, for the charts of the status page:
// whoever opens it sees what has been, not only what comes next.
#ifndef ATTN_SERVER_STATUS_HISTORY_H_
#define ATTN_SERVER_STATUS_HISTORY_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "kernels/api/mutex.h"
#include "server/execution/clock.h"
#include "server/metrics/metrics.h"

namespace attn::server {

// What happened between two readings of the counters.
struct Interval {
  TimePoint end;
  double seconds = 0;
  double requests = 0, errors = 0;  // answered, of every method; of these, other than OK
  Metrics::FlashTotals flash;
  double kernel_seconds = 0, roofline_seconds = 0;
  double compulsory_bytes = 0, tile_bytes = 0, standard_bytes = 0;
  double wire_in_bytes = 0, wire_out_bytes = 0;
  // Handler times of Forward and Backward in seconds; 0 where no call ended. The mean is exact; a
  // percentile is interpolated within a bucket of the histogram.
  double handler_calls = 0, handler_mean = 0, handler_p50 = 0, handler_p99 = 0;
};

// Bounded: the last kCapacity intervals. Thread-safe.
class History {
 public:
  static constexpr size_t kCapacity = 240;

  // Both must outlive this object.
  History(const Metrics* metrics, const Clock* clock);
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  // Ends an interval and starts the next. A reading that no time separates from the one before is
  // left out.
  void Sample() ATTN_EXCLUDES(mutex_);

  // Oldest first.
  std::vector<Interval> Snapshot() const ATTN_EXCLUDES(mutex_);

 private:
  struct Reading {
    Interval sums;  // since the server started; of handler times only the counts below
    double handler_seconds = 0;
    std::array<double, HistogramCells::kMaxBounds + 1> handler{};
  };
  Reading Read() const;

  const Metrics* const metrics_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  Reading last_ ATTN_GUARDED_BY(mutex_);
  std::deque<Interval> intervals_ ATTN_GUARDED_BY(mutex_);
};

// The value that `quantile` (0 to 1) of the counted observations do not exceed, interpolated within
// its bucket; counts[i] lie over bounds[i - 1] (0 below the first), up to bounds[i], and the last
// over all of them, where the last bound is the answer. 0 where nothing was counted.
double Quantile(std::span<const double> bounds, std::span<const double> counts, double quantile);

}  // namespace attn::server

#endif  // ATTN_SERVER_STATUS_HISTORY_H_
