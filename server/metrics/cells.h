// What a call adds to: sums and histograms of atomics, a few nanoseconds each. prometheus-cpp's own
// cost ten times as much (its histogram takes a lock), and a call adds to some thirty of them.
#ifndef ATTN_SERVER_METRICS_CELLS_H_
#define ATTN_SERVER_METRICS_CELLS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>

namespace attn::server {

// A sum that only grows. double: an integer of FLOPs would overflow within hours. Thread-safe.
class Sum {
 public:
  void Add(double value) {
    if (value == 0) return;
    double old = value_.load(std::memory_order_relaxed);
    while (!value_.compare_exchange_weak(old, old + value, std::memory_order_relaxed)) {
    }
  }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// Counts observations by bounds that are set before the first one. Thread-safe.
class HistogramCells {
 public:
  static constexpr size_t kMaxBounds = 24;

  // Increasing upper bounds, at most kMaxBounds; they must outlive this object.
  void SetBounds(std::span<const double> bounds) { bounds_ = bounds; }
  std::span<const double> bounds() const { return bounds_; }

  void Observe(double value) {
    const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    counts_[static_cast<size_t>(at)].fetch_add(1, std::memory_order_relaxed);
    sum_.Add(value);
  }

  // Observations over bounds()[i - 1], up to bounds()[i]; i == bounds().size(): over all of them.
  uint64_t count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double sum() const { return sum_.value(); }

 private:
  std::span<const double> bounds_;
  std::array<std::atomic<uint64_t>, kMaxBounds + 1> counts_{};
  Sum sum_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_CELLS_H_
