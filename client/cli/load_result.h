// What attn load found, as its table, JSON, CSV and HTML show it.
#ifndef ATTN_CLIENT_CLI_LOAD_RESULT_H_
#define ATTN_CLIENT_CLI_LOAD_RESULT_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/format.h"
#include "client/cli/load_flags.h"
#include "client/load/phase.h"
#include "client/load/verify.h"

namespace attn::cli {

// Quantiles that are always shown, and their names.
struct NamedQuantile {
  const char* name;
  double quantile;
};
inline constexpr NamedQuantile kQuantiles[] = {
    {"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99.9", 0.999}, {"p99.99", 0.9999}};

struct EntryInfo {
  std::string name, summary;
  double weight = 1;
  client::v1::Pass pass = client::v1::PASS_FORWARD;
};

struct LoadPhase {
  double level = 0;  // concurrency, or rate; 0 where the plan brings its own rates
  load::PhaseResult result;
  bool met_slo = false;  // of a search

  double offered_per_s() const { return PerSecond(static_cast<double>(result.offered)); }
  double ok_per_s() const { return PerSecond(static_cast<double>(result.stats.ok_in_time)); }
  double PerSecond(double value) const {
    return result.measured_seconds > 0 ? value / result.measured_seconds : 0;
  }
  double failed_share() const {
    const int64_t ended = result.stats.ok + result.stats.failed;
    return ended == 0 ? 0 : static_cast<double>(result.stats.failed) / ended;
  }
};

struct LoadResult {
  std::string server;   // as --server names it
  std::string version;  // of the server
  std::string device;   // what it computes on
  std::string started;  // UTC, "2026-11-29T21:00:00Z"
  LoadPlan plan;
  int channels = 1;
  std::vector<EntryInfo> entries;
  std::vector<LoadPhase> phases;
  std::optional<double> best_rate;  // of a search: the highest rate that met the limit
  std::optional<load::Verification> verification;
  bool scraped = false;
  std::map<std::string, double> metrics;  // how counters grew
  bool interrupted = false;
  std::vector<std::string> problems;  // why the numbers do not stand, or miss their goal
};

// Share of a stage in the mean latency, and so on: sums over calls divided by calls.
double StageMeanNs(const load::PhaseStats& stats, load::Stage stage);

// The phase to show in detail: the last one; of a search, the best that met the limit.
const LoadPhase& MainPhase(const LoadResult& result);

// "8 in flight", "500/s": a phase of a sweep or a search; "" where there is but one.
std::string LevelName(const LoadResult& result, const LoadPhase& phase);
// What levels are: "calls in flight", "calls/s offered".
std::string LevelTitle(const LoadResult& result);

// "p99.99" and the like rest on few calls where there are fewer than 1 / (1 - quantile).
bool RestsOnMaximum(const load::Histogram& histogram, double quantile);

std::string RenderLoad(const LoadResult& result, const Style& style);
// One line about a running phase.
std::string LoadProgressLine(const load::PhaseProgress& progress, const Style& style);

nlohmann::ordered_json LoadToJson(const LoadResult& result);
// A line per phase, the first one names the columns.
std::string LoadToCsv(const LoadResult& result);
// A page of its own: no script, no external asset.
std::string LoadToHtml(const LoadResult& result);

// The file of --calls-csv.
std::string CallCsvHeader();
std::string CallCsvLine(const load::CallRecord& record, const LoadResult& result, double level,
                        int64_t measure_from_ns);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_LOAD_RESULT_H_
