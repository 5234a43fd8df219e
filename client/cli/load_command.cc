// attn load.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/file_io.h"
#include "client/cli/interrupt.h"
#include "client/cli/load_flags.h"
#include "client/cli/load_mix.h"
#include "client/cli/load_result.h"
#include "client/cli/progress.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"
#include "client/load/metrics.h"
#include "client/load/search.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

constexpr std::chrono::seconds kScrapeTimeout{10};
// How near the answer of a search is to the lowest rate that failed, and how long it may look.
constexpr double kSearchPrecision = 0.05;
constexpr int kMaxProbes = 24;

std::string UtcNow() {
  const time_t now = time(nullptr);
  tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

absl::StatusOr<std::string> ReadText(const std::string& flag, const std::string& path) {
  absl::StatusOr<FileBytes> file = ReadFile(path);
  if (!file.ok()) return Within(flag, file.status());
  return std::string(reinterpret_cast<const char*>(file->bytes.data()), file->bytes.size());
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  return WriteFile(path, std::span(&bytes, 1));
}

std::string DeviceText(const v1::GetServerInfoResponse& info) {
  std::string text;
  for (const v1::DeviceInfo& device : info.devices()) {
    // A host's CPU is worth naming only where it is all there is.
    if (device.kind() == v1::DEVICE_KIND_CPU && !text.empty()) continue;
    text += Cat(text.empty() ? "" : ", ", device.name().empty() ? device.isa() : device.name());
  }
  return text;
}

class LoadRun {
 public:
  LoadRun(const Flags& flags, const Console& console)
      : flags_(flags),
        console_(console),
        style_(StyleOf(flags.output)),
        line_(flags.connection.progress || console.err_is_terminal, console.err_is_terminal) {}

  int Execute() {
    if (absl::Status status = Prepare(); !status.ok()) return ExplainLocal(status, console_);
    int exit_code = kExitOk;
    client_ = ConnectOrExplain(flags_, console_, &exit_code);
    if (client_ == nullptr) return exit_code;
    {
      InterruptGuard interrupt;
      interrupt_ = interrupt.flag();
      load::ClientTarget target(client_.get(), call_options_);
      if (absl::Status status = Meet(&target); !status.ok()) {
        return ExplainCall(flags_, status, console_);
      }
      if (absl::Status status = Measure(&target); !status.ok()) {
        return ExplainLocal(status, console_);
      }
      line_.Clear();
      interrupt_ = nullptr;
    }
    exit_code = Judge();
    if (absl::Status status = Print(); !status.ok()) return ExplainLocal(status, console_);
    for (const std::string& problem : result_.problems) console_.Error(problem);
    return exit_code;
  }

 private:
  // Everything that can fail here does so before the server is asked to work.
  absl::Status Prepare() {
    absl::StatusOr<client::CallOptions> options = CallOptionsOf(flags_.connection);
    if (!options.ok()) return options.status();
    call_options_ = *std::move(options);
    absl::StatusOr<LoadPlan> plan = MakeLoadPlan(flags_.load, flags_.problem.seed);
    if (!plan.ok()) return plan.status();
    result_.plan = *std::move(plan);
    if (!flags_.load.metrics.empty()) {
      absl::StatusOr<load::MetricsUrl> url = load::ParseMetricsUrl(flags_.load.metrics);
      if (!url.ok()) return Within("--metrics", url.status());
      metrics_url_ = *std::move(url);
    }
    if (absl::Status status = ReadMix(); !status.ok()) return status;
    if (flags_.load.calls_csv.empty()) return absl::OkStatus();
    calls_file_.open(flags_.load.calls_csv, std::ios::trunc);
    calls_file_ << CallCsvHeader();
    if (!calls_file_.good()) {
      return absl::InvalidArgumentError(
          Cat("--calls-csv ", flags_.load.calls_csv, ": cannot be written"));
    }
    return absl::OkStatus();
  }

  absl::Status ReadMix() {
    std::vector<MixFields> mix;
    if (!flags_.load.mix.empty()) {
      absl::StatusOr<std::string> text = ReadText("--mix", flags_.load.mix);
      if (!text.ok()) return text.status();
      absl::StatusOr<std::vector<MixFields>> parsed = ParseMix(*text);
      if (!parsed.ok()) return Within(Cat("--mix ", flags_.load.mix), parsed.status());
      mix = *std::move(parsed);
    }
    if (result_.plan.mode == LoadMode::kTrace) {
      absl::StatusOr<std::string> text = ReadText("--trace", flags_.load.trace);
      if (!text.ok()) return text.status();
      absl::StatusOr<std::vector<load::Arrival>> arrivals =
          ParseTrace(*text, flags_.load.trace_speed, &mix);
      if (!arrivals.ok()) return Within(Cat("--trace ", flags_.load.trace), arrivals.status());
      arrivals_ = *std::move(arrivals);
      result_.plan.phase.duration = std::chrono::nanoseconds(arrivals_.back().time_ns + 1);
    }
    absl::StatusOr<std::vector<load::MixEntry>> entries = MakeEntries(flags_, mix, style_);
    if (!entries.ok()) return entries.status();
    entries_ = *std::move(entries);
    for (const load::MixEntry& entry : entries_) {
      result_.entries.push_back({entry.name, entry.summary, entry.weight, entry.pass});
      result_.plan.phase.weights.push_back(entry.weight);
    }
    return absl::OkStatus();
  }

  // Learns who the server is, and that it takes every entry; computes what replies must hold.
  absl::Status Meet(load::ClientTarget* target) {
    client::CallOptions options = call_options_;
    options.cancel = interrupt_;
    absl::StatusOr<v1::GetServerInfoResponse> info = client_->ServerInfo(options);
    if (!info.ok()) return info.status();
    result_.server = flags_.connection.channel.target;
    result_.version = info->version();
    result_.device = DeviceText(*info);
    result_.started = UtcNow();
    result_.channels = flags_.connection.channel.channels;
    if (absl::Status status = target->Prepare(&entries_, interrupt_); !status.ok()) return status;
    if (flags_.load.verify_every == 0) return absl::OkStatus();
    line_.Show("computing the reference");
    absl::StatusOr<std::unique_ptr<load::Verifier>> verifier = load::Verifier::Create(entries_);
    line_.Clear();
    if (!verifier.ok()) return verifier.status();
    verifier_ = *std::move(verifier);
    return absl::OkStatus();
  }

  absl::StatusOr<load::Samples> Scrape() const {
    absl::StatusOr<std::string> page = load::FetchPage(*metrics_url_, kScrapeTimeout);
    if (!page.ok()) return page.status();
    return load::ParseExposition(*page);
  }

  absl::Status Measure(load::ClientTarget* target) {
    load::Samples before;
    if (metrics_url_) {
      absl::StatusOr<load::Samples> samples = Scrape();
      if (!samples.ok()) return Within("--metrics", samples.status());
      before = *std::move(samples);
    }
    if (absl::Status status = RunPhases(target); !status.ok()) return status;
    if (verifier_ != nullptr) result_.verification = verifier_->Result();
    if (!metrics_url_) return absl::OkStatus();
    // The load is done: its numbers are worth more than this page.
    if (absl::StatusOr<load::Samples> after = Scrape(); after.ok()) {
      result_.scraped = true;
      result_.metrics = load::Differences(before, *after);
    } else {
      console_.Note(Cat("no second look at --metrics: ", Message(after.status())));
    }
    return absl::OkStatus();
  }

  absl::Status RunPhases(load::ClientTarget* target) {
    if (result_.plan.mode == LoadMode::kSearch) return Search(target);
    for (const double level : result_.plan.levels) {
      if (absl::Status status = RunOne(target, level, PhaseAt(result_.plan, level)); !status.ok()) {
        return status;
      }
      const load::PhaseEnd end = result_.phases.back().result.end;
      if (end == load::PhaseEnd::kInterrupted || end == load::PhaseEnd::kAborted) break;
    }
    return absl::OkStatus();
  }

  absl::Status Search(load::ClientTarget* target) {
    const Slo& slo = *result_.plan.slo;
    load::RateSearch search(result_.plan.levels[0], kSearchPrecision, kMaxProbes);
    while (const std::optional<double> rate = search.Next()) {
      load::PhaseOptions options = PhaseAt(result_.plan, *rate);
      // A rate that is far too high is known to be so before its backlog is worked off.
      options.abort_p99 = std::chrono::nanoseconds(10 * slo.limit_ns);
      options.drain = std::min<std::chrono::nanoseconds>(
          options.drain, std::chrono::nanoseconds(10 * slo.limit_ns));
      if (absl::Status status = RunOne(target, *rate, std::move(options)); !status.ok()) {
        return status;
      }
      LoadPhase& phase = result_.phases.back();
      if (phase.result.end == load::PhaseEnd::kInterrupted) break;
      const load::PhaseResult& found = phase.result;
      phase.met_slo = found.end != load::PhaseEnd::kAborted && found.unsent == 0 &&
                      found.stats.cancelled == 0 && found.stats.ok > 0 &&
                      phase.failed_share() <= result_.plan.allowed_failed_share &&
                      found.stats.latency.ValueAt(slo.quantile) <= slo.limit_ns;
      search.Tell(phase.met_slo);
    }
    result_.best_rate = search.highest_passed();
    return absl::OkStatus();
  }

  absl::Status RunOne(load::ClientTarget* target, double level, load::PhaseOptions options) {
    if (result_.plan.mode == LoadMode::kTrace) {
      absl::StatusOr<std::unique_ptr<load::Schedule>> schedule = load::MakeTraceSchedule(arrivals_);
      if (!schedule.ok()) return schedule.status();
      options.schedule = *std::move(schedule);
    }
    load::PhaseHooks hooks;
    hooks.interrupt = interrupt_;
    hooks.verifier = verifier_.get();
    if (line_.shown()) {
      hooks.progress = [this](const load::PhaseProgress& progress) {
        if (line_.due()) line_.Show(LoadProgressLine(progress, style_));
      };
    }
    if (calls_file_.is_open()) {
      hooks.record = [this, level, &options](const load::CallRecord& record) {
        calls_file_ << CallCsvLine(record, result_, level, options.warm_up.count());
      };
    }
    absl::StatusOr<load::PhaseResult> phase = load::RunPhase(target, options, hooks);
    line_.Clear();
    if (!phase.ok()) return phase.status();
    result_.interrupted = phase->end == load::PhaseEnd::kInterrupted;
    result_.phases.push_back({level, *std::move(phase), false});
    return absl::OkStatus();
  }

  // Says what is wrong with the numbers; returns the exit status for it.
  int Judge() {
    std::vector<std::string>& problems = result_.problems;
    int exit_code = kExitOk;
    const auto problem = [&](ExitCode code, const std::string& text) {
      problems.push_back(text);
      if (exit_code == kExitOk) exit_code = code;
    };
    if (result_.verification && result_.verification->wrong > 0) {
      problem(kExitCheckFailed,
              Cat(result_.verification->wrong, " of ", result_.verification->replies,
                  " replies checked differ from the reference: ", result_.verification->faults[0]));
    }
    if (result_.interrupted)
      problem(kExitStopped, "interrupted; this is what there was until then");
    for (const LoadPhase& phase : result_.phases) JudgePhase(phase, problem);
    if (result_.plan.mode == LoadMode::kSearch && !result_.best_rate && !result_.interrupted) {
      problem(kExitUnsteady, Cat("no rate met ", result_.plan.slo->text));
    }
    return exit_code;
  }

  template <typename Problem>
  void JudgePhase(const LoadPhase& phase, const Problem& problem) const {
    // A search goes where things break; what matters is the best rate.
    if (result_.plan.mode == LoadMode::kSearch) return;
    const load::PhaseResult& found = phase.result;
    const std::string level = LevelName(result_, phase);
    const std::string at = level.empty() ? "" : Cat("at ", level, ": ");
    if (found.end == load::PhaseEnd::kAborted) {
      problem(kExitUnsteady, Cat(at, "aborted: ", found.abort_reason));
    }
    if (phase.failed_share() > result_.plan.allowed_failed_share) {
      const auto& [code, failure] = *std::max_element(
          found.stats.failures.begin(), found.stats.failures.end(),
          [](const auto& a, const auto& b) { return a.second.count < b.second.count; });
      problem(kExitUnsteady,
              Cat(at, found.stats.failed, " of ", found.stats.ok + found.stats.failed,
                  " calls failed, most with ", code, ": ", failure.first_message));
    }
    if (found.end == load::PhaseEnd::kInterrupted || found.end == load::PhaseEnd::kAborted) return;
    if (found.unsent > 0) {
      problem(kExitUnsteady, Cat(at, found.unsent, " of ", found.offered,
                                 " calls that were due were never sent: percentiles are a lower "
                                 "bound"));
    }
    if (!result_.plan.phase.judge_stability) return;
    const load::Stability& stability = found.stability;
    if (!stability.judged) {
      problem(kExitUnsteady, Cat(at, "steadiness cannot be judged: it needs ", load::kStableWindows,
                                 " whole windows with calls (--duration, --window; --stability 0 "
                                 "does not judge)"));
    } else if (!stability.stable) {
      problem(kExitUnsteady, Cat(at, "not steady: over the last ", load::kStableWindows,
                                 " windows throughput was off its mean by up to ",
                                 FormatPercent(stability.worst_throughput), ", mean latency by ",
                                 FormatPercent(stability.worst_latency), "; the limit is ",
                                 FormatPercent(result_.plan.phase.stability_tolerance)));
    }
  }

  absl::Status Print() {
    if (flags_.output.json) {
      // A message of a server may be any bytes.
      console_.out << LoadToJson(result_).dump(2, ' ', false,
                                               nlohmann::json::error_handler_t::replace)
                   << "\n";
    } else {
      console_.out << RenderLoad(result_, style_);
    }
    console_.out.flush();
    if (calls_file_.is_open()) {
      calls_file_.close();
      if (calls_file_.fail()) {
        return absl::InternalError(Cat("--calls-csv ", flags_.load.calls_csv, ": writing failed"));
      }
    }
    if (!flags_.load.csv.empty()) {
      if (absl::Status status = WriteText(flags_.load.csv, LoadToCsv(result_)); !status.ok()) {
        return Within("--csv", status);
      }
    }
    if (flags_.load.html.empty()) return absl::OkStatus();
    return Within("--html", WriteText(flags_.load.html, LoadToHtml(result_)));
  }

  const Flags& flags_;
  const Console& console_;
  const Style style_;
  StatusLine line_;
  client::CallOptions call_options_;
  std::optional<load::MetricsUrl> metrics_url_;
  std::vector<load::Arrival> arrivals_;  // of a trace
  std::vector<load::MixEntry> entries_;
  std::ofstream calls_file_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<load::Verifier> verifier_;
  const std::atomic<bool>* interrupt_ = nullptr;
  LoadResult result_;
};

}  // namespace

int RunLoad(const Flags& flags, const Console& console) {
  return LoadRun(flags, console).Execute();
}

}  // namespace attn::cli
