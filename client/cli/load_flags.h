// The flags of attn load, and what they plan.
#ifndef ATTN_CLIENT_CLI_LOAD_FLAGS_H_
#define ATTN_CLIENT_CLI_LOAD_FLAGS_H_

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/flags.h"
#include "client/load/phase.h"
#include "client/load/schedule.h"

namespace attn::cli {

void DeclareLoad(CLI::App* app, LoadFlags* flags, ConnectionFlags* connection);

enum class LoadMode { kClosed, kRate, kSteps, kRamp, kTrace, kSearch };

// "p99<50ms": the quantile 0.99 of the latency from the intended send is at most 50 ms.
struct Slo {
  std::string text;
  double quantile = 0;
  int64_t limit_ns = 0;
};

// Everything that the flags say, checked.
struct LoadPlan {
  LoadMode mode = LoadMode::kClosed;
  std::vector<double> levels;  // of a sweep: concurrencies or rates; one entry: no sweep
  load::Spacing spacing = load::Spacing::kPoisson;
  std::vector<load::RateSegment> segments;  // kSteps, kRamp
  std::optional<Slo> slo;
  double allowed_failed_share = 0.01;
  // Of each phase; without schedule, max_in_flight and weights.
  load::PhaseOptions phase;
  int max_in_flight = 256;  // open loop
};

// Errors: INVALID_ARGUMENT, naming the flag.
absl::StatusOr<LoadPlan> MakeLoadPlan(const LoadFlags& flags, uint64_t seed);

// The options of a phase of the plan at a level (ignored for kSteps and kRamp, which bring their
// own rates, and not for kTrace). Open loop schedules begin with the warm-up at the first rate.
load::PhaseOptions PhaseAt(const LoadPlan& plan, double level);

// "closed loop", "open loop, Poisson arrivals", …
std::string Describe(const LoadPlan& plan);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_LOAD_FLAGS_H_
