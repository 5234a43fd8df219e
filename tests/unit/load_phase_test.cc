// Whole phases against targets of this process. What is asserted holds however slow the machine is.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/load/phase.h"
#include "kernels/api/mutex.h"

namespace attn::load {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kMs = 1'000'000;

// Answers at once, or as the test says.
class FakeTarget final : public Target {
 public:
  CallReply Call(const CallRequest& request) override {
    MutexLock lock(mutex_);
    ++calls_;
    most_at_once_ = std::max(most_at_once_, ++at_once_);
    traces_.insert(request.traceparent);
    while (blocked_ && !request.cancel->load()) {
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + milliseconds(5));
    }
    --at_once_;
    CallReply reply;
    if (request.cancel->load()) {
      reply.status = absl::CancelledError("cancelled");
    } else if (fail_every_ > 0 && calls_ % fail_every_ == 0) {
      reply.status = absl::ResourceExhaustedError("full");
    }
    entries_.push_back(request.entry);
    return reply;
  }

  void Block(bool blocked) {
    {
      MutexLock lock(mutex_);
      blocked_ = blocked;
    }
    changed_.NotifyAll();
  }
  void FailEvery(int n) { fail_every_ = n; }
  int calls() {
    MutexLock lock(mutex_);
    return calls_;
  }
  int most_at_once() {
    MutexLock lock(mutex_);
    return most_at_once_;
  }
  size_t traces() {
    MutexLock lock(mutex_);
    return traces_.size();
  }
  std::vector<uint32_t> entries() {
    MutexLock lock(mutex_);
    return entries_;
  }

 private:
  int fail_every_ = 0;
  Mutex mutex_;
  CondVar changed_;
  bool blocked_ ATTN_GUARDED_BY(mutex_) = false;
  int calls_ ATTN_GUARDED_BY(mutex_) = 0;
  int at_once_ ATTN_GUARDED_BY(mutex_) = 0;
  int most_at_once_ ATTN_GUARDED_BY(mutex_) = 0;
  std::set<std::string> traces_ ATTN_GUARDED_BY(mutex_);
  std::vector<uint32_t> entries_ ATTN_GUARDED_BY(mutex_);
};

PhaseOptions Closed(int in_flight, int64_t calls) {
  PhaseOptions options;
  options.max_in_flight = in_flight;
  options.max_calls = calls;
  options.duration = seconds(60);
  options.weights = {1};
  options.judge_stability = false;
  return options;
}

PhaseOptions Open(int in_flight, std::vector<Arrival> arrivals) {
  PhaseOptions options = Closed(in_flight, 0);
  options.max_calls.reset();
  options.duration = std::chrono::nanoseconds(arrivals.back().time_ns + 1);
  auto schedule = MakeTraceSchedule(std::move(arrivals));
  options.schedule = *std::move(schedule);
  return options;
}

std::vector<Arrival> Every(int64_t gap_ns, int count) {
  std::vector<Arrival> arrivals;
  for (int i = 0; i < count; ++i) arrivals.push_back({i * gap_ns, 0});
  return arrivals;
}

PhaseResult RunOn(Target* target, const PhaseOptions& options, const PhaseHooks& hooks = {}) {
  absl::StatusOr<PhaseResult> result = RunPhase(target, options, hooks);
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

TEST(PhaseTest, ClosedLoopKeepsItsCallsInFlight) {
  FakeTarget target;
  target.Block(true);
  PhaseHooks hooks;
  hooks.progress = [&](const PhaseProgress& progress) {
    if (progress.in_flight == 3) target.Block(false);
  };
  const PhaseResult result = RunOn(&target, Closed(3, 100), hooks);
  EXPECT_EQ(result.end, PhaseEnd::kCalls);
  EXPECT_EQ(result.stats.ok, 100);
  EXPECT_EQ(target.calls(), 100);
  EXPECT_EQ(target.most_at_once(), 3);
  EXPECT_EQ(target.traces(), 100u);
  EXPECT_FALSE(result.open_loop);
  EXPECT_EQ(result.stats.latency.max(), result.stats.service.max());
}

TEST(PhaseTest, OpenLoopSendsEveryArrivalOnce) {
  FakeTarget target;
  std::vector<CallRecord> records;
  PhaseHooks hooks;
  hooks.record = [&](const CallRecord& record) { records.push_back(record); };
  const PhaseResult result = RunOn(&target, Open(8, Every(kMs / 2, 400)), hooks);
  EXPECT_EQ(result.stats.ok, 400);
  EXPECT_EQ(result.offered, 400);
  EXPECT_EQ(result.unsent, 0);
  std::vector<int64_t> intended;
  for (const CallRecord& record : records) {
    intended.push_back(record.intended_ns);
    EXPECT_GE(record.sent_ns, record.intended_ns);
    EXPECT_GE(record.done_ns, record.sent_ns);
  }
  std::sort(intended.begin(), intended.end());
  for (int i = 0; i < 400; ++i) EXPECT_EQ(intended[i], i * kMs / 2);
}

// The point of an open loop: while the target is stalled and every place is taken, calls become due
// all the same, and their latency counts from then.
TEST(PhaseTest, AStallDoesNotSlowTheScheduleDown) {
  FakeTarget target;
  target.Block(true);
  PhaseHooks hooks;
  // Long after the last arrival was due.
  hooks.progress = [&](const PhaseProgress& progress) {
    if (progress.seconds > 0.35) target.Block(false);
  };
  PhaseOptions options = Open(2, Every(kMs, 100));
  options.duration = milliseconds(200);
  const PhaseResult result = RunOn(&target, options, hooks);
  EXPECT_EQ(result.stats.ok, 100);
  EXPECT_EQ(result.unsent, 0);
  EXPECT_EQ(target.most_at_once(), 2);
  // The last arrival was due at 99 ms and cannot have ended before 350 ms.
  EXPECT_GE(result.stats.latency.min(), 250 * kMs);
  // But for the two in flight nothing was sent before the stall was over.
  EXPECT_LT(result.stats.service.ValueAt(0.9), result.stats.latency.min());
}

TEST(PhaseTest, WhatCannotBeSentInTimeIsUnsent) {
  FakeTarget target;
  target.Block(true);
  PhaseOptions options = Open(2, Every(kMs, 50));
  options.drain = milliseconds(100);
  const PhaseResult result = RunOn(&target, options);
  EXPECT_EQ(result.stats.ok, 0);
  EXPECT_EQ(result.stats.cancelled, 2);
  EXPECT_EQ(result.unsent, 48);
  EXPECT_EQ(result.offered, 50);
}

TEST(PhaseTest, EntriesOfATraceAreThoseSent) {
  FakeTarget target;
  PhaseOptions options = Open(1, {{0, 1}, {10, 0}, {20, 1}, {30, 2}});
  options.weights = {1, 1, 1};
  RunOn(&target, options);
  EXPECT_EQ(target.entries(), (std::vector<uint32_t>{1, 0, 1, 2}));
}

TEST(PhaseTest, InterruptGivesWhatThereIs) {
  FakeTarget target;
  std::atomic<bool> interrupt{false};
  PhaseHooks hooks;
  hooks.interrupt = &interrupt;
  hooks.progress = [&](const PhaseProgress& progress) {
    if (progress.stats->ok >= 10) interrupt.store(true);
  };
  PhaseOptions options = Open(4, Every(kMs, 100'000));
  const PhaseResult result = RunOn(&target, options, hooks);
  EXPECT_EQ(result.end, PhaseEnd::kInterrupted);
  EXPECT_GE(result.stats.ok, 10);
  EXPECT_LT(result.stats.ok, 100'000);
  // What was not yet due is not missing.
  EXPECT_LT(result.unsent, 50'000);
  EXPECT_LT(result.measured_seconds, 60);
}

TEST(PhaseTest, InterruptCancelsCallsThatHang) {
  FakeTarget target;
  target.Block(true);
  std::atomic<bool> interrupt{true};
  PhaseHooks hooks;
  hooks.interrupt = &interrupt;
  const PhaseResult result = RunOn(&target, Closed(2, 100), hooks);
  EXPECT_EQ(result.end, PhaseEnd::kInterrupted);
  EXPECT_EQ(result.stats.cancelled, 2);
}

TEST(PhaseTest, AbortsWhenTooManyCallsFail) {
  FakeTarget target;
  target.FailEvery(2);
  PhaseOptions options = Open(4, Every(kMs, 100'000));
  options.window = milliseconds(100);
  options.abort_failed_share = 0.3;
  const PhaseResult result = RunOn(&target, options);
  EXPECT_EQ(result.end, PhaseEnd::kAborted);
  EXPECT_NE(result.abort_reason.find("failed within one window"), std::string::npos);
  EXPECT_EQ(result.stats.failures.at("RESOURCE_EXHAUSTED").first_message, "full");

  options = Open(4, Every(kMs, 300));
  options.window = milliseconds(100);
  options.abort_failed_share = 0.6;
  EXPECT_EQ(RunOn(&target, options).end, PhaseEnd::kTime);
}

TEST(PhaseTest, AbortsWhenP99IsOverItsLimit) {
  FakeTarget target;
  PhaseOptions options = Open(4, Every(kMs, 100'000));
  options.window = milliseconds(100);
  options.abort_p99 = std::chrono::nanoseconds(1);
  const PhaseResult result = RunOn(&target, options);
  EXPECT_EQ(result.end, PhaseEnd::kAborted);
  EXPECT_NE(result.abort_reason.find("p99"), std::string::npos);
}

TEST(PhaseTest, EndsAsSoonAsItIsStable) {
  FakeTarget target;
  PhaseOptions options = Open(4, Every(kMs, 100'000));
  options.window = milliseconds(50);
  options.judge_stability = true;
  options.until_stable = true;
  options.stability_tolerance = 1e6;  // whatever the machine does
  const PhaseResult result = RunOn(&target, options);
  EXPECT_EQ(result.end, PhaseEnd::kStable);
  EXPECT_TRUE(result.stability.stable);
}

TEST(PhaseTest, WarmUpCallsAreSentButNotCounted) {
  FakeTarget target;
  int recorded = 0;
  PhaseHooks hooks;
  hooks.record = [&](const CallRecord&) { ++recorded; };
  PhaseOptions options = Open(4, Every(kMs, 100));
  options.warm_up = milliseconds(60);
  options.duration = milliseconds(40);
  const PhaseResult result = RunOn(&target, options, hooks);
  EXPECT_EQ(target.calls(), 100);
  EXPECT_EQ(result.stats.ok, 40);
  EXPECT_EQ(recorded, 40);
}

}  // namespace
}  // namespace attn::load
