// attn load as JSON. client/README.md documents the keys.
#include <algorithm>
#include <utility>

#include "client/cli/load_result.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

using Json = nlohmann::ordered_json;

// {"count", "mean", "min", "p50", …, "max"}, times in seconds.
Json HistogramJson(const load::Histogram& histogram) {
  Json json = {{"count", histogram.count()},
               {"mean", histogram.Mean() * 1e-9},
               {"min", static_cast<double>(histogram.min()) * 1e-9}};
  for (const NamedQuantile& q : kQuantiles) {
    json[q.name] = static_cast<double>(histogram.ValueAt(q.quantile)) * 1e-9;
  }
  json["max"] = static_cast<double>(histogram.max()) * 1e-9;
  return json;
}

Json WindowsJson(const load::PhaseStats& stats) {
  Json windows = Json::array();
  for (const load::Window& window : stats.windows) {
    windows.push_back({{"start", window.start_seconds},
                       {"offered", window.offered},
                       {"ok", window.ok},
                       {"failed", window.failed},
                       {"mean", window.mean_ns * 1e-9},
                       {"p50", static_cast<double>(window.p50_ns) * 1e-9},
                       {"p99", static_cast<double>(window.p99_ns) * 1e-9},
                       {"max", static_cast<double>(window.max_ns) * 1e-9}});
  }
  return windows;
}

Json StagesJson(const load::PhaseStats& stats) {
  Json stages = Json::object();
  for (size_t i = 0; i < load::kNumStages; ++i) {
    const auto stage = static_cast<load::Stage>(i);
    stages[load::Name(stage)] = StageMeanNs(stats, stage) * 1e-9;
  }
  const double calls = static_cast<double>(std::max<int64_t>(1, stats.ok));
  stages["handler"] = stats.handler_ns / calls * 1e-9;
  return stages;
}

Json PathsJson(const load::PhaseStats& stats) {
  double flops = 0;
  for (const auto& [name, path] : stats.paths) flops += path.flops;
  Json paths = Json::array();
  for (const auto& [name, path] : stats.paths) {
    paths.push_back({{"path", name},
                     {"class", ClassName(path.path_class)},
                     {"device", DeviceName(path.device_kind)},
                     {"calls", path.calls},
                     {"callShare", static_cast<double>(path.calls) / stats.ok},
                     {"flopShare", flops > 0 ? path.flops / flops : 0.0}});
  }
  return paths;
}

Json SlowestJson(const load::PhaseStats& stats, const LoadResult& result) {
  Json slowest = Json::array();
  for (const load::SlowCall& call : stats.slowest) {
    slowest.push_back({{"latency", static_cast<double>(call.latency_ns) * 1e-9},
                       {"service", static_cast<double>(call.service_ns) * 1e-9},
                       {"handler", static_cast<double>(call.handler_ns) * 1e-9},
                       {"at", call.at_seconds},
                       {"entry", result.entries[call.entry].name},
                       {"path", call.path},
                       {"traceId", call.trace_id},
                       {"requestId", call.request_id}});
  }
  return slowest;
}

const char* EndName(load::PhaseEnd end) {
  switch (end) {
    case load::PhaseEnd::kTime:
      return "time";
    case load::PhaseEnd::kCalls:
      return "calls";
    case load::PhaseEnd::kStable:
      return "stable";
    case load::PhaseEnd::kAborted:
      return "aborted";
    case load::PhaseEnd::kInterrupted:
      return "interrupted";
  }
  return "";
}

Json PhaseJson(const LoadPhase& phase, const LoadResult& result) {
  const load::PhaseResult& found = phase.result;
  const load::PhaseStats& stats = found.stats;
  Json failures = Json::array();
  for (const auto& [code, failure] : stats.failures) {
    failures.push_back(
        {{"status", code}, {"count", failure.count}, {"firstMessage", failure.first_message}});
  }
  Json entries = Json::array();
  for (size_t i = 0; i < stats.entries.size(); ++i) {
    entries.push_back({{"name", result.entries[i].name},
                       {"ok", stats.entries[i].ok},
                       {"failed", stats.entries[i].failed},
                       {"latency", HistogramJson(stats.entries[i].latency)},
                       {"service", HistogramJson(stats.entries[i].service)}});
  }
  Json json = {{"level", phase.level},
               {"openLoop", found.open_loop},
               {"maxInFlight", found.max_in_flight},
               {"end", EndName(found.end)},
               {"abortReason", found.abort_reason},
               {"seconds", found.measured_seconds},
               {"offered", found.offered},
               {"ok", stats.ok},
               {"failed", stats.failed},
               {"cancelled", stats.cancelled},
               {"unsent", found.unsent},
               {"retried", stats.retried},
               {"streamed", stats.streamed},
               {"offeredPerSecond", phase.offered_per_s()},
               {"okPerSecond", phase.ok_per_s()},
               {"flopsPerSecond", phase.PerSecond(stats.flops_in_time)},
               {"payloadBytesPerSecond", phase.PerSecond(stats.bytes_in_time)},
               {"latency", HistogramJson(stats.latency)},
               {"service", HistogramJson(stats.service)},
               {"failedLatency", HistogramJson(stats.failed_latency)},
               {"lateness", HistogramJson(stats.lateness)},
               {"stability",
                {{"judged", found.stability.judged},
                 {"stable", found.stability.stable},
                 {"throughputDeviation", found.stability.worst_throughput},
                 {"latencyDeviation", found.stability.worst_latency}}},
               {"generator", {{"cpuSeconds", found.cpu_seconds}, {"calls", found.cpu_calls}}}};
  json["stages"] = StagesJson(stats);
  json["paths"] = PathsJson(stats);
  json["rejections"] = stats.rejections;
  json["failures"] = std::move(failures);
  json["entries"] = std::move(entries);
  json["windows"] = WindowsJson(stats);
  json["slowest"] = SlowestJson(stats, result);
  if (result.plan.slo) json["metSlo"] = phase.met_slo;
  return json;
}

}  // namespace

Json LoadToJson(const LoadResult& result) {
  Json json = {{"command", "load"},
               {"server", result.server},
               {"serverVersion", result.version},
               {"device", result.device},
               {"started", result.started},
               {"mode", Describe(result.plan)},
               {"channels", result.channels},
               {"histogramRelativeError", load::Histogram::kMaxRelativeError}};
  json["mix"] = Json::array();
  for (const EntryInfo& entry : result.entries) {
    json["mix"].push_back(
        {{"name", entry.name},
         {"weight", entry.weight},
         {"pass", entry.pass == client::v1::PASS_BACKWARD ? "backward" : "forward"},
         {"call", entry.summary}});
  }
  json["phases"] = Json::array();
  for (const LoadPhase& phase : result.phases) json["phases"].push_back(PhaseJson(phase, result));
  if (result.plan.slo) {
    json["slo"] = {{"limit", result.plan.slo->text},
                   {"highestRate", result.best_rate ? Json(*result.best_rate) : Json(nullptr)}};
  }
  if (result.verification) {
    json["verification"] = {{"replies", result.verification->replies},
                            {"wrong", result.verification->wrong},
                            {"skipped", result.verification->skipped},
                            {"largestErrorOverBound", result.verification->worst_ratio},
                            {"faults", result.verification->faults}};
  }
  if (result.scraped) json["metrics"] = result.metrics;
  json["problems"] = result.problems;
  return json;
}

}  // namespace attn::cli
