// attn load as a page of its own.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/load_plot.h"
#include "client/cli/load_result.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

using load::PhaseStats;
using load::Stage;

constexpr char kStyle[] = R"(
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5b6570; --grid: #dfe3e8;
  --s0: #1f5fd0; --s1: #c2570c; --s2: #1a7f4b; --s3: #b3261e; --s4: #7a45c2; --onbar: #ffffff;
  --warn: #fdeceb; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e7eaee; --soft: #9da7b3; --grid: #333a42;
  --s0: #7ba7ff; --s1: #ffb066; --s2: #63d394; --s3: #ff8d85; --s4: #c3a1ff; --onbar: #14171a;
  --warn: #3a2220; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .2rem 0; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.card, figure, .box { background: var(--card); border: 1px solid var(--grid); border-radius: 6px;
  padding: .6rem .8rem; margin: 0; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .85rem; }
.warn { background: var(--warn); margin: .8rem 0; } .warn p { color: var(--ink); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: .8rem; }
figure p { font-size: .85rem; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 12.5px; font-family: inherit; }
.ticks text { fill: var(--soft); } .grid line { stroke: var(--grid); stroke-width: 1; }
svg .onbar { fill: var(--onbar); }
.series path { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 path { stroke: var(--s0); } .c1 path { stroke: var(--s1); stroke-dasharray: 7 3; }
.c2 path { stroke: var(--s2); stroke-dasharray: 2 3; } .c3 path { stroke: var(--s3); }
.c4 path { stroke: var(--s4); stroke-dasharray: 9 3 2 3; }
.c0 circle, .f0 { fill: var(--s0); } .c1 circle, .f1 { fill: var(--s1); }
.c2 circle, .f2 { fill: var(--s2); } .c3 circle, .f3 { fill: var(--s3); }
.c4 circle, .f4 { fill: var(--s4); }
.key { white-space: nowrap; margin-right: .8rem; color: var(--ink); font-size: .85rem; }
.key::before { content: ""; display: inline-block; width: 1.1rem; margin-right: .35rem;
  vertical-align: middle; border-top: 3px solid; }
.k0::before { border-color: var(--s0); }
.k1::before { border-color: var(--s1); border-top-style: dashed; }
.k2::before { border-color: var(--s2); border-top-style: dotted; }
.k3::before { border-color: var(--s3); }
.k4::before { border-color: var(--s4); border-top-style: dashed; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; overflow-wrap: normal;
  font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--grid);
  white-space: nowrap; } th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.left td, .wrap td:last-child, .wrap th:last-child { text-align: left; }
.wrap td:last-child { white-space: normal; min-width: 14rem; }
)";

const Style kPlain{.unicode = true, .color = false};

std::string Nanos(double ns) { return FormatNanos(ns, kPlain); }
std::string NanosTick(double ns) {
  // Ticks are round: no trailing zeros.
  const auto [scale, unit] = ns < 999.5     ? std::pair(1.0, "ns")
                             : ns < 999.5e3 ? std::pair(1e3, "µs")
                             : ns < 999.5e6 ? std::pair(1e6, "ms")
                                            : std::pair(1e9, "s");
  return absl::StrFormat("%.3g %s", ns / scale, unit);
}
std::string PlainTick(double value) { return absl::StrFormat("%.6g", value); }

class TableHtml {
 public:
  explicit TableHtml(std::vector<std::string> header, const char* style = "")
      : html_(Cat("<div class=\"wide box\"><table class=\"", style, "\"><tr>")) {
    for (const std::string& cell : header) html_ += Cat("<th>", EscapeHtml(cell), "</th>");
    html_ += "</tr>\n";
  }
  void Add(const std::vector<std::string>& cells) {
    html_ += "<tr>";
    for (const std::string& cell : cells) html_ += Cat("<td>", EscapeHtml(cell), "</td>");
    html_ += "</tr>\n";
  }
  std::string ToString() const { return html_ + "</table></div>\n"; }

 private:
  std::string html_;
};

std::string Card(const std::string& value, const std::string& label) {
  return Cat("<div class=\"card\"><b>", EscapeHtml(value), "</b><span>", EscapeHtml(label),
             "</span></div>");
}

double FlashShare(const PhaseStats& stats) {
  int64_t flash = 0;
  for (const auto& [name, path] : stats.paths) {
    if (path.path_class == client::v1::PATH_CLASS_FLASH) flash += path.calls;
  }
  return stats.ok == 0 ? 0 : static_cast<double>(flash) / static_cast<double>(stats.ok);
}

std::string Cards(const LoadPhase& phase) {
  const PhaseStats& stats = phase.result.stats;
  std::string html = "<div class=\"cards\">";
  html += Card(absl::StrFormat("%.4g/s", phase.ok_per_s()),
               phase.result.open_loop
                   ? absl::StrFormat("calls of %.4g/s offered", phase.offered_per_s())
                   : Cat("calls, ", phase.result.max_in_flight, " in flight"));
  for (const auto& [name, quantile] : kQuantiles) {
    html +=
        Card(Nanos(static_cast<double>(stats.latency.ValueAt(quantile))), Cat(name, " latency"));
  }
  html += Card(Nanos(static_cast<double>(stats.service.ValueAt(0.99))), "p99 service time");
  html += Card(FormatPercent(phase.failed_share()), "failed");
  html += Card(FormatPercent(FlashShare(stats)), "of calls on a flash path");
  html += Card(FormatSi(phase.PerSecond(stats.flops_in_time), "FLOP/s"), "attention work");
  html += Card(FormatSi(phase.PerSecond(stats.bytes_in_time), "B/s"), "payload, both ways");
  return html + "</div>\n";
}

// Points of the quantile curve: x counts nines, -log10(1 - quantile).
PlotSeries QuantileCurve(const std::string& name, const load::Histogram& histogram, int color) {
  PlotSeries series{name, {}, color, false};
  const auto total = static_cast<double>(histogram.count());
  int64_t seen = 0;
  double last_x = -1;
  for (const load::Histogram::Bucket& bucket : histogram.Buckets()) {
    seen += bucket.count;
    // The last call has no quantile below 1; half a call keeps it in the picture.
    const double above = std::max(0.5, total - static_cast<double>(seen));
    const double x = std::log10(total / above);
    if (x - last_x < 0.01 && seen < histogram.count()) continue;
    last_x = x;
    const double middle =
        (static_cast<double>(bucket.lower) + static_cast<double>(bucket.upper)) / 2;
    series.points.emplace_back(x, std::max(middle, 1.0));
  }
  return series;
}

std::string LatencyPlot(const LoadPhase& phase) {
  const PhaseStats& stats = phase.result.stats;
  LinePlot plot;
  plot.title = "Latency distribution";
  plot.note = phase.result.open_loop
                  ? "latency from when a call was due; service time from when it was sent"
                  : "closed loop: a call is due when it is sent";
  plot.x = {"percentile",
            [](double nines) {
              const double below = 100 - 100 * std::pow(10.0, -nines);
              return nines < 0.5 ? absl::StrFormat("p%.0f", below)
                                 : absl::StrFormat("p%.6g", below);
            },
            false,
            {0}};
  const double most = std::log10(2.0 * static_cast<double>(std::max<int64_t>(1, stats.ok)));
  plot.x.ticks.push_back(std::log10(2.0));
  for (int nines = 1; nines <= std::max(1.0, std::ceil(most)); ++nines) {
    plot.x.ticks.push_back(nines);
  }
  plot.y = {"", NanosTick, true, {}};
  plot.series.push_back(QuantileCurve("latency", stats.latency, 0));
  if (phase.result.open_loop) {
    plot.series.push_back(QuantileCurve("service time", stats.service, 1));
  }
  return RenderLinePlot(plot);
}

std::string OverTime(const LoadPhase& phase) {
  const PhaseStats& stats = phase.result.stats;
  const double window_seconds = static_cast<double>(stats.window_ns()) * 1e-9;
  LinePlot rate, latency;
  rate.title = "Throughput over time";
  rate.x = latency.x = {"seconds since the warm-up", PlainTick, false, {}};
  rate.y = {"", [](double value) { return absl::StrFormat("%.4g/s", value); }, false, {}};
  rate.series = {{"done", {}, 0, true}};
  PlotSeries offered{"offered", {}, 1, false}, failed{"failed", {}, 3, false};
  latency.title = "Latency over time";
  latency.y = {"", NanosTick, true, {}};
  latency.series = {{"p50", {}, 0, true}, {"p99", {}, 1, true}, {"max", {}, 2, false}};
  for (const load::Window& window : stats.windows) {
    // The last window may be cut short.
    const double seconds =
        std::min(window_seconds, phase.result.measured_seconds - window.start_seconds);
    if (seconds < window_seconds / 2) continue;
    const double middle = window.start_seconds + seconds / 2;
    rate.series[0].points.emplace_back(middle, static_cast<double>(window.ok) / seconds);
    offered.points.emplace_back(middle, static_cast<double>(window.offered) / seconds);
    failed.points.emplace_back(middle, static_cast<double>(window.failed) / seconds);
    if (window.ok == 0) continue;
    latency.series[0].points.emplace_back(middle, static_cast<double>(window.p50_ns));
    latency.series[1].points.emplace_back(middle, static_cast<double>(window.p99_ns));
    latency.series[2].points.emplace_back(middle, static_cast<double>(window.max_ns));
  }
  if (phase.result.open_loop) rate.series.push_back(std::move(offered));
  if (stats.failed > 0) rate.series.push_back(std::move(failed));
  return RenderLinePlot(rate) + RenderLinePlot(latency);
}

std::string AgainstLoad(const LoadResult& result) {
  if (result.phases.size() < 2) return "";
  LinePlot plot;
  plot.title = "Latency against load";
  plot.x = {LevelTitle(result), PlainTick, false, {}};
  double lowest = result.phases[0].level, highest = lowest;
  for (const LoadPhase& phase : result.phases) {
    lowest = std::min(lowest, phase.level);
    highest = std::max(highest, phase.level);
  }
  plot.x.log = highest >= 8 * lowest;
  // The levels of a sweep are what the reader looks for; a search tries too many to name.
  if (!result.plan.slo && result.phases.size() <= 8) {
    for (const LoadPhase& phase : result.phases) plot.x.ticks.push_back(phase.level);
    std::sort(plot.x.ticks.begin(), plot.x.ticks.end());
  }
  plot.y = {"", NanosTick, true, {}};
  plot.series = {{"p50", {}, 0, true}, {"p99", {}, 1, true}, {"p99.9", {}, 2, true}};
  LinePlot rate;
  rate.title = "Throughput against load";
  rate.x = plot.x;
  rate.y = {"", [](double value) { return absl::StrFormat("%.4g/s", value); }, false, {}};
  rate.series = {{"done", {}, 0, true}};
  for (const LoadPhase& phase : result.phases) {
    const load::Histogram& latency = phase.result.stats.latency;
    int i = 0;
    for (const double quantile : {0.5, 0.99, 0.999}) {
      plot.series[i++].points.emplace_back(phase.level,
                                           static_cast<double>(latency.ValueAt(quantile)));
    }
    rate.series[0].points.emplace_back(phase.level, phase.ok_per_s());
  }
  // A search tries its rates in no order.
  for (LinePlot* drawn : {&plot, &rate}) {
    for (PlotSeries& series : drawn->series) std::sort(series.points.begin(), series.points.end());
  }
  return RenderLinePlot(plot) + RenderLinePlot(rate);
}

std::string PathPlot(const PhaseStats& stats) {
  ShareRow calls{"calls", {}}, flops{"FLOPs", {}};
  double all_flops = 0;
  for (const auto& [name, path] : stats.paths) all_flops += path.flops;
  int color = 0;
  for (const auto& [name, path] : stats.paths) {
    const std::string label =
        Cat(name, " (", ClassName(path.path_class), ", ", DeviceName(path.device_kind), ")");
    const double share = static_cast<double>(path.calls) / static_cast<double>(stats.ok);
    calls.parts.push_back({label, share, FormatPercent(share), color % 5});
    const double work = all_flops > 0 ? path.flops / all_flops : 0;
    flops.parts.push_back({label, work, FormatPercent(work), color % 5});
    ++color;
  }
  return RenderShares("Path share", "as the replies' reports say", {calls, flops});
}

std::string StagePlot(const PhaseStats& stats) {
  static constexpr const char* kLabels[load::kNumStages] = {
      "waiting to be sent", "client library", "wire",   "parse",       "gather", "queue",
      "device queue",       "to device",      "kernel", "from device", "reply",  "rest of server"};
  double total = 0;
  for (size_t i = 0; i < load::kNumStages; ++i) total += StageMeanNs(stats, static_cast<Stage>(i));
  std::vector<BarItem> items;
  for (size_t i = 0; i < load::kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const double mean = StageMeanNs(stats, stage);
    if (mean <= 0) continue;
    const int color = stage == Stage::kKernel ? 2 : load::IsOnServer(stage) ? 0 : 1;
    items.push_back({kLabels[i], mean, Cat(Nanos(mean), ", ", FormatPercent(mean / total)), color});
  }
  return RenderBars("Where the time of a call goes",
                    "means; orange: outside of the server, green: the kernel", items);
}

std::string PhaseTable(const LoadResult& result) {
  if (result.phases.size() < 2) return "";
  TableHtml table({"", "calls/s", "mean", "p50", "p90", "p99", "p99.9", "p99.99", "max",
                   "p99 service", "failed", result.plan.slo ? result.plan.slo->text : "steady"});
  for (const LoadPhase& phase : result.phases) {
    const PhaseStats& stats = phase.result.stats;
    const load::Stability& stability = phase.result.stability;
    std::vector<std::string> cells = {LevelName(result, phase),
                                      absl::StrFormat("%.4g", phase.ok_per_s()),
                                      Nanos(stats.latency.Mean())};
    for (const NamedQuantile& q : kQuantiles) {
      cells.push_back(Nanos(static_cast<double>(stats.latency.ValueAt(q.quantile))));
    }
    cells.push_back(Nanos(static_cast<double>(stats.latency.max())));
    cells.push_back(Nanos(static_cast<double>(stats.service.ValueAt(0.99))));
    cells.push_back(FormatPercent(phase.failed_share()));
    cells.push_back(result.plan.slo     ? (phase.met_slo ? "met" : "not met")
                    : !stability.judged ? "not judged"
                                        : (stability.stable ? "yes" : "no"));
    table.Add(cells);
  }
  return Cat("<h2>Levels</h2>", table.ToString());
}

std::string EntryTable(const LoadResult& result, const PhaseStats& stats) {
  TableHtml table({"kind of call", "weight", "ok", "failed", "p50", "p99", "p99.9", "max", "call"},
                  "wrap");
  for (size_t i = 0; i < result.entries.size(); ++i) {
    const load::EntryStats& entry = stats.entries[i];
    std::vector<std::string> cells = {result.entries[i].name,
                                      absl::StrFormat("%.4g", result.entries[i].weight),
                                      FormatCount(entry.ok), FormatCount(entry.failed)};
    for (const double quantile : {0.5, 0.99, 0.999}) {
      cells.push_back(Nanos(static_cast<double>(entry.latency.ValueAt(quantile))));
    }
    cells.push_back(Nanos(static_cast<double>(entry.latency.max())));
    cells.push_back(
        Cat(result.entries[i].pass == client::v1::PASS_BACKWARD ? "backward: " : "forward: ",
            result.entries[i].summary));
    table.Add(cells);
  }
  return Cat("<h2>Mix</h2>", table.ToString());
}

std::string SlowTable(const LoadResult& result, const PhaseStats& stats) {
  if (stats.slowest.empty()) return "";
  TableHtml table(
      {"kind of call", "latency", "service", "server", "due at", "path", "trace id", "request id"});
  for (const load::SlowCall& call : stats.slowest) {
    table.Add(
        {result.entries[call.entry].name, Nanos(static_cast<double>(call.latency_ns)),
         Nanos(static_cast<double>(call.service_ns)), Nanos(static_cast<double>(call.handler_ns)),
         absl::StrFormat("%.3f s", call.at_seconds), call.path, call.trace_id, call.request_id});
  }
  return Cat("<h2>Slowest calls</h2>", table.ToString());
}

std::string Rest(const LoadResult& result, const PhaseStats& stats) {
  std::string html;
  if (!stats.failures.empty()) {
    TableHtml table({"status", "calls", "first message"}, "left");
    for (const auto& [code, failure] : stats.failures) {
      table.Add({code, FormatCount(failure.count), failure.first_message});
    }
    html += Cat("<h2>Failed calls</h2>", table.ToString());
  }
  if (!stats.rejections.empty()) {
    TableHtml table({"faster path not taken", "calls"});
    for (const auto& [what, count] : stats.rejections) table.Add({what, FormatCount(count)});
    html += Cat("<h2>Why not faster</h2>", table.ToString());
  }
  if (result.verification) {
    TableHtml table({"tensor", "largest error / bound"});
    for (const auto& [tensor, ratio] : result.verification->worst_ratio) {
      table.Add({tensor, absl::StrFormat("%.3f", ratio)});
    }
    html += Cat("<h2>Verification</h2><p>", result.verification->replies,
                " replies held against float64, ", result.verification->wrong, " wrong</p>",
                table.ToString());
  }
  if (result.scraped) {
    TableHtml table({"server metric", "growth"});
    for (const auto& [sample, grown] : result.metrics) {
      table.Add({sample, absl::StrFormat("%+.9g", grown)});
    }
    html += Cat("<h2>Server metrics</h2>", table.ToString());
  }
  return html;
}

}  // namespace

std::string LoadToHtml(const LoadResult& result) {
  std::string html =
      Cat("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
          "<title>attn load: ",
          EscapeHtml(result.server), "</title><style>", kStyle,
          "</style></head>\n<body>\n<h1>attn load</h1><p>", EscapeHtml(Describe(result.plan)),
          " · attnd ", EscapeHtml(result.version), " at ", EscapeHtml(result.server),
          result.device.empty() ? "" : Cat(" · ", EscapeHtml(result.device)), " · ",
          EscapeHtml(result.started), "</p>\n");
  if (!result.problems.empty()) {
    html += "<div class=\"box warn\">";
    for (const std::string& problem : result.problems)
      html += Cat("<p>", EscapeHtml(problem), "</p>");
    html += "</div>\n";
  }
  if (!result.phases.empty()) {
    const LoadPhase& phase = MainPhase(result);
    const PhaseStats& stats = phase.result.stats;
    if (result.best_rate) {
      html += Cat("<h2>Highest rate with ", EscapeHtml(result.plan.slo->text), ": ",
                  absl::StrFormat("%.6g", *result.best_rate), " calls/s</h2>");
    }
    const std::string level = LevelName(result, phase);
    if (!level.empty()) html += Cat("<h2>At ", EscapeHtml(level), "</h2>");
    html += Cards(phase);
    html += Cat("<div class=\"plots\">\n", LatencyPlot(phase), OverTime(phase), AgainstLoad(result),
                StagePlot(stats), PathPlot(stats), "</div>\n");
    html += Cat(PhaseTable(result), EntryTable(result, stats), SlowTable(result, stats),
                Rest(result, stats));
  }
  return html + "</body></html>\n";
}

}  // namespace attn::cli
