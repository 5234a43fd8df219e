#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "client/load/stats.h"

namespace attn::load {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kSecond = 1000 * kMs;

CallRecord Ok(int64_t intended, int64_t sent, int64_t done, uint32_t entry = 0) {
  CallRecord record;
  record.entry = entry;
  record.intended_ns = intended;
  record.sent_ns = sent;
  record.done_ns = done;
  record.reply.call_ns = done - sent;
  record.reply.report.set_path("flash_cpu");
  record.reply.report.set_path_class(v1::PATH_CLASS_FLASH);
  record.reply.report.set_flops(1000);
  return record;
}

CallRecord Failed(int64_t intended, int64_t done, absl::Status status) {
  CallRecord record = Ok(intended, intended, done);
  record.reply.status = std::move(status);
  record.reply.report.Clear();
  return record;
}

TEST(PhaseStatsTest, LatencyCountsFromTheIntendedSend) {
  PhaseStats stats(1, 0, kSecond);
  stats.Add(Ok(0, 40 * kMs, 50 * kMs));
  EXPECT_EQ(stats.latency.max(), 50 * kMs);
  EXPECT_EQ(stats.service.max(), 10 * kMs);
  EXPECT_EQ(stats.ok, 1);
}

TEST(PhaseStatsTest, WarmUpIsNotCounted) {
  PhaseStats stats(1, kSecond, kSecond);
  stats.Add(Ok(kSecond - 1, kSecond - 1, 2 * kSecond));
  EXPECT_EQ(stats.ok, 0);
  EXPECT_TRUE(stats.windows.empty());
  stats.Add(Ok(kSecond, kSecond, kSecond + kMs));
  EXPECT_EQ(stats.ok, 1);
  EXPECT_EQ(stats.windows.size(), 1u);
}

TEST(PhaseStatsTest, WindowsCountOfferedByDueTimeAndDoneByEnd) {
  PhaseStats stats(1, 0, kSecond);
  stats.SetEnd(3 * kSecond);
  stats.Add(Ok(100 * kMs, 100 * kMs, 200 * kMs));
  stats.Add(Ok(900 * kMs, 900 * kMs, 1500 * kMs));
  stats.Add(Failed(1100 * kMs, 1200 * kMs, absl::ResourceExhaustedError("full")));
  stats.Add(Ok(2900 * kMs, 2900 * kMs, 3100 * kMs));  // ends after the end
  EXPECT_EQ(stats.CloseWindows(5 * kSecond), 3u);
  ASSERT_EQ(stats.windows.size(), 3u);
  EXPECT_EQ(stats.windows[0].offered, 2);
  EXPECT_EQ(stats.windows[0].ok, 1);
  EXPECT_EQ(stats.windows[1].offered, 1);
  EXPECT_EQ(stats.windows[1].ok, 1);
  EXPECT_EQ(stats.windows[1].failed, 1);
  EXPECT_EQ(stats.windows[2].offered, 1);
  EXPECT_EQ(stats.windows[2].ok, 0);
  EXPECT_EQ(stats.windows[1].max_ns, 600 * kMs);
  EXPECT_EQ(stats.ok, 3);
  EXPECT_EQ(stats.ok_in_time, 2);
  EXPECT_EQ(stats.latency.count(), 3);
}

TEST(PhaseStatsTest, StragglersCountInTheFirstOpenWindow) {
  PhaseStats stats(1, 0, kSecond);
  stats.SetEnd(10 * kSecond);
  stats.CloseWindows(2 * kSecond);
  stats.Add(Ok(0, 0, 500 * kMs));
  stats.CloseWindows(3 * kSecond);
  EXPECT_EQ(stats.windows[0].ok, 0);
  EXPECT_EQ(stats.windows[2].ok, 1);
  EXPECT_EQ(stats.windows[2].max_ns, 500 * kMs);
}

TEST(PhaseStatsTest, StagesAddUpToTheLatency) {
  PhaseStats stats(1, 0, kSecond);
  CallRecord record = Ok(0, 1000, 101'000);
  record.reply.call_ns = 90'000;
  v1::StageTimes* times = record.reply.report.mutable_times();
  times->set_parse_ns(1000);
  times->set_gather_ns(2000);
  times->set_queue_ns(3000);
  times->set_kernel_ns(40'000);
  times->set_reply_ns(500);
  times->set_handler_ns(50'000);
  stats.Add(record);
  double sum = 0;
  for (const double ns : stats.stage_ns) sum += ns;
  EXPECT_EQ(sum, 101'000);
  const auto at = [&](Stage stage) { return stats.stage_ns[static_cast<size_t>(stage)]; };
  EXPECT_EQ(at(Stage::kWait), 1000);
  EXPECT_EQ(at(Stage::kClient), 10'000);
  EXPECT_EQ(at(Stage::kWire), 40'000);
  EXPECT_EQ(at(Stage::kOther), 3500);
  EXPECT_EQ(stats.handler_ns, 50'000);
}

TEST(PhaseStatsTest, FailuresKeepTheirFirstMessage) {
  PhaseStats stats(2, 0, kSecond);
  stats.Add(Failed(0, kMs, absl::UnavailableError("first")));
  stats.Add(Failed(0, kMs, absl::UnavailableError("second")));
  stats.Add(Failed(0, kMs, absl::CancelledError("at the end")));
  EXPECT_EQ(stats.failed, 2);
  EXPECT_EQ(stats.cancelled, 1);
  EXPECT_EQ(stats.failures.at("UNAVAILABLE").count, 2);
  EXPECT_EQ(stats.failures.at("UNAVAILABLE").first_message, "first");
  EXPECT_TRUE(stats.latency.empty());
  EXPECT_EQ(stats.failed_latency.count(), 2);
}

TEST(PhaseStatsTest, PathsAndReasonsAreCounted) {
  PhaseStats stats(1, 0, kSecond);
  CallRecord record = Ok(0, 0, kMs);
  v1::Rejection* rejection = record.reply.report.add_rejections();
  rejection->set_path("flash_sm90");
  rejection->set_reason(v1::REASON_NO_CUDA_DEVICE);
  stats.Add(record);
  stats.Add(Ok(0, 0, kMs));
  EXPECT_EQ(stats.paths.at("flash_cpu").calls, 2);
  EXPECT_EQ(stats.paths.at("flash_cpu").flops, 2000);
  EXPECT_EQ(stats.rejections.at("flash_sm90:NO_CUDA_DEVICE"), 1);
}

TEST(PhaseStatsTest, KeepsTheSlowestInOrder) {
  PhaseStats stats(1, 0, kSecond);
  for (int i = 1; i <= 40; ++i) {
    CallRecord record = Ok(0, 0, (i * 7 % 41) * kMs);
    record.trace_id = std::to_string(i * 7 % 41);
    stats.Add(record);
  }
  ASSERT_EQ(stats.slowest.size(), PhaseStats::kSlowest);
  for (size_t i = 0; i < stats.slowest.size(); ++i) {
    EXPECT_EQ(stats.slowest[i].trace_id, std::to_string(40 - i));
  }
}

Window MakeWindow(int64_t offered, int64_t ok, double mean_ns) {
  Window window;
  window.offered = offered;
  window.ok = ok;
  window.mean_ns = mean_ns;
  return window;
}

TEST(StabilityTest, LastThreeWindowsDecide) {
  std::vector<Window> windows = {MakeWindow(10, 10, 9e6), MakeWindow(100, 100, 1e6),
                                 MakeWindow(100, 105, 1.05e6), MakeWindow(100, 95, 0.95e6)};
  EXPECT_TRUE(JudgeStability(windows, false, 0.1).stable);
  windows.back().mean_ns = 1.3e6;
  const Stability latency = JudgeStability(windows, false, 0.1);
  EXPECT_TRUE(latency.judged);
  EXPECT_FALSE(latency.stable);
  EXPECT_GT(latency.worst_latency, 0.1);
  windows.back() = MakeWindow(100, 70, 1e6);
  EXPECT_FALSE(JudgeStability(windows, false, 0.1).stable);
}

// Twice the offered load done twice as often is steady, a stall is not.
TEST(StabilityTest, OpenLoopIsJudgedByWhatWasOffered) {
  std::vector<Window> windows = {MakeWindow(100, 100, 1e6), MakeWindow(200, 200, 1e6),
                                 MakeWindow(150, 150, 1e6)};
  EXPECT_TRUE(JudgeStability(windows, true, 0.1).stable);
  EXPECT_FALSE(JudgeStability(windows, false, 0.1).stable);
  windows[1].ok = 100;
  EXPECT_FALSE(JudgeStability(windows, true, 0.1).stable);
}

TEST(StabilityTest, TooFewWindowsAreNotJudged) {
  EXPECT_FALSE(JudgeStability({MakeWindow(1, 1, 1), MakeWindow(1, 1, 1)}, false, 0.1).judged);
  EXPECT_FALSE(
      JudgeStability({MakeWindow(1, 1, 1), MakeWindow(1, 0, 0), MakeWindow(1, 1, 1)}, false, 0.1)
          .judged);
}

}  // namespace
}  // namespace attn::load
