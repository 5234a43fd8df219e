// Counts bytes at the loads and stores of tensors. Only a counting build (ATTN_COUNT_TRAFFIC)
// counts; elsewhere these are empty and cost nothing. A program links either the counting or the
// plain library, never both.
#ifndef ATTN_KERNELS_CPU_COUNTING_H_
#define ATTN_KERNELS_CPU_COUNTING_H_

#include <atomic>
#include <cstdint>

#include "kernels/api/backend.h"

namespace attn {

#ifdef ATTN_COUNT_TRAFFIC
inline constexpr bool kCountTraffic = true;
#else
inline constexpr bool kCountTraffic = false;
#endif

// The bytes one worker moved; flushed to the caller's counters when it goes out of scope. Not
// thread-safe: one per worker.
class TrafficCount {
 public:
  explicit TrafficCount(TrafficCounters* counters) {
    if constexpr (kCountTraffic) counters_ = counters;
  }
  ~TrafficCount() {
    if constexpr (kCountTraffic) {
      if (counters_ == nullptr) return;
      counters_->loaded_bytes.fetch_add(loaded_, std::memory_order_relaxed);
      counters_->stored_bytes.fetch_add(stored_, std::memory_order_relaxed);
    }
  }
  TrafficCount(const TrafficCount&) = delete;
  TrafficCount& operator=(const TrafficCount&) = delete;

  void Load(int64_t bytes) {
    if constexpr (kCountTraffic) loaded_ += static_cast<uint64_t>(bytes);
  }
  void Store(int64_t bytes) {
    if constexpr (kCountTraffic) stored_ += static_cast<uint64_t>(bytes);
  }

 private:
  TrafficCounters* counters_ = nullptr;
  uint64_t loaded_ = 0;
  uint64_t stored_ = 0;
};

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_COUNTING_H_
