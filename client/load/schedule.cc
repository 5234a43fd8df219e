#include "client/load/schedule.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/api/text.h"

namespace attn::load {
namespace {

// Calls of a segment: the integral of its rate.
double CallsOf(const RateSegment& segment) {
  return segment.seconds * (segment.from + segment.to) / 2;
}

// Where within the segment the integral of the rate reaches `calls`. Solves from·t + slope·t²/2 =
// calls in the form that does not cancel for small slopes.
double TimeOf(const RateSegment& segment, double calls) {
  if (calls <= 0) return 0;
  const double slope = (segment.to - segment.from) / segment.seconds;
  const double root = std::sqrt(std::max(0.0, segment.from * segment.from + 2 * slope * calls));
  const double divisor = segment.from + root;
  return divisor > 0 ? std::min(segment.seconds, 2 * calls / divisor) : segment.seconds;
}

class RateSchedule final : public Schedule {
 public:
  RateSchedule(std::vector<RateSegment> segments, Spacing spacing, uint64_t seed)
      : segments_(std::move(segments)), spacing_(spacing), random_(seed) {
    if (spacing_ == Spacing::kPoisson) calls_ = random_.Exponential();
  }

  bool Next(Arrival* arrival) override {
    // Segments end before the call that would stand exactly at their end.
    while (segment_ < segments_.size() && calls_ - calls_before_ >= CallsOf(segments_[segment_])) {
      calls_before_ += CallsOf(segments_[segment_]);
      seconds_before_ += segments_[segment_].seconds;
      ++segment_;
    }
    if (segment_ >= segments_.size()) return false;
    const double seconds = seconds_before_ + TimeOf(segments_[segment_], calls_ - calls_before_);
    arrival->time_ns = std::max(last_ns_, static_cast<int64_t>(std::llround(seconds * 1e9)));
    arrival->entry.reset();
    last_ns_ = arrival->time_ns;
    calls_ += spacing_ == Spacing::kPoisson ? random_.Exponential() : 1.0;
    return true;
  }

 private:
  const std::vector<RateSegment> segments_;
  const Spacing spacing_;
  Random random_;
  double calls_ = 0;  // integral of the rate up to the next arrival
  size_t segment_ = 0;
  double calls_before_ = 0, seconds_before_ = 0;  // of the segments before
  int64_t last_ns_ = 0;
};

class TraceSchedule final : public Schedule {
 public:
  explicit TraceSchedule(std::vector<Arrival> arrivals) : arrivals_(std::move(arrivals)) {}
  bool Next(Arrival* arrival) override {
    if (next_ == arrivals_.size()) return false;
    *arrival = arrivals_[next_++];
    return true;
  }

 private:
  const std::vector<Arrival> arrivals_;
  size_t next_ = 0;
};

}  // namespace

double Random::Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
double Random::Exponential() { return -std::log1p(-Uniform()); }

std::unique_ptr<Schedule> MakeRateSchedule(std::vector<RateSegment> segments, Spacing spacing,
                                           uint64_t seed) {
  return std::make_unique<RateSchedule>(std::move(segments), spacing, seed);
}

absl::StatusOr<std::unique_ptr<Schedule>> MakeTraceSchedule(std::vector<Arrival> arrivals) {
  for (size_t i = 0; i < arrivals.size(); ++i) {
    if (arrivals[i].time_ns < 0) {
      return absl::InvalidArgumentError(
          Cat("arrival ", i, ": time ", arrivals[i].time_ns, " ns is before the start"));
    }
  }
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [](const Arrival& a, const Arrival& b) { return a.time_ns < b.time_ns; });
  return std::unique_ptr<Schedule>(std::make_unique<TraceSchedule>(std::move(arrivals)));
}

double TotalSeconds(const std::vector<RateSegment>& segments) {
  double seconds = 0;
  for (const RateSegment& segment : segments) seconds += segment.seconds;
  return seconds;
}

WeightedPicker::WeightedPicker(const std::vector<double>& weights, uint64_t seed) : random_(seed) {
  double sum = 0;
  for (const double weight : weights) cumulative_.push_back(sum += weight);
}

uint32_t WeightedPicker::Next() {
  const double drawn = random_.Uniform() * cumulative_.back();
  const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), drawn);
  return static_cast<uint32_t>(
      std::min<size_t>(found - cumulative_.begin(), cumulative_.size() - 1));
}

}  // namespace attn::load
