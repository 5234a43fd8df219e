// How fast this machine has been seen to be: what Plan predicts from.
#ifndef ATTN_SERVER_EXECUTION_RATES_H_
#define ATTN_SERVER_EXECUTION_RATES_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/api/path.h"
#include "kernels/api/spec.h"
#include "server/execution/path_table.h"

namespace attn::server {

// Thread-safe. A rate of 0 means: not measured yet.
class Rates {
 public:
  // Takes in one executed call. Calls under 200 µs say more about overhead than about rates and are
  // ignored; later calls count for an eighth each.
  void Observe(Pass pass, PathId path, uint64_t flops, std::chrono::nanoseconds kernel);

  double FlopsPerSecond(Pass pass, PathId path) const;
  double copy_bytes_per_second() const { return copy_.load(std::memory_order_relaxed); }
  void set_copy_bytes_per_second(double rate) { copy_.store(rate, std::memory_order_relaxed); }

  // The best forward rate over all CPU paths: what DeviceInfo of a CPU calls matrix_tflops, times
  // 1e12.
  double BestForwardFlopsPerSecond() const;

 private:
  using Row = std::array<std::atomic<double>, kAllPaths.size()>;
  std::array<Row, 2> flops_{};
  std::atomic<double> copy_{0.0};
};

// Measures the rate of each available path and pass on a problem that takes it long enough for
// Observe() (fp32 on a CPU, bf16 on CUDA), and the host's copy bandwidth (read + write bytes,
// `threads` threads). Takes about 150 ms on two idle cores; each measurement is repeated only while
// within `budget`.
void MeasureRates(const PathTable& paths, int threads, std::chrono::milliseconds budget,
                  Rates* rates);

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_RATES_H_
