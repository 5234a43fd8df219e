#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "server/execution/canary.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

using testing::HasSubstr;

// Results as they come.
class Results {
 public:
  std::function<void(const Canary::Result&)> Sink() {
    return [this](const Canary::Result& result) {
      MutexLock lock(mutex_);
      results_.push_back(result);
      changed_.NotifyAll();
    };
  }
  std::vector<Canary::Result> Await(size_t n) {
    MutexLock lock(mutex_);
    while (results_.size() < n) changed_.Wait(mutex_);
    return results_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<Canary::Result> results_ ATTN_GUARDED_BY(mutex_);
};

class CanaryTest : public testing::Test {
 protected:
  PathTable Table(std::vector<std::unique_ptr<Backend>> backends,
                  const std::vector<std::string>& disabled = {}) {
    return *PathTable::Create(std::move(backends), disabled, false);
  }
  std::vector<std::unique_ptr<Backend>> Real() {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(MakeFlashCpuBackend(&pool_));
    backends.push_back(MakeStandardCpuBackend(&pool_));
    return backends;
  }

  ThreadPool pool_{2};
  FakeClock clock_;
  Results results_;
};

TEST_F(CanaryTest, RunsBothPassesOnThePathOfCalls) {
  const PathTable paths = Table(Real());
  Executor executor(1, &clock_);
  Canary canary(&paths, &executor, &clock_, {}, std::chrono::seconds(10), results_.Sink());
  clock_.Advance(std::chrono::seconds(7));
  EXPECT_EQ(canary.age(), std::chrono::seconds(7));
  canary.Start();
  const auto results = results_.Await(2);
  executor.Shutdown();
  EXPECT_EQ(results[0].pass, Pass::kForward);
  EXPECT_EQ(results[1].pass, Pass::kBackward);
  for (const Canary::Result& result : results) {
    EXPECT_EQ(result.path, PathId::kFlashCpu);
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.device, -1);
  }
  EXPECT_EQ(canary.age(), std::chrono::seconds(0));
}

TEST_F(CanaryTest, FollowsThePathTable) {
  PathTable paths = Table(Real());
  Executor executor(1, &clock_);
  Canary canary(&paths, &executor, &clock_, {}, std::chrono::seconds(10), results_.Sink());
  ASSERT_TRUE(paths.SetDisabled({"flash_cpu"}).ok());
  canary.Start();
  EXPECT_EQ(results_.Await(2)[1].path, PathId::kStandardCpu);
  executor.Shutdown();
}

// FakeBackend answers zeros, which are wrong.
TEST_F(CanaryTest, WrongResultsFail) {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashSm80));
  const PathTable paths = Table(std::move(backends));
  Executor executor(1, &clock_);
  Canary canary(&paths, &executor, &clock_, {0, 2}, std::chrono::seconds(10), results_.Sink());
  canary.Start();
  const auto results = results_.Await(4);  // two passes on two devices
  executor.Shutdown();
  EXPECT_EQ(results[0].device, 0);
  EXPECT_EQ(results[1].device, 2);
  for (const Canary::Result& result : results) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("expected"));
  }
}

TEST_F(CanaryTest, NoPathIsAFailureWithReasons) {
  const PathTable paths = Table(Real(), {"flash_cpu", "standard_cpu"});
  Executor executor(1, &clock_);
  Canary canary(&paths, &executor, &clock_, {}, std::chrono::seconds(10), results_.Sink());
  canary.Start();
  const auto results = results_.Await(2);
  executor.Shutdown();
  EXPECT_EQ(results[0].path, std::nullopt);
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("DISABLED_BY_CONFIG"));
}

class BlockingJob : public Job {
 public:
  explicit BlockingJob(Gate* gate) : gate_(gate) {}
  void Run() override { gate_->Wait(); }
  void Drop(const absl::Status&) override {}
  const CancelToken& token() const override { return token_; }
  TimePoint deadline() const override { return TimePoint::max(); }
  uint64_t bytes() const override { return 0; }

 private:
  Gate* const gate_;
  const CancelToken token_;
};

TEST_F(CanaryTest, ABusyServerMakesItLateAndOneRoundWaitsAtATime) {
  const PathTable paths = Table(Real());
  Gate gate;
  BlockingJob busy(&gate);
  Executor executor(1, &clock_);
  Canary canary(&paths, &executor, &clock_, {}, std::chrono::seconds(10), results_.Sink());
  executor.Submit(&busy);
  gate.AwaitWaiting(1);
  canary.Start();
  canary.Start();
  EXPECT_EQ(executor.stats().queued_requests, 1);
  clock_.Advance(std::chrono::seconds(11));
  gate.Open();
  const auto late = results_.Await(2);
  for (const Canary::Result& result : late) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(result.latency, std::chrono::seconds(11));
  }
  EXPECT_EQ(canary.age(), std::chrono::seconds(11));  // a late round has not run
  executor.Shutdown();
}

}  // namespace
}  // namespace attn::server
