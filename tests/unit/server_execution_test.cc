#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "server/execution/admission.h"
#include "server/execution/buffer_pool.h"
#include "server/execution/executor.h"
#include "server/execution/path_table.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// ------------------------------------------------------------------------------------ admission

TEST(AdmissionTest, CountsExactlyAndReleases) {
  FakeClock clock;
  Admission admission({.max_requests = 2, .max_bytes = 100, .max_request_bytes = 80}, &clock);
  milliseconds retry{0};
  auto a = admission.Admit(40, 20, &retry);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(admission.stats().requests, 1);
  EXPECT_EQ(admission.stats().bytes, 60u);
  auto b = admission.Admit(40, 0, &retry);
  ASSERT_TRUE(b.ok());
  a->Release();
  EXPECT_EQ(admission.stats().bytes, 40u);
  Admission::Ticket moved = *std::move(b);
  b->Release();  // moved from: nothing
  EXPECT_EQ(admission.stats().requests, 1);
  moved.Release();
  EXPECT_EQ(admission.stats().requests, 0);
  EXPECT_EQ(admission.stats().bytes, 0u);
}

TEST(AdmissionTest, RefusesByCountAndByBytesWithARetryHint) {
  FakeClock clock;
  Admission admission({.max_requests = 2, .max_bytes = 100, .max_request_bytes = 100}, &clock);
  milliseconds retry{0};
  auto a = admission.Admit(60, 0, &retry);
  ASSERT_TRUE(a.ok());
  const auto full = admission.Admit(41, 0, &retry);
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.status().ToString(), AllOf(HasSubstr("41"), HasSubstr("60"), HasSubstr("100")));
  EXPECT_GT(retry.count(), 0);
  auto b = admission.Admit(40, 0, &retry);
  ASSERT_TRUE(b.ok());
  retry = milliseconds(0);
  EXPECT_THAT(admission.Admit(0, 0, &retry).status().ToString(),
              HasSubstr("--max-inflight-requests"));
  EXPECT_GT(retry.count(), 0);
}

TEST(AdmissionTest, ACallThatNeverFitsGetsNoRetryHint) {
  FakeClock clock;
  Admission admission({.max_requests = 2, .max_bytes = 100, .max_request_bytes = 80}, &clock);
  milliseconds retry{0};
  EXPECT_THAT(admission.Admit(81, 0, &retry).status().ToString(), HasSubstr("--max-request-bytes"));
  EXPECT_THAT(admission.Admit(80, 21, &retry).status().ToString(),
              HasSubstr("--max-inflight-bytes"));
  EXPECT_EQ(retry.count(), 0);
}

TEST(AdmissionTest, DrainRefusesAndWaitsForTheLast) {
  FakeClock clock;
  Admission admission({.max_requests = 2, .max_bytes = 100, .max_request_bytes = 80}, &clock);
  milliseconds retry{0};
  auto a = admission.Admit(1, 0, &retry);
  ASSERT_TRUE(a.ok());
  admission.BeginDrain();
  EXPECT_EQ(admission.Admit(1, 0, &retry).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(admission.WaitIdle(std::chrono::steady_clock::now()));  // still one out
  std::thread finisher([&a] { a->Release(); });
  EXPECT_TRUE(admission.WaitIdle(std::chrono::steady_clock::now() + std::chrono::hours(1)));
  finisher.join();
}

TEST(AdmissionTest, HastenEndsTheWait) {
  FakeClock clock;
  Admission admission({.max_requests = 2, .max_bytes = 100, .max_request_bytes = 80}, &clock);
  milliseconds retry{0};
  auto a = admission.Admit(1, 0, &retry);
  ASSERT_TRUE(a.ok());
  std::thread other([&admission] { admission.Hasten(); });
  EXPECT_FALSE(admission.WaitIdle(std::chrono::steady_clock::now() + std::chrono::hours(1)));
  other.join();
}

// ------------------------------------------------------------------------------------- executor

// Records how it ended, and can hold its worker at a gate.
class TestJob : public Job {
 public:
  explicit TestJob(Gate* gate = nullptr, TimePoint deadline = TimePoint::max())
      : gate_(gate), deadline_(deadline) {}
  void Run() override {
    if (gate_ != nullptr) gate_->Wait();
    End(absl::OkStatus());
  }
  void Drop(const absl::Status& status) override { End(status); }
  const CancelToken& token() const override { return token_; }
  TimePoint deadline() const override { return deadline_; }
  uint64_t bytes() const override { return 10; }

  void Cancel() { token_.Cancel(); }
  absl::Status AwaitEnd() {
    MutexLock lock(mutex_);
    while (ends_ == 0) ended_.Wait(mutex_);
    return status_;
  }
  int ends() {
    MutexLock lock(mutex_);
    return ends_;
  }

 private:
  void End(const absl::Status& status) {
    MutexLock lock(mutex_);
    status_ = status;
    ++ends_;
    ended_.NotifyAll();
  }

  Gate* const gate_;
  const TimePoint deadline_;
  CancelToken token_;
  Mutex mutex_;
  CondVar ended_;
  absl::Status status_ ATTN_GUARDED_BY(mutex_);
  int ends_ ATTN_GUARDED_BY(mutex_) = 0;
};

TEST(ExecutorTest, RunsJobsAndGaugesReturnToZero) {
  FakeClock clock;
  Gate gate;
  TestJob first(&gate), second, third;
  Executor executor(1, &clock);
  executor.Submit(&first);
  gate.AwaitWaiting(1);
  executor.Submit(&second);
  executor.Submit(&third);
  EXPECT_EQ(executor.stats().queued_requests, 2);
  EXPECT_EQ(executor.stats().queued_bytes, 20u);
  EXPECT_EQ(executor.stats().running, 1);
  gate.Open();
  EXPECT_TRUE(third.AwaitEnd().ok());
  EXPECT_TRUE(second.AwaitEnd().ok());
  executor.Shutdown();
  EXPECT_EQ(executor.stats().queued_requests, 0);
  EXPECT_EQ(executor.stats().queued_bytes, 0u);
  EXPECT_EQ(executor.stats().running, 0);
  EXPECT_EQ(first.ends(), 1);
}

TEST(ExecutorTest, CancelledWhileQueuedIsAnsweredBehindALongJob) {
  FakeClock clock;
  Gate gate;
  TestJob stuck(&gate), queued;
  Executor executor(1, &clock);
  executor.Submit(&stuck);
  gate.AwaitWaiting(1);
  executor.Submit(&queued);
  queued.Cancel();
  executor.DropIfQueued(&queued);
  EXPECT_EQ(queued.ends(), 1);  // before the gate opens
  EXPECT_EQ(queued.AwaitEnd().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(executor.stats().queued_requests, 0);
  executor.DropIfQueued(&queued);  // no longer queued: nothing
  executor.DropIfQueued(&stuck);   // running: nothing
  gate.Open();
  executor.Shutdown();
  EXPECT_EQ(queued.ends(), 1);
  EXPECT_EQ(stuck.ends(), 1);
}

TEST(ExecutorTest, ExpiredWhileQueuedIsDroppedWithoutItsTurn) {
  FakeClock clock;
  Gate gate;
  TestJob stuck(&gate);
  TestJob soon(nullptr, clock.Now() + seconds(1)), later(nullptr, clock.Now() + seconds(9));
  Executor executor(1, &clock);
  executor.Submit(&stuck);
  gate.AwaitWaiting(1);
  executor.Submit(&soon);
  executor.Submit(&later);
  executor.DropIfQueued(&soon);
  EXPECT_EQ(soon.ends(), 0);  // neither cancelled nor expired
  clock.Advance(seconds(1));
  executor.DropIfQueued(&soon);
  executor.DropIfQueued(&later);
  EXPECT_EQ(soon.ends(), 1);  // with the worker still busy
  EXPECT_EQ(soon.AwaitEnd().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(later.ends(), 0);
  gate.Open();
  EXPECT_TRUE(later.AwaitEnd().ok());
  executor.Shutdown();
}

TEST(ExecutorTest, ExpiredJobIsDroppedWhenItsTurnComes) {
  FakeClock clock;
  Gate gate;
  TestJob stuck(&gate), soon(nullptr, clock.Now() + seconds(1));
  Executor executor(1, &clock);
  executor.Submit(&stuck);
  gate.AwaitWaiting(1);
  executor.Submit(&soon);
  clock.Advance(seconds(2));
  gate.Open();
  EXPECT_EQ(soon.AwaitEnd().code(), absl::StatusCode::kDeadlineExceeded);
  executor.Shutdown();
}

TEST(ExecutorTest, AJobCancelledBeforeSubmitNeverQueues) {
  FakeClock clock;
  Executor executor(1, &clock);
  TestJob job, late(nullptr, clock.Now());
  job.Cancel();
  executor.Submit(&job);
  EXPECT_EQ(job.AwaitEnd().code(), absl::StatusCode::kCancelled);
  executor.Submit(&late);
  EXPECT_EQ(late.AwaitEnd().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ExecutorTest, ShutdownDropsWhatWaitsAndFinishesWhatRuns) {
  FakeClock clock;
  Gate gate;
  TestJob running(&gate), waiting, after;
  Executor executor(1, &clock);
  executor.Submit(&running);
  gate.AwaitWaiting(1);
  executor.Submit(&waiting);
  std::thread stopper([&executor] { executor.Shutdown(); });
  EXPECT_EQ(waiting.AwaitEnd().code(), absl::StatusCode::kUnavailable);
  gate.Open();
  stopper.join();
  EXPECT_TRUE(running.AwaitEnd().ok());
  executor.Submit(&after);
  EXPECT_EQ(after.AwaitEnd().code(), absl::StatusCode::kUnavailable);
}

// ---------------------------------------------------------------------------------- buffer pool

TEST(BufferPoolTest, BuffersAreAlignedAndReused) {
  BufferPool pool(uint64_t{64} << 20);
  std::byte* first = nullptr;
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{5000}, uint64_t{3} << 20}) {
    auto buffer = pool.Allocate(bytes);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % BufferPool::kAlignment, 0u);
    EXPECT_EQ(buffer->size(), bytes);
    for (std::byte& b : buffer->span()) b = std::byte{1};
    first = buffer->data();
  }
  const uint64_t fresh = pool.stats().fresh;
  auto again = pool.Allocate((uint64_t{3} << 20) - 100);  // same capacity
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->data(), first);
  EXPECT_EQ(pool.stats().fresh, fresh);
}

TEST(BufferPoolTest, RetentionIsBounded) {
  BufferPool pool(uint64_t{4} << 20);
  {
    std::vector<BufferPool::Buffer> buffers;
    for (int i = 0; i < 8; ++i) buffers.push_back(*pool.Allocate(uint64_t{1} << 20));
    EXPECT_EQ(pool.stats().in_use_bytes, uint64_t{8} << 20);
  }
  EXPECT_EQ(pool.stats().in_use_bytes, 0u);
  EXPECT_EQ(pool.stats().retained_bytes, uint64_t{4} << 20);
  { auto large = pool.Allocate(uint64_t{100} << 20); }
  EXPECT_LE(pool.stats().retained_bytes, uint64_t{4} << 20);
}

TEST(BufferPoolTest, ImpossibleSizeIsAnError) {
  BufferPool pool(0);
  EXPECT_EQ(pool.Allocate(uint64_t{1} << 60).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.Allocate(~uint64_t{0}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.stats().in_use_bytes, 0u);
}

std::vector<std::pair<void*, size_t>>& PinnedBlocks() {
  static auto* blocks = new std::vector<std::pair<void*, size_t>>;
  return *blocks;
}

BufferPool::Pinning FakePinning() {
  return {.pin =
              [](void* data, size_t bytes) {
                PinnedBlocks().push_back({data, bytes});
                return bytes < (size_t{16} << 20);  // larger ones fail
              },
          .unpin =
              [](void* data) {
                EXPECT_EQ(std::erase_if(PinnedBlocks(),
                                        [data](const auto& b) { return b.first == data; }),
                          1u);
              }};
}

TEST(BufferPoolTest, LargeBlocksArePinnedForAsLongAsTheyLive) {
  BufferPool pool(uint64_t{8} << 20, FakePinning());
  { const auto small = pool.Allocate(64 << 10); }
  EXPECT_TRUE(PinnedBlocks().empty());
  { const auto block = pool.Allocate(2 << 20); }
  ASSERT_EQ(PinnedBlocks().size(), 1u);
  EXPECT_GE(PinnedBlocks()[0].second, size_t{2} << 20);
  { const auto again = pool.Allocate(2 << 20); }
  EXPECT_EQ(PinnedBlocks().size(), 1u) << "a reused block is pinned already";
  pool.Trim();
  EXPECT_TRUE(PinnedBlocks().empty());
  const auto large = pool.Allocate(20 << 20);
  EXPECT_TRUE(large.ok()) << "memory that cannot be pinned is memory all the same";
  PinnedBlocks().clear();
}

// ----------------------------------------------------------------------------------- path table

std::vector<std::unique_ptr<Backend>> Backends(std::initializer_list<PathId> paths) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (PathId path : paths) backends.push_back(std::make_unique<FakeBackend>(path));
  return backends;
}

bool Standing(const PathTable& table, PathId path, Reason reason) {
  const PathTable::Snapshot candidates = table.candidates();
  for (const PathCandidate& candidate : *candidates) {
    for (const Rejection& r : candidate.standing) {
      if (candidate.path == path && r.reason == reason) return true;
    }
  }
  return false;
}

TEST(PathTableTest, MissingAndDisabledPathsHaveStandingReasons) {
  auto table = PathTable::Create(Backends({PathId::kFlashCpu, PathId::kStandardCpu}),
                                 {"standard_cpu"}, false);
  ASSERT_TRUE(table.ok());
  ASSERT_EQ(table->candidates()->size(), kAllPaths.size());
  EXPECT_TRUE(Standing(*table, PathId::kFlashSm90, Reason::kNotBuilt));
  EXPECT_TRUE(Standing(*table, PathId::kStandardCpu, Reason::kDisabledByConfig));
  EXPECT_TRUE(table->available(PathId::kFlashCpu));
  EXPECT_FALSE(table->available(PathId::kStandardCpu));
  table->Disable(PathId::kFlashCpu, Reason::kSelfTestFailed, "");
  EXPECT_FALSE(table->any_available());
}

TEST(PathTableTest, PathsWithoutADeviceSayWhy) {
  const std::vector<Rejection> absent = {
      {PathId::kFlashSm80, Reason::kNoCudaDevice, "cudaErrorNoDevice: no device"}};
  auto table = PathTable::Create(Backends({PathId::kFlashCpu}), {}, false, absent);
  ASSERT_TRUE(table.ok());
  EXPECT_TRUE(Standing(*table, PathId::kFlashSm80, Reason::kNoCudaDevice));
  EXPECT_FALSE(Standing(*table, PathId::kFlashSm80, Reason::kNotBuilt));
  EXPECT_TRUE(Standing(*table, PathId::kStandardCuda, Reason::kNotBuilt));
  EXPECT_TRUE(table->available(PathId::kFlashCpu)) << "no CUDA path, so no fallback either";
}

TEST(PathTableTest, CpuPathsNeedConsentBesideCuda) {
  const auto paths = {PathId::kFlashSm80, PathId::kFlashCpu};
  auto without = PathTable::Create(Backends(paths), {}, false);
  EXPECT_TRUE(Standing(*without, PathId::kFlashCpu, Reason::kCpuFallbackDisabled));
  auto with = PathTable::Create(Backends(paths), {}, true);
  EXPECT_TRUE(with->available(PathId::kFlashCpu));
}

TEST(PathTableTest, DisabledPathsChangeWhileServing) {
  auto table = PathTable::Create(Backends({PathId::kFlashCpu, PathId::kStandardCpu}),
                                 {"standard_cpu"}, false);
  ASSERT_TRUE(table.ok());
  const uint64_t version = table->version();
  const PathTable::Snapshot before = table->candidates();
  EXPECT_THAT(*table->WouldEnable({"flash_cpu"}), testing::ElementsAre(PathId::kStandardCpu));
  ASSERT_TRUE(table->SetDisabled({"flash_cpu"}).ok());
  EXPECT_GT(table->version(), version);
  EXPECT_FALSE(table->available(PathId::kFlashCpu));
  EXPECT_TRUE(table->available(PathId::kStandardCpu));
  EXPECT_TRUE((*before)[3].standing.empty());  // who holds the old candidates goes on with them
  EXPECT_EQ(table->SetDisabled({"flash_gpu"}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(table->available(PathId::kFlashCpu));
  // What stands for another reason does not come back.
  table->Disable(PathId::kStandardCpu, Reason::kSelfTestFailed, "");
  ASSERT_TRUE(table->SetDisabled({}).ok());
  EXPECT_TRUE(table->available(PathId::kFlashCpu));
  EXPECT_FALSE(table->available(PathId::kStandardCpu));
}

TEST(PathTableTest, UnknownNameListsThePaths) {
  const auto table = PathTable::Create(Backends({}), {"flash_gpu"}, false);
  EXPECT_THAT(table.status().ToString(), AllOf(HasSubstr("flash_gpu"), HasSubstr("flash_sm90")));
}

}  // namespace
}  // namespace attn::server
