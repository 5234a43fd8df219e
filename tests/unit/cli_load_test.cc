// attn load without a server: flags, mix and trace files, plots and reports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/exit_code.h"
#include "client/cli/load_flags.h"
#include "client/cli/load_mix.h"
#include "client/cli/load_plot.h"
#include "client/cli/load_result.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

absl::StatusOr<LoadPlan> Plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "load");
  return MakeLoadPlan(MustParse(arguments).load, 1);
}

std::string PlanError(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "load");
  Flags flags;
  const absl::Status parsed = ParseFlags(arguments, &flags);
  if (!parsed.ok()) return std::string(parsed.message());
  const auto plan = MakeLoadPlan(flags.load, 1);
  EXPECT_FALSE(plan.ok());
  return std::string(plan.status().message());
}

TEST(LoadPlanTest, DefaultsToOneCallInFlight) {
  const auto plan = Plan({});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->mode, LoadMode::kClosed);
  EXPECT_THAT(plan->levels, ElementsAre(1));
  EXPECT_EQ(plan->phase.duration, std::chrono::seconds(10));
  EXPECT_EQ(PhaseAt(*plan, 4).max_in_flight, 4);
  EXPECT_EQ(PhaseAt(*plan, 4).schedule, nullptr);
}

TEST(LoadPlanTest, RetriesAreOffUnderLoad) {
  EXPECT_EQ(MustParse({"load"}).connection.channel.max_retries, 0);
  EXPECT_EQ(MustParse({"load", "--retries", "2"}).connection.channel.max_retries, 2);
  EXPECT_EQ(MustParse({"forward"}).connection.channel.max_retries, 3);
}

TEST(LoadPlanTest, SchedulesBeginWithTheWarmUp) {
  const auto plan = Plan({"--steps", "100:2s,50:1s", "--arrivals", "constant", "--warm-up", "1s"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->phase.duration, std::chrono::seconds(3));
  EXPECT_FALSE(plan->phase.judge_stability);
  const load::PhaseOptions phase = PhaseAt(*plan, 0);
  load::Arrival arrival;
  int count = 0;
  while (phase.schedule->Next(&arrival)) ++count;
  EXPECT_EQ(count, 100 + 200 + 50);
  EXPECT_LT(arrival.time_ns, 4'000'000'000);
  EXPECT_EQ(phase.max_in_flight, 256);
}

TEST(LoadPlanTest, SloIsAPercentileAndALimit) {
  const auto plan = Plan({"--slo", "p99.9<50ms"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->mode, LoadMode::kSearch);
  EXPECT_NEAR(plan->slo->quantile, 0.999, 1e-12);
  EXPECT_EQ(plan->slo->limit_ns, 50 * kMs);
  EXPECT_THAT(plan->levels, ElementsAre(10));
}

TEST(LoadPlanTest, SaysWhatIsWrong) {
  EXPECT_THAT(PlanError({"--rate", "5", "--concurrency", "2"}), HasSubstr("exclude each other"));
  EXPECT_THAT(PlanError({"--rate", "5,x"}), HasSubstr("--rate 5,x: 'x'"));
  EXPECT_THAT(PlanError({"--concurrency", "1.5"}), HasSubstr("whole number within 1 and 4096"));
  EXPECT_THAT(PlanError({"--steps", "100"}), HasSubstr("RATE:DURATION"));
  EXPECT_THAT(PlanError({"--ramp", "1:2:3s,4:5"}), HasSubstr("FROM:TO:DURATION"));
  EXPECT_THAT(PlanError({"--ramp", "1:-2:3s"}), HasSubstr("'1:-2:3s'"));
  EXPECT_THAT(PlanError({"--slo", "99<1s"}), HasSubstr("p99<50ms"));
  EXPECT_THAT(PlanError({"--slo", "p99<1s", "--rate", "1,2"}), HasSubstr("one rate"));
  EXPECT_THAT(PlanError({"--window", "1ms"}), HasSubstr("at least 10ms"));
  EXPECT_THAT(PlanError({"--duration", "x"}), HasSubstr("--duration"));
  EXPECT_THAT(PlanError({"--payload", "shm"}), HasSubstr("--payload"));
  EXPECT_THAT(PlanError({"--until-stable", "--ramp", "1:2:3s"}), HasSubstr("--until-stable"));
}

// ------------------------------------------------------------------------------- mix and trace

TEST(MixTest, EntriesStandOverTheFlags) {
  const Flags flags = MustParse({"load", "--num-heads", "2", "--seqlen-q", "8", "--dtype", "bf16"});
  const auto mix = ParseMix(R"({"entries": [
    {"name": "a", "weight": 3, "seqlen_q": 16, "causal": true},
    {"name": "b", "pass": "backward", "head-dim": 32, "seqlens_k": [4]}]})");
  ASSERT_TRUE(mix.ok()) << mix.status();
  const auto entries = MakeEntries(flags, *mix, Style{});
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2u);
  const load::MixEntry& a = (*entries)[0];
  const load::MixEntry& b = (*entries)[1];
  EXPECT_EQ(a.weight, 3);
  EXPECT_EQ(b.weight, 1);
  EXPECT_EQ(a.pass, v1::PASS_FORWARD);
  EXPECT_EQ(b.pass, v1::PASS_BACKWARD);
  EXPECT_TRUE(a.forward.header.options().causal());
  EXPECT_FALSE(b.forward.header.options().causal());
  EXPECT_THAT(a.forward.inputs.q.shape, ElementsAre(1, 16, 2, 64));
  EXPECT_THAT(b.backward.inputs.q.shape, ElementsAre(1, 8, 2, 32));
  EXPECT_THAT(b.backward.header.options().seqlens_k(), ElementsAre(4));
  EXPECT_EQ(a.forward.inputs.q.dtype, v1::DTYPE_BF16);
  EXPECT_FALSE(b.backward.dout.empty());
}

TEST(MixTest, FlagsAloneMakeTheEntries) {
  const std::vector<std::string> small = {"load", "--seqlen-q", "4", "--num-heads", "1"};
  EXPECT_EQ(MakeEntries(MustParse(small), {}, Style{})->size(), 1u);
  std::vector<std::string> mixed = small;
  mixed.insert(mixed.end(), {"--pass", "mixed"});
  const auto entries = MakeEntries(MustParse(mixed), {}, Style{});
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ((*entries)[1].pass, v1::PASS_BACKWARD);
}

std::string MixError(const std::string& json) {
  const auto mix = ParseMix(json);
  if (!mix.ok()) return std::string(mix.status().message());
  const auto entries = MakeEntries(MustParse({"load", "--seqlen-q", "4"}), *mix, Style{});
  EXPECT_FALSE(entries.ok()) << json;
  return entries.ok() ? "" : std::string(entries.status().message());
}

TEST(MixTest, SaysWhatIsWrong) {
  EXPECT_THAT(MixError("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(MixError("{}"), HasSubstr("entries"));
  EXPECT_THAT(MixError("[]"), HasSubstr("not a list"));
  EXPECT_THAT(MixError("[1]"), HasSubstr("entry 1 is not an object"));
  EXPECT_THAT(MixError(R"([{"seqlen_q": {"x": 1}}])"), HasSubstr("'seqlen_q'"));
  EXPECT_THAT(MixError(R"([{"name": "a", "seqlen": 3}])"), HasSubstr("entry 'a'"));
  EXPECT_THAT(MixError(R"([{"name": "a", "weight": 0}])"), HasSubstr("weight '0'"));
  EXPECT_THAT(MixError(R"([{"name": "a", "pass": "sideways"}])"), HasSubstr("sideways"));
  EXPECT_THAT(MixError(R"([{"payload": "handle"}])"), HasSubstr("payload 'handle'"));
  EXPECT_THAT(MixError(R"([{"name": "a"}, {"name": "a"}])"), HasSubstr("two entries"));
  EXPECT_THAT(MixError(R"([{"seqlen_q": -1}])"), HasSubstr("--seqlen-q"));
}

TEST(TraceTest, EqualRowsAreOneEntry) {
  std::vector<MixFields> mix;
  const auto arrivals = ParseTrace(
      "# recorded\nseconds,seqlen_q,causal\n10.5,16,true\r\n10.0,32,\n11,16,true\n", 2, &mix);
  ASSERT_TRUE(arrivals.ok()) << arrivals.status();
  ASSERT_EQ(arrivals->size(), 3u);
  EXPECT_EQ((*arrivals)[0].time_ns, 0);
  EXPECT_EQ((*arrivals)[1].time_ns, 250 * kMs);
  EXPECT_EQ((*arrivals)[2].time_ns, 500 * kMs);
  EXPECT_EQ(mix.size(), 2u);
  EXPECT_EQ((*arrivals)[1].entry, (*arrivals)[2].entry);
  EXPECT_NE((*arrivals)[0].entry, (*arrivals)[1].entry);
  const auto entries = MakeEntries(MustParse({"load", "--num-heads", "1"}), mix, Style{});
  ASSERT_TRUE(entries.ok()) << entries.status();
  EXPECT_TRUE((*entries)[*(*arrivals)[1].entry].forward.header.options().causal());
}

TEST(TraceTest, RowsMayNameEntriesOfTheMix) {
  auto mix = ParseMix(R"([{"name": "a"}, {"name": "b"}])");
  const auto arrivals = ParseTrace("entry,seconds\nb,1\n\"a\",2\n", 1, &*mix);
  ASSERT_TRUE(arrivals.ok()) << arrivals.status();
  EXPECT_EQ((*arrivals)[0].entry, 1u);
  EXPECT_EQ((*arrivals)[1].entry, 0u);
  EXPECT_EQ(mix->size(), 2u);
}

TEST(TraceTest, NamesTheBadLine) {
  const auto error = [](const std::string& csv) {
    std::vector<MixFields> mix;
    const auto arrivals = ParseTrace(csv, 1, &mix);
    EXPECT_FALSE(arrivals.ok()) << csv;
    return std::string(arrivals.status().message());
  };
  EXPECT_THAT(error("seqlen_q\n1\n"), HasSubstr("line 1: no column 'seconds'"));
  EXPECT_THAT(error("seconds,seqlen_q\n1\n"), HasSubstr("line 2: 1 cells, but 2 columns"));
  EXPECT_THAT(error("seconds\n1\nnan\n"), HasSubstr("line 3: seconds 'nan'"));
  EXPECT_THAT(error("seconds,entry\n1,x\n"), HasSubstr("no entry 'x'"));
  EXPECT_THAT(error("seconds\n"), HasSubstr("no calls"));
}

// ------------------------------------------------------------------------------------- reports

LoadResult Sample(size_t phases, const std::string& message = "too <busy> & \"full\"") {
  LoadResult result;
  result.server = "127.0.0.1:1";
  result.version = "1.2.3";
  result.device = "<script>alert(1)</script>";
  result.started = "2026-01-01T00:00:00Z";
  result.plan.mode = LoadMode::kRate;
  result.entries = {{"small", "BSHD fp32", 1, v1::PASS_FORWARD}};
  for (size_t p = 0; p < phases; ++p) {
    load::PhaseStats stats(1, 0, 1000 * kMs);
    stats.SetEnd(3000 * kMs);
    for (int i = 0; i < 300; ++i) {
      load::CallRecord record;
      record.intended_ns = i * 10 * kMs;
      record.sent_ns = record.intended_ns + kMs;
      record.done_ns = record.sent_ns + (1 + i % 5) * kMs;
      record.trace_id = "0123456789abcdef0123456789abcdef";
      record.reply.call_ns = kMs;
      record.reply.report.set_path(i % 3 == 0 ? "standard_cpu" : "flash_cpu");
      record.reply.report.set_path_class(i % 3 == 0 ? v1::PATH_CLASS_STANDARD
                                                    : v1::PATH_CLASS_FLASH);
      record.reply.report.set_flops(100);
      record.reply.report.mutable_times()->set_handler_ns(kMs / 2);
      record.reply.report.mutable_times()->set_kernel_ns(kMs / 4);
      if (i == 7) record.reply.status = absl::ResourceExhaustedError(message);
      stats.Add(record);
    }
    stats.CloseWindows(4000 * kMs);
    load::PhaseResult phase(std::move(stats));
    phase.open_loop = true;
    phase.measured_seconds = 3;
    phase.offered = 300;
    phase.stability = {true, true, 0.01, 0.02};
    result.phases.push_back({100.0 * static_cast<double>(p + 1), std::move(phase), false});
  }
  return result;
}

TEST(LoadReportTest, JsonHasTheNumbers) {
  const nlohmann::ordered_json json = LoadToJson(Sample(1));
  const auto& phase = json["phases"][0];
  EXPECT_EQ(phase["ok"], 299);
  EXPECT_EQ(phase["failed"], 1);
  EXPECT_NEAR(phase["latency"]["max"].get<double>(), 0.006, 1e-9);
  EXPECT_NEAR(phase["service"]["max"].get<double>(), 0.005, 1e-9);
  EXPECT_NEAR(phase["stages"]["wait"].get<double>(), 0.001, 1e-9);
  EXPECT_EQ(phase["windows"].size(), 3u);
  EXPECT_EQ(phase["slowest"].size(), 10u);
  EXPECT_EQ(phase["paths"].size(), 2u);
  EXPECT_EQ(phase["failures"][0]["firstMessage"], "too <busy> & \"full\"");
}

TEST(LoadReportTest, CsvHasALinePerPhase) {
  const std::string csv = LoadToCsv(Sample(3));
  std::vector<std::string> lines;
  std::istringstream stream(csv);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 4u);
  const auto commas = [](const std::string& line) {
    return std::count(line.begin(), line.end(), ',');
  };
  for (const std::string& line : lines) EXPECT_EQ(commas(line), commas(lines[0])) << line;
  EXPECT_TRUE(lines[2].starts_with("200,1,"));
}

TEST(LoadReportTest, TextFitsThePage) {
  for (const size_t phases : {size_t{1}, size_t{2}}) {
    const std::string text = RenderLoad(Sample(phases), Style{});
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) {
      EXPECT_LE(DisplayWidth(line), kPageWidth) << line;
    }
    EXPECT_THAT(text, HasSubstr("flash_cpu"));
    EXPECT_THAT(text, HasSubstr("0123456789abcdef0123456789abcdef"));
  }
}

// No script, nothing fetched, and what a server says is text, never markup.
TEST(LoadReportTest, HtmlIsSelfContainedAndSafe) {
  const std::string html = LoadToHtml(Sample(2, "<img src=x onerror=alert(1)>"));
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("<img")));
  EXPECT_THAT(html, HasSubstr("&lt;img src=x"));
  for (const char* outside : {"http://", "https://", "url(", "@import", "src=\"", "href="}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  for (const char* plot : {"Latency distribution", "Throughput over time", "Latency over time",
                           "Latency against load", "Where the time of a call goes", "Path share"}) {
    EXPECT_THAT(html, HasSubstr(plot));
  }
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_THAT(html, Not(HasSubstr("inf\"")));
}

TEST(LoadReportTest, NothingMeasuredIsStillAReport) {
  LoadResult result = Sample(0);
  load::PhaseResult nothing(load::PhaseStats(1, 0, kMs));
  result.phases.push_back({1, std::move(nothing), false});
  EXPECT_FALSE(RenderLoad(result, Style{}).empty());
  EXPECT_THAT(LoadToHtml(result), HasSubstr("</html>"));
  EXPECT_FALSE(LoadToCsv(result).empty());
  EXPECT_EQ(LoadToJson(result)["phases"][0]["ok"], 0);
}

// --------------------------------------------------------------------------------------- plots

TEST(PlotTest, TicksSpanTheRangeAndAreFew) {
  for (const auto& [low, high] :
       {std::pair(0.0, 1.0), {0.5, 5.5}, {0.0, 227.0}, {17.0, 18.0}, {0.0, 2600.0}, {1e-9, 3e-9}}) {
    const std::vector<double> ticks = ChooseTicks(low, high, false);
    ASSERT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.size(), 9u) << low << " " << high;
    EXPECT_LE(ticks.front(), low + 1e-12);
    EXPECT_GE(ticks.back(), high - 1e-12);
  }
  for (const auto& [low, high] : {std::pair(4e5, 8e6), {1.0, 1e9}, {3.0, 3.1}, {99.0, 101.0}}) {
    const std::vector<double> ticks = ChooseTicks(low, high, true);
    ASSERT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.size(), 12u) << low << " " << high;
    EXPECT_LE(ticks.front(), low);
    EXPECT_GE(ticks.back(), high);
  }
}

TEST(PlotTest, SeriesWithoutPointsDrawNothing) {
  LinePlot plot;
  plot.x.format = plot.y.format = [](double) { return std::string("t"); };
  plot.series = {{"empty", {}, 0, false}};
  EXPECT_EQ(RenderLinePlot(plot), "");
  plot.y.log = true;
  plot.series[0].points = {{1, 0}};
  EXPECT_EQ(RenderLinePlot(plot), "");
  EXPECT_EQ(RenderBars("t", "", {{"a", 0, "", 0}}), "");
}

TEST(LoadCommandTest, UsageErrorsExitWithTwo) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"load", "--mix", "/nonexistent"},
        {"load", "--rate", "0"},
        {"load", "--metrics", "https://x"},
        {"load", "--calls-csv", "/nonexistent/x", "--seqlen-q", "4"}}) {
    const Ran ran = RunCommand(arguments);
    EXPECT_EQ(ran.exit_code, kExitUsage) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("attn: "));
  }
}

}  // namespace
}  // namespace attn::cli
