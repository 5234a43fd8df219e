// When calls are meant to be sent (open loop). A schedule never looks at how calls fare: a server
// that stalls does not slow it down.
#ifndef ATTN_CLIENT_LOAD_SCHEDULE_H_
#define ATTN_CLIENT_LOAD_SCHEDULE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "absl/status/statusor.h"

namespace attn::load {

struct Arrival {
  int64_t time_ns = 0;            // since the schedule began
  std::optional<uint32_t> entry;  // of the request mix; unset: drawn by the mix's weights
};

// Arrivals in the order of their times. Not thread-safe.
class Schedule {
 public:
  virtual ~Schedule() = default;
  // False: there are no more.
  virtual bool Next(Arrival* arrival) = 0;
};

// A stretch of time over which the rate goes linearly from one value to another. Rates are in calls
// per second.
struct RateSegment {
  double seconds = 0;
  double from = 0;
  double to = 0;
};

enum class Spacing {
  kConstant,  // evenly, at the rate of the moment
  kPoisson,   // independent of each other: exponential gaps
};

// Arrivals of the given rate. Both spacings come from the integral L(t) of the rate: evenly spaced
// arrivals stand where L = 0, 1, 2, …, a Poisson process where L = E1, E1 + E2, … with independent
// exponential E of mean 1 (time change theorem). So steps and ramps are exact for both. The same
// seed gives the same arrivals on every machine.
std::unique_ptr<Schedule> MakeRateSchedule(std::vector<RateSegment> segments, Spacing spacing,
                                           uint64_t seed);

// Arrivals as recorded. Errors: INVALID_ARGUMENT: a time is negative (names its index).
absl::StatusOr<std::unique_ptr<Schedule>> MakeTraceSchedule(std::vector<Arrival> arrivals);

double TotalSeconds(const std::vector<RateSegment>& segments);

// Random numbers that are the same on every machine: std::mt19937_64 with our own conversions.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t Bits() { return engine_(); }
  double Uniform();      // [0, 1)
  double Exponential();  // mean 1

 private:
  std::mt19937_64 engine_;
};

// Draws indices with probabilities in proportion to `weights` (not empty, each over 0).
class WeightedPicker {
 public:
  WeightedPicker(const std::vector<double>& weights, uint64_t seed);
  uint32_t Next();

 private:
  std::vector<double> cumulative_;
  Random random_;
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_SCHEDULE_H_
