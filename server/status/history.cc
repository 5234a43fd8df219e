#include "server/status/history.h"

#include <algorithm>
#include <numeric>

namespace attn::server {
namespace {

constexpr std::array kPasses = {Pass::kForward, Pass::kBackward};

Metrics::FlashTotals Minus(const Metrics::FlashTotals& a, const Metrics::FlashTotals& b) {
  return {.calls = a.calls - b.calls,
          .flash_calls = a.flash_calls - b.flash_calls,
          .flops = a.flops - b.flops,
          .flash_flops = a.flash_flops - b.flash_flops};
}

}  // namespace

double Quantile(std::span<const double> bounds, std::span<const double> counts, double quantile) {
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  if (total <= 0 || bounds.empty()) return 0;
  const double rank = quantile * total;
  double below = 0;
  for (size_t i = 0; i < counts.size() && i < bounds.size(); ++i) {
    if (counts[i] > 0 && below + counts[i] >= rank) {
      const double from = i == 0 ? 0 : bounds[i - 1];
      return from + (bounds[i] - from) * (rank - below) / counts[i];
    }
    below += counts[i];
  }
  return bounds.back();
}

History::History(const Metrics* metrics, const Clock* clock)
    : metrics_(metrics), clock_(clock), last_(Read()) {}

History::Reading History::Read() const {
  Reading reading;
  Interval& sums = reading.sums;
  sums.end = clock_->Now();
  for (size_t m = 0; m < kNumMethods; ++m) {
    for (size_t code = 0; code < kNumCodes; ++code) {
      const double n =
          metrics_->RequestCount(static_cast<Method>(m), static_cast<absl::StatusCode>(code));
      sums.requests += n;
      if (code != 0) sums.errors += n;
    }
  }
  sums.flash = metrics_->flash_totals();
  for (Pass pass : kPasses) {
    for (PathId path : kAllPaths) {
      const Metrics::Work work = metrics_->work(pass, path);
      sums.kernel_seconds += work.kernel_seconds;
      sums.roofline_seconds += work.roofline_seconds;
      sums.compulsory_bytes += metrics_->bytes(ByteLevel::kCompulsory, pass, path);
      sums.tile_bytes += metrics_->bytes(ByteLevel::kTile, pass, path);
      sums.standard_bytes += metrics_->bytes(ByteLevel::kStandard, pass, path);
      sums.wire_in_bytes += metrics_->bytes(ByteLevel::kWireRequest, pass, path);
      sums.wire_out_bytes += metrics_->bytes(ByteLevel::kWireResponse, pass, path);
    }
    const HistogramCells& handler = metrics_->stage(Stage::kHandler, pass);
    reading.handler_seconds += handler.sum();
    for (size_t i = 0; i <= handler.bounds().size(); ++i) {
      reading.handler[i] += static_cast<double>(handler.count(i));
    }
  }
  return reading;
}

void History::Sample() {
  MutexLock lock(mutex_);
  const Reading now = Read();
  const Interval &a = last_.sums, &b = now.sums;
  if (b.end <= a.end) return;
  Interval i;
  i.end = b.end;
  i.seconds = std::chrono::duration<double>(b.end - a.end).count();
  i.requests = b.requests - a.requests;
  i.errors = b.errors - a.errors;
  i.flash = Minus(b.flash, a.flash);
  i.kernel_seconds = b.kernel_seconds - a.kernel_seconds;
  i.roofline_seconds = b.roofline_seconds - a.roofline_seconds;
  i.compulsory_bytes = b.compulsory_bytes - a.compulsory_bytes;
  i.tile_bytes = b.tile_bytes - a.tile_bytes;
  i.standard_bytes = b.standard_bytes - a.standard_bytes;
  i.wire_in_bytes = b.wire_in_bytes - a.wire_in_bytes;
  i.wire_out_bytes = b.wire_out_bytes - a.wire_out_bytes;

  const std::span<const double> bounds = metrics_->stage(Stage::kHandler, Pass::kForward).bounds();
  std::array<double, HistogramCells::kMaxBounds + 1> counts{};
  for (size_t k = 0; k <= bounds.size(); ++k) {
    counts[k] = now.handler[k] - last_.handler[k];
    i.handler_calls += counts[k];
  }
  if (i.handler_calls > 0) {
    // The sum and the counts of a histogram are not read at one instant.
    i.handler_mean = std::max(0.0, now.handler_seconds - last_.handler_seconds) / i.handler_calls;
    const std::span<const double> used(counts.data(), bounds.size() + 1);
    i.handler_p50 = Quantile(bounds, used, 0.5);
    i.handler_p99 = Quantile(bounds, used, 0.99);
  }
  last_ = now;
  intervals_.push_back(i);
  if (intervals_.size() > kCapacity) intervals_.pop_front();
}

std::vector<Interval> History::Snapshot() const {
  MutexLock lock(mutex_);
  return {intervals_.begin(), intervals_.end()};
}

}  // namespace attn::server
