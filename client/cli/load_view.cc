// attn load on a terminal.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/load_result.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

using load::PhaseStats;
using load::Stage;

constexpr size_t kMaxMetrics = 12;

std::string Millis(int64_t ns, const Style& style) {
  return FormatNanos(static_cast<double>(ns), style);
}

const char* Label(Stage stage) {
  static constexpr const char* kLabels[load::kNumStages] = {
      "waiting to be sent",   "client library",    "wire",
      "server: parse",        "server: gather",    "server: queue",
      "server: device queue", "server: to device", "server: kernel",
      "server: from device",  "server: reply",     "server: rest"};
  return kLabels[static_cast<size_t>(stage)];
}

void AddHistogram(const std::string& name, const load::Histogram& histogram, const Style& style,
                  Table* table) {
  std::vector<std::string> cells = {name, FormatNanos(histogram.Mean(), style)};
  for (const NamedQuantile& q : kQuantiles) {
    cells.push_back(Millis(histogram.ValueAt(q.quantile), style));
  }
  cells.push_back(Millis(histogram.max(), style));
  table->Add(std::move(cells));
}

std::vector<std::string> HistogramHeader(const std::string& first) {
  std::vector<std::string> cells = {first, "mean"};
  for (const NamedQuantile& q : kQuantiles) cells.push_back(q.name);
  cells.push_back("max");
  return cells;
}

std::string Latencies(const LoadPhase& phase, const LoadResult& result, const Style& style) {
  const PhaseStats& stats = phase.result.stats;
  Table table(2);
  table.Add(HistogramHeader(""));
  AddHistogram("latency", stats.latency, style, &table);
  AddHistogram("service", stats.service, style, &table);
  if (result.entries.size() > 1) {
    for (size_t i = 0; i < result.entries.size(); ++i) {
      AddHistogram(result.entries[i].name, stats.entries[i].latency, style, &table);
    }
  }
  std::string text = Cat(style.Bold("time"), "\n", table.ToString());
  const std::string note =
      phase.result.open_loop
          ? "latency counts from when a call was due, service from when it was sent"
          : "closed loop: a call is due when it is sent";
  text += Cat("  ", style.Dim(note), "\n");
  if (stats.ok > 0 && RestsOnMaximum(stats.latency, kQuantiles[4].quantile)) {
    text += Cat("  ", style.Dim(Cat("p99.99 is the maximum: fewer than 10,000 calls")), "\n");
  }
  return text;
}

std::string Outcome(const LoadPhase& phase, const LoadResult& result, const Style& style) {
  const load::PhaseResult& found = phase.result;
  const PhaseStats& stats = found.stats;
  Table table(2);
  std::string calls = Cat(FormatCount(stats.ok), " ok, ", FormatCount(stats.failed), " failed");
  if (found.unsent > 0) calls += Cat(", ", FormatCount(found.unsent), " due but never sent");
  if (stats.cancelled > 0) calls += Cat(", ", FormatCount(stats.cancelled), " cut off at the end");
  if (stats.retried > 0) calls += Cat(", ", FormatCount(stats.retried), " retried");
  if (stats.streamed > 0) calls += Cat(", ", FormatCount(stats.streamed), " streamed");
  table.Add({"calls", calls});
  std::string rate = Cat(absl::StrFormat("%.4g", phase.ok_per_s()), " calls/s");
  if (found.open_loop)
    rate += Cat(" of ", absl::StrFormat("%.4g", phase.offered_per_s()), " offered");
  rate += Cat(" over ", absl::StrFormat("%.4g", found.measured_seconds), " s, ",
              FormatSi(phase.PerSecond(stats.flops_in_time), "FLOP/s"), ", payload ",
              FormatSi(phase.PerSecond(stats.bytes_in_time), "B/s"));
  table.Add({"throughput", rate});
  if (found.stability.judged) {
    table.Add(
        {"steady", Cat(found.stability.stable ? style.Green("yes") : style.Red("no"),
                       ": over the last ", load::kStableWindows, " windows throughput is within ",
                       FormatPercent(found.stability.worst_throughput), ", mean latency within ",
                       FormatPercent(found.stability.worst_latency), " of its mean")});
  }
  for (const auto& [code, failure] : stats.failures) {
    table.Add({"failed", Cat(FormatCount(failure.count), " ", style.Times(), " ", code, ": ",
                             failure.first_message)});
  }
  if (result.verification) {
    std::string ratios;
    for (const auto& [tensor, ratio] : result.verification->worst_ratio) {
      ratios += Cat(ratios.empty() ? "" : ", ", tensor, " ", absl::StrFormat("%.3f", ratio));
    }
    const bool good = result.verification->wrong == 0;
    table.Add({"verified", Cat(FormatCount(result.verification->replies), " replies, ",
                               good ? style.Green("all right")
                                    : style.Red(Cat(result.verification->wrong, " wrong")),
                               result.verification->skipped > 0
                                   ? Cat(", ", result.verification->skipped, " more not looked at")
                                   : "",
                               "; largest error / bound: ", ratios)});
  }
  std::string generator =
      Cat(FormatNanos(found.cpu_calls == 0 ? 0 : found.cpu_seconds * 1e9 / found.cpu_calls, style),
          " of CPU per call");
  if (!stats.lateness.empty()) {
    generator += Cat("; sends late by ", Millis(stats.lateness.ValueAt(0.5), style), " (p50), ",
                     Millis(stats.lateness.ValueAt(0.99), style), " (p99)");
  }
  table.Add({"generator", generator});
  return table.ToString();
}

std::string Stages(const PhaseStats& stats, const Style& style) {
  double total = 0, largest = 0;
  for (size_t i = 0; i < load::kNumStages; ++i) {
    const double mean = StageMeanNs(stats, static_cast<Stage>(i));
    total += mean;
    largest = std::max(largest, mean);
  }
  if (total <= 0) return "";
  Table table(2);
  for (size_t i = 0; i < load::kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const double mean = StageMeanNs(stats, stage);
    if (mean <= 0) continue;
    table.Add({Label(stage), PadLeft(FormatNanos(mean, style), 9),
               PadLeft(FormatPercent(mean / total), 6), Bar(mean / largest, 24, style)});
  }
  return Cat("\n", style.Bold("where the time of a call goes (mean)"), "\n", table.ToString());
}

std::string Paths(const PhaseStats& stats, const Style& style) {
  double flops = 0;
  for (const auto& [name, path] : stats.paths) flops += path.flops;
  Table table(2);
  for (const auto& [name, path] : stats.paths) {
    table.Add({name, Cat(ClassName(path.path_class), ", ", DeviceName(path.device_kind)),
               Cat(FormatPercent(static_cast<double>(path.calls) / stats.ok), " of calls"),
               Cat(FormatPercent(flops > 0 ? path.flops / flops : 0), " of FLOPs")});
  }
  if (table.empty()) return "";
  std::string text = Cat("\n", style.Bold("paths"), "\n", table.ToString());
  Table rejected(2);
  for (const auto& [what, count] : stats.rejections) {
    const std::vector<std::string> parts = Split(what, ':');
    rejected.Add(
        {parts[0], "not taken", parts[1], FormatPercent(static_cast<double>(count) / stats.ok)});
  }
  return text + rejected.ToString();
}

std::string Slowest(const LoadPhase& phase, const LoadResult& result, const Style& style) {
  if (phase.result.stats.slowest.empty()) return "";
  Table table(2);
  table.Add({"latency", "server", "trace id", "request id"});
  for (size_t i = 0; i < std::min<size_t>(5, phase.result.stats.slowest.size()); ++i) {
    const load::SlowCall& call = phase.result.stats.slowest[i];
    table.Add({Millis(call.latency_ns, style), Millis(call.handler_ns, style), call.trace_id,
               call.request_id});
  }
  return Cat("\n", style.Bold("slowest calls"), "\n", table.ToString());
}

std::string Levels(const LoadResult& result, const Style& style) {
  if (result.phases.size() < 2) return "";
  Table table(2);
  table.Add({"", "calls/s", "p50", "p90", "p99", "p99.9", "max", "failed",
             result.plan.slo ? result.plan.slo->text : "steady"});
  for (const LoadPhase& phase : result.phases) {
    const load::Histogram& latency = phase.result.stats.latency;
    const load::Stability& stability = phase.result.stability;
    std::string verdict = stability.judged ? (stability.stable ? "yes" : "no") : "-";
    if (result.plan.slo) verdict = phase.met_slo ? "met" : "not met";
    table.Add({LevelName(result, phase), absl::StrFormat("%.4g", phase.ok_per_s()),
               Millis(latency.ValueAt(0.5), style), Millis(latency.ValueAt(0.9), style),
               Millis(latency.ValueAt(0.99), style), Millis(latency.ValueAt(0.999), style),
               Millis(latency.max(), style), FormatPercent(phase.failed_share()), verdict});
  }
  std::string text = Cat(style.Bold("latency against load"), "\n", table.ToString(), "\n");
  if (result.best_rate) {
    text += Cat(style.Bold(Cat("highest rate with ", result.plan.slo->text, ": ",
                               absl::StrFormat("%.6g", *result.best_rate), " calls/s")),
                "\n\n");
  }
  return text;
}

std::string Metrics(const LoadResult& result, const Style& style) {
  if (!result.scraped) return "";
  Table table(2);
  size_t shown = 0;
  for (const auto& [sample, grown] : result.metrics) {
    if (!sample.starts_with("attn_") || sample.find("_sum") != std::string::npos) continue;
    if (++shown > kMaxMetrics) continue;
    table.Add({absl::StrFormat("%+.6g", grown), sample});
  }
  std::string text = Cat("\n", style.Bold("server metrics, growth"), "\n", table.ToString());
  if (shown > kMaxMetrics) {
    text += Cat("  ", style.Dim(Cat("and ", shown - kMaxMetrics, " more (--json has all)")), "\n");
  }
  return text;
}

std::string Wrapped(const std::string& text) {
  std::string lines;
  for (const std::string& line : Wrap(text, kPageWidth)) lines += line + "\n";
  return lines;
}

}  // namespace

std::string RenderLoad(const LoadResult& result, const Style& style) {
  std::string text = style.Bold(Cat("attn load: ", Describe(result.plan)));
  text += Cat("\n", Wrapped(Cat("attnd ", result.version, " at ", result.server,
                                result.device.empty() ? "" : Cat(", ", result.device))));
  double weights = 0;
  for (const EntryInfo& entry : result.entries) weights += entry.weight;
  for (const EntryInfo& entry : result.entries) {
    const char* pass = entry.pass == client::v1::PASS_BACKWARD ? "backward" : "forward";
    text += Wrapped(Cat(result.entries.size() > 1
                            ? Cat(entry.name, " (", FormatPercent(entry.weight / weights), "), ")
                            : "",
                        pass, ": ", entry.summary));
  }
  text += Rule(style) + "\n";
  if (result.phases.empty()) return text;
  text += Levels(result, style);
  const LoadPhase& phase = MainPhase(result);
  if (const std::string level = LevelName(result, phase); !level.empty()) {
    text += style.Bold(Cat("at ", level)) + "\n";
  }
  text += Cat(Outcome(phase, result, style), "\n", Latencies(phase, result, style),
              Stages(phase.result.stats, style), Paths(phase.result.stats, style),
              Slowest(phase, result, style), Metrics(result, style));
  return text;
}

std::string LoadProgressLine(const load::PhaseProgress& progress, const Style& style) {
  const load::PhaseStats& stats = *progress.stats;
  if (progress.seconds < 0) {
    return Cat("warming up, ", absl::StrFormat("%.0f", -progress.seconds), " s left, ",
               progress.in_flight, " in flight");
  }
  std::string text = Cat(absl::StrFormat("%.1f", progress.seconds), " of ",
                         absl::StrFormat("%.4g", progress.total_seconds), " s");
  // The last window that is complete.
  const load::Window* window = nullptr;
  for (const load::Window& candidate : stats.windows) {
    if (candidate.max_ns > 0) window = &candidate;
  }
  if (window != nullptr) {
    const double seconds = static_cast<double>(stats.window_ns()) * 1e-9;
    text += Cat("  ", absl::StrFormat("%.4g", window->ok / seconds), "/s  p50 ",
                Millis(window->p50_ns, style), "  p99 ", Millis(window->p99_ns, style));
  }
  return Cat(text, "  ", progress.in_flight, " in flight  ", FormatCount(stats.failed), " failed");
}

}  // namespace attn::cli
