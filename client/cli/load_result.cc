#include "client/cli/load_result.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

// A cell of CSV: quoted where it must be.
std::string Cell(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

std::string Join(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) line += Cat(i == 0 ? "" : ",", Cell(cells[i]));
  return line + "\n";
}

std::string Number(double value) { return absl::StrFormat("%.9g", value); }
std::string Seconds(int64_t ns) { return Number(static_cast<double>(ns) * 1e-9); }

}  // namespace

double StageMeanNs(const load::PhaseStats& stats, load::Stage stage) {
  if (stats.ok == 0) return 0;
  return stats.stage_ns[static_cast<size_t>(stage)] / static_cast<double>(stats.ok);
}

const LoadPhase& MainPhase(const LoadResult& result) {
  if (result.plan.mode == LoadMode::kSearch && result.best_rate) {
    for (const LoadPhase& phase : result.phases) {
      if (phase.met_slo && phase.level == *result.best_rate) return phase;
    }
  }
  return result.phases.back();
}

std::string LevelName(const LoadResult& result, const LoadPhase& phase) {
  if (result.phases.size() < 2) return "";
  if (result.plan.mode == LoadMode::kClosed) return Cat(phase.level, " in flight");
  return absl::StrFormat("%.6g/s", phase.level);
}

std::string LevelTitle(const LoadResult& result) {
  return result.plan.mode == LoadMode::kClosed ? "calls in flight" : "calls/s offered";
}

bool RestsOnMaximum(const load::Histogram& histogram, double quantile) {
  return static_cast<double>(histogram.count()) * (1 - quantile) < 1 - 1e-9;
}

std::string LoadToCsv(const LoadResult& result) {
  std::vector<std::string> columns = {
      "level",  "open_loop", "max_in_flight", "seconds",  "offered", "ok",
      "failed", "unsent",    "offered_per_s", "ok_per_s", "tflops",  "payload_gb_per_s"};
  for (const char* of : {"latency", "service"}) {
    columns.push_back(Cat(of, "_mean_s"));
    for (const NamedQuantile& q : kQuantiles) columns.push_back(Cat(of, "_", q.name, "_s"));
    columns.push_back(Cat(of, "_max_s"));
  }
  for (const char* more : {"handler_mean_s", "kernel_mean_s", "flash_share", "steady", "met_slo"}) {
    columns.push_back(more);
  }
  std::string csv = Join(columns);
  for (const LoadPhase& phase : result.phases) {
    const load::PhaseStats& stats = phase.result.stats;
    std::vector<std::string> cells = {Number(phase.level),
                                      phase.result.open_loop ? "1" : "0",
                                      Cat(phase.result.max_in_flight),
                                      Number(phase.result.measured_seconds),
                                      Cat(phase.result.offered),
                                      Cat(stats.ok),
                                      Cat(stats.failed),
                                      Cat(phase.result.unsent),
                                      Number(phase.offered_per_s()),
                                      Number(phase.ok_per_s()),
                                      Number(phase.PerSecond(stats.flops_in_time) * 1e-12),
                                      Number(phase.PerSecond(stats.bytes_in_time) * 1e-9)};
    for (const load::Histogram* histogram : {&stats.latency, &stats.service}) {
      cells.push_back(Number(histogram->Mean() * 1e-9));
      for (const NamedQuantile& q : kQuantiles) {
        cells.push_back(Seconds(histogram->ValueAt(q.quantile)));
      }
      cells.push_back(Seconds(histogram->max()));
    }
    int64_t flash = 0;
    for (const auto& [path, count] : stats.paths) {
      if (count.path_class == client::v1::PATH_CLASS_FLASH) flash += count.calls;
    }
    const double calls = static_cast<double>(std::max<int64_t>(1, stats.ok));
    cells.push_back(Number(stats.handler_ns / calls * 1e-9));
    cells.push_back(Number(StageMeanNs(stats, load::Stage::kKernel) * 1e-9));
    cells.push_back(Number(static_cast<double>(flash) / calls));
    const load::Stability& stability = phase.result.stability;
    cells.push_back(stability.judged ? (stability.stable ? "1" : "0") : "");
    cells.push_back(result.plan.slo ? (phase.met_slo ? "1" : "0") : "");
    csv += Join(cells);
  }
  return csv;
}

std::string CallCsvHeader() {
  return "level,entry,intended_s,sent_s,done_s,status,path,handler_s,trace_id,request_id\n";
}

std::string CallCsvLine(const load::CallRecord& record, const LoadResult& result, double level,
                        int64_t measure_from_ns) {
  const auto at = [&](int64_t ns) {
    return absl::StrFormat("%.9f", static_cast<double>(ns - measure_from_ns) * 1e-9);
  };
  const client::v1::ExecutionReport& report = record.reply.report;
  return Join({Number(level), result.entries[record.entry].name, at(record.intended_ns),
               at(record.sent_ns), at(record.done_ns),
               std::string(absl::StatusCodeToString(record.reply.status.code())), report.path(),
               Seconds(static_cast<int64_t>(report.times().handler_ns())), record.trace_id,
               report.request_id()});
}

}  // namespace attn::cli
