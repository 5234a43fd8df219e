#include "client/cli/load_flags.h"

#include <cmath>
#include <cstdlib>
#include <utility>

#include "client/cli/text.h"

namespace attn::cli {
namespace {

using std::chrono::nanoseconds;

constexpr int kMaxInFlight = 4096;  // a thread each
constexpr double kMaxRate = 1e7;

void DeclareWhen(CLI::App* app, LoadFlags* flags) {
  const char* group = "Closed loop (default: --concurrency 1)";
  app->add_option("--concurrency", flags->concurrency,
                  "Calls in flight, a new one when one ends; 1,2,4,8: a sweep")
      ->group(group);
  group = "Open loop (latency counts from when a call was due)";
  app->add_option("--rate", flags->rate, "Calls per second; 100,200,400: a sweep")->group(group);
  app->add_option("--arrivals", flags->arrivals, "poisson, or constant (evenly spaced)")
      ->check(CLI::IsMember({"poisson", "constant"}))
      ->capture_default_str()
      ->group(group);
  app->add_option("--steps", flags->steps, "Rates that hold: 100:10s,200:10s")->group(group);
  app->add_option("--ramp", flags->ramp, "A rate that grows or falls evenly: 100:500:30s")
      ->group(group);
  app->add_option("--trace", flags->trace,
                  "CSV file of recorded calls: a column 'seconds', and 'entry' (of --mix) or "
                  "columns named as the options of a call (seqlen_q, causal, …)")
      ->group(group);
  app->add_option("--trace-speed", flags->trace_speed, "Replay this many times as fast")
      ->check(CLI::Range(1e-6, 1e6))
      ->capture_default_str()
      ->group(group);
  app->add_option("--slo", flags->slo,
                  "Search the highest rate that meets 'p99<50ms', from --rate [10] on")
      ->group(group);
  app->add_option("--max-in-flight", flags->max_in_flight,
                  "A call that is due beyond this waits, its due time kept")
      ->check(CLI::Range(1, kMaxInFlight))
      ->capture_default_str()
      ->group(group);
}

void DeclareHowLong(CLI::App* app, LoadFlags* flags) {
  const char* group = "How long";
  app->add_option("--duration", flags->duration,
                  "Of each phase, after the warm-up; steps, ramps and traces bring their own")
      ->capture_default_str()
      ->group(group);
  app->add_option("--calls", flags->calls, "Send no more than this many after the warm-up")
      ->check(CLI::PositiveNumber)
      ->group(group);
  app->add_option("--warm-up", flags->warm_up, "Load that is not counted; 0: none")
      ->capture_default_str()
      ->group(group);
  app->add_option("--window", flags->window, "Length of a window")
      ->capture_default_str()
      ->group(group);
  app->add_option("--stability", flags->stability,
                  "Percent that throughput and mean latency of the last three windows may be off "
                  "their mean, else exit status 8; 0: not judged")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str()
      ->group(group);
  app->add_flag("--until-stable", flags->until_stable, "End a phase as soon as it is steady")
      ->group(group);
  app->add_option("--drain", flags->drain, "For calls that are late when the time is over")
      ->capture_default_str()
      ->group(group);
  app->add_option("--abort-errors", flags->abort_errors,
                  "Stop when more than this percentage of a window's calls fails")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str()
      ->group(group);
  app->add_option("--abort-p99", flags->abort_p99, "Stop when a window's p99 is over this")
      ->group(group);
  app->add_option("--allow-failed", flags->allow_failed,
                  "Percentage of failed calls that still is exit status 0")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str()
      ->group(group);
}

void DeclareWhat(CLI::App* app, LoadFlags* flags, ConnectionFlags* connection) {
  const char* group = "What is sent";
  app->add_option("--mix", flags->mix,
                  "JSON file of kinds of calls with weights; options given here are its defaults")
      ->group(group);
  app->add_option("--pass", flags->pass, "forward, backward, or mixed (half and half)")
      ->check(CLI::IsMember({"forward", "backward", "mixed"}))
      ->capture_default_str()
      ->group(group);
  app->add_option("--payload", flags->payload, "Where tensor bytes travel: inline")
      ->check(CLI::IsMember({"inline"}))
      ->capture_default_str()
      ->group(group);
  app->add_option("--verify-every", flags->verify_every,
                  "Hold every n-th reply against float64 attention computed here (once per kind "
                  "of call, before the load; slow for long sequences); 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(group);
  app->add_option("--channels", connection->channel.channels, "Connections, used in turn")
      ->check(CLI::Range(1, 256))
      ->capture_default_str()
      ->group(group);
}

absl::Status Usage(std::string_view flag, const std::string& value, const std::string& what) {
  return absl::InvalidArgumentError(Cat(flag, " ", value, ": ", what));
}

bool ParseNumber(const std::string& text, double* value) {
  char* end = nullptr;
  *value = std::strtod(text.c_str(), &end);
  return !text.empty() && end == text.c_str() + text.size() && std::isfinite(*value);
}

absl::StatusOr<std::vector<double>> ParseLevels(std::string_view flag, const std::string& text,
                                                double least, double most, bool whole) {
  std::vector<double> levels;
  for (const std::string& part : Split(text, ',')) {
    double value = 0;
    if (!ParseNumber(part, &value) || value < least || value > most ||
        (whole && value != std::floor(value))) {
      return Usage(flag, text,
                   Cat("'", part, "' is not a ", whole ? "whole number" : "number", " within ",
                       least, " and ", most));
    }
    levels.push_back(value);
  }
  return levels;
}

// "0", or a duration.
absl::StatusOr<nanoseconds> ParseWait(std::string_view flag, const std::string& text) {
  if (text == "0" || text == "0s") return nanoseconds(0);
  absl::StatusOr<nanoseconds> duration = ParseDuration(text);
  if (!duration.ok()) return Within(flag, duration.status());
  return duration;
}

// "100:10s" (two parts) or "100:500:30s" (three), joined by commas.
absl::StatusOr<std::vector<load::RateSegment>> ParseSegments(std::string_view flag,
                                                             const std::string& text,
                                                             size_t parts) {
  std::vector<load::RateSegment> segments;
  for (const std::string& item : Split(text, ',')) {
    const std::vector<std::string> fields = Split(item, ':');
    load::RateSegment segment;
    bool good = fields.size() == parts && ParseNumber(fields[0], &segment.from);
    segment.to = segment.from;
    if (good && parts == 3) good = ParseNumber(fields[1], &segment.to);
    if (!good || segment.from < 0 || segment.to < 0 || segment.from > kMaxRate ||
        segment.to > kMaxRate) {
      return Usage(flag, text,
                   Cat("'", item, "' is not ", parts == 2 ? "RATE:DURATION" : "FROM:TO:DURATION",
                       " with rates within 0 and ", kMaxRate, " calls per second"));
    }
    absl::StatusOr<nanoseconds> duration = ParseDuration(fields.back());
    if (!duration.ok()) return Within(flag, duration.status());
    segment.seconds = std::chrono::duration<double>(*duration).count();
    segments.push_back(segment);
  }
  return segments;
}

absl::StatusOr<Slo> ParseSlo(const std::string& text) {
  Slo slo;
  slo.text = text;
  const std::vector<std::string> sides = Split(text, '<');
  double percent = 0;
  if (sides.size() != 2 || !sides[0].starts_with('p') ||
      !ParseNumber(sides[0].substr(1), &percent) || percent <= 0 || percent >= 100) {
    return Usage("--slo", text, "must be a percentile and a limit, such as p99<50ms");
  }
  slo.quantile = percent / 100;
  absl::StatusOr<nanoseconds> limit = ParseDuration(sides[1]);
  if (!limit.ok()) return Within("--slo", limit.status());
  slo.limit_ns = limit->count();
  return slo;
}

absl::Status SetMode(const LoadFlags& flags, LoadPlan* plan) {
  const int given = !flags.concurrency.empty() + (!flags.rate.empty() || !flags.slo.empty()) +
                    !flags.steps.empty() + !flags.ramp.empty() + !flags.trace.empty();
  if (given > 1) {
    return absl::InvalidArgumentError(
        "--concurrency, --rate (with --slo), --steps, --ramp and --trace exclude each other");
  }
  if (!flags.rate.empty() || !flags.slo.empty()) {
    plan->mode = flags.slo.empty() ? LoadMode::kRate : LoadMode::kSearch;
    auto rates =
        ParseLevels("--rate", flags.rate.empty() ? "10" : flags.rate, 1e-3, kMaxRate, false);
    if (!rates.ok()) return rates.status();
    plan->levels = *std::move(rates);
    if (flags.slo.empty()) return absl::OkStatus();
    if (plan->levels.size() != 1) return Usage("--rate", flags.rate, "one rate with --slo");
    absl::StatusOr<Slo> slo = ParseSlo(flags.slo);
    if (!slo.ok()) return slo.status();
    plan->slo = *std::move(slo);
    return absl::OkStatus();
  }
  if (!flags.steps.empty() || !flags.ramp.empty()) {
    const bool steps = !flags.steps.empty();
    plan->mode = steps ? LoadMode::kSteps : LoadMode::kRamp;
    auto segments =
        steps ? ParseSegments("--steps", flags.steps, 2) : ParseSegments("--ramp", flags.ramp, 3);
    if (!segments.ok()) return segments.status();
    plan->segments = *std::move(segments);
    plan->levels = {0};
    return absl::OkStatus();
  }
  plan->levels = {1};
  if (!flags.trace.empty()) {
    plan->mode = LoadMode::kTrace;
  } else if (!flags.concurrency.empty()) {
    auto levels = ParseLevels("--concurrency", flags.concurrency, 1, kMaxInFlight, true);
    if (!levels.ok()) return levels.status();
    plan->levels = *std::move(levels);
  }
  return absl::OkStatus();
}

}  // namespace

void DeclareLoad(CLI::App* app, LoadFlags* flags, ConnectionFlags* connection) {
  DeclareWhen(app, flags);
  DeclareHowLong(app, flags);
  DeclareWhat(app, flags, connection);
  const char* group = "Output";
  app->add_option("--metrics", flags->metrics,
                  "The server's /metrics (http://127.0.0.1:9464/metrics): read before and after, "
                  "differences shown")
      ->group(group);
  app->add_option("--csv", flags->csv, "Write a table of the phases to this file")->group(group);
  app->add_option("--calls-csv", flags->calls_csv, "Write every measured call to this file")
      ->group(group);
  app->add_option("--html", flags->html, "Write a report with plots to this file")->group(group);
}

absl::StatusOr<LoadPlan> MakeLoadPlan(const LoadFlags& flags, uint64_t seed) {
  LoadPlan plan;
  if (absl::Status status = SetMode(flags, &plan); !status.ok()) return status;
  plan.spacing = flags.arrivals == "constant" ? load::Spacing::kConstant : load::Spacing::kPoisson;
  plan.max_in_flight = flags.max_in_flight;
  plan.allowed_failed_share = flags.allow_failed / 100;
  load::PhaseOptions& phase = plan.phase;
  absl::StatusOr<nanoseconds> parsed = ParseDuration(flags.duration);
  if (!parsed.ok()) return Within("--duration", parsed.status());
  phase.duration = *parsed;
  parsed = ParseDuration(flags.window);
  if (!parsed.ok()) return Within("--window", parsed.status());
  if (*parsed < std::chrono::milliseconds(10)) {
    return Usage("--window", flags.window, "must be at least 10ms");
  }
  phase.window = *parsed;
  parsed = ParseWait("--warm-up", flags.warm_up);
  if (!parsed.ok()) return parsed.status();
  phase.warm_up = *parsed;
  parsed = ParseWait("--drain", flags.drain);
  if (!parsed.ok()) return parsed.status();
  phase.drain = *parsed;
  if (!flags.abort_p99.empty()) {
    parsed = ParseDuration(flags.abort_p99);
    if (!parsed.ok()) return Within("--abort-p99", parsed.status());
    phase.abort_p99 = *parsed;
  }
  phase.abort_failed_share = flags.abort_errors / 100;
  phase.max_calls = flags.calls;
  phase.stability_tolerance = flags.stability / 100;
  // Where the rate changes on purpose, or a search looks for what does not hold, latency is not
  // meant to be steady.
  phase.judge_stability =
      flags.stability > 0 && (plan.mode == LoadMode::kClosed || plan.mode == LoadMode::kRate);
  phase.until_stable = flags.until_stable;
  if (flags.until_stable && !phase.judge_stability) {
    return absl::InvalidArgumentError(
        "--until-stable needs --concurrency or --rate, and --stability over 0");
  }
  phase.seed = seed;
  phase.verify_every = flags.verify_every;
  if (plan.mode == LoadMode::kSteps || plan.mode == LoadMode::kRamp) {
    phase.duration = nanoseconds(static_cast<int64_t>(load::TotalSeconds(plan.segments) * 1e9));
  }
  if (plan.mode == LoadMode::kTrace) phase.warm_up = nanoseconds(0);
  return plan;
}

load::PhaseOptions PhaseAt(const LoadPlan& plan, double level) {
  load::PhaseOptions options = plan.phase;
  options.max_in_flight = plan.max_in_flight;
  if (plan.mode == LoadMode::kClosed) {
    options.max_in_flight = static_cast<int>(level);
    return options;
  }
  if (plan.mode == LoadMode::kTrace) return options;
  std::vector<load::RateSegment> segments = plan.segments;
  if (segments.empty()) {
    segments.push_back({std::chrono::duration<double>(options.duration).count(), level, level});
  }
  if (options.warm_up.count() > 0) {
    const double first = segments.front().from;
    segments.insert(segments.begin(),
                    {std::chrono::duration<double>(options.warm_up).count(), first, first});
  }
  options.schedule = load::MakeRateSchedule(std::move(segments), plan.spacing, options.seed);
  return options;
}

std::string Describe(const LoadPlan& plan) {
  const std::string arrivals =
      plan.spacing == load::Spacing::kPoisson ? "Poisson arrivals" : "evenly spaced arrivals";
  switch (plan.mode) {
    case LoadMode::kClosed:
      return "closed loop";
    case LoadMode::kRate:
      return Cat("open loop, ", arrivals);
    case LoadMode::kSteps:
      return Cat("open loop, steps, ", arrivals);
    case LoadMode::kRamp:
      return Cat("open loop, ramp, ", arrivals);
    case LoadMode::kTrace:
      return "open loop, recorded arrivals";
    case LoadMode::kSearch:
      return Cat("search for ", plan.slo->text, ", open loop, ", arrivals);
  }
  return "";
}

}  // namespace attn::cli
