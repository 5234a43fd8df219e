#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/api/traffic.h"
#include "kernels/cpu/backends.h"
#include "server/execution/rates.h"
#include "server/execution/self_test.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

// How a faulty backend spoils the results of the real one it stands before. kForwardOnly: it has no
// backward pass and says so, which is no fault. kFast: it takes the time of a host of 2 TFLOP/s,
// and computes nothing.
enum class Fault {
  kNone,
  kOut,
  kLse,
  kMaskedOut,
  kDq,
  kDk,
  kDv,
  kNan,
  kError,
  kFp16Only,
  kForwardOnly,
  kFast
};

constexpr double kFastFlopsPerSecond = 2e12;

class FaultyBackend : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> real, Fault fault)
      : real_(std::move(real)), fault_(fault) {}
  PathId path() const override { return real_->path(); }
  void AppendRejections(const AttentionProblem& p, Pass pass,
                        std::vector<Rejection>* r) const override {
    real_->AppendRejections(p, pass, r);
    if (fault_ == Fault::kForwardOnly && pass == Pass::kBackward) {
      r->push_back({path(), Reason::kNotBuilt, "pass backward"});
    }
  }
  std::string KernelId(const AttentionProblem& p, Pass pass) const override {
    return real_->KernelId(p, pass);
  }
  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass) const override {
    return real_->WorkspaceBytes(p, pass);
  }
  TileModel Model(const AttentionProblem& p, Pass pass) const override {
    return real_->Model(p, pass);
  }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const RunContext& c) const override {
    if (fault_ == Fault::kError) return absl::InternalError("broken");
    if (fault_ == Fault::kFast) return Sleep(p, Pass::kForward);
    absl::Status status = real_->Forward(p, t, c);
    if (fault_ == Fault::kOut) Scale(t.out, p.out_dtype, OutElements(p) - 1);
    if (fault_ == Fault::kLse) t.lse[LseElements(p) - 1] += 1e-3f;
    // Row 0 sees no key: a mask that is off by one shows here.
    if (fault_ == Fault::kMaskedOut) StoreElement(t.out, p.out_dtype, 0, 1e-6f);
    if (fault_ == Fault::kNan) {
      StoreElement(t.out, p.out_dtype, 5, std::numeric_limits<float>::quiet_NaN());
    }
    if (fault_ == Fault::kFp16Only && p.dtype == DType::kFp16) {
      Scale(t.out, p.out_dtype, OutElements(p) - 1);
    }
    return status;
  }
  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& t,
                        const RunContext& c) const override {
    if (fault_ == Fault::kForwardOnly) return absl::FailedPreconditionError("pass backward");
    if (fault_ == Fault::kFast) return Sleep(p, Pass::kBackward);
    absl::Status status = real_->Backward(p, t, c);
    const int64_t q_row = p.num_heads * p.head_dim;
    const int64_t kv_row = p.num_kv_heads * p.head_dim;
    if (fault_ == Fault::kDq) Scale(t.dq, p.out_dtype, 40 * q_row);
    if (fault_ == Fault::kDk) Scale(t.dk, p.out_dtype, 50 * kv_row + 1);
    if (fault_ == Fault::kDv) Scale(t.dv, p.out_dtype, 50 * kv_row);
    return status;
  }

 private:
  static absl::Status Sleep(const AttentionProblem& p, Pass pass) {
    std::this_thread::sleep_for(
        std::chrono::duration<double>(static_cast<double>(Flops(p, pass)) / kFastFlopsPerSecond));
    return absl::OkStatus();
  }
  static void Scale(void* data, DType dtype, int64_t index) {
    StoreElement(data, dtype, index, 1.05f * LoadElement(data, dtype, index));
  }

  const std::unique_ptr<Backend> real_;
  const Fault fault_;
};

class SelfTestTest : public testing::Test {
 protected:
  PathTable Table(Fault fault) {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::make_unique<FaultyBackend>(MakeFlashCpuBackend(&pool_), fault));
    backends.push_back(MakeStandardCpuBackend(&pool_));
    return *PathTable::Create(std::move(backends), {}, false);
  }
  ThreadPool pool_{2};
};

TEST_F(SelfTestTest, GoodPathsPassEveryPassAndDType) {
  PathTable table = Table(Fault::kNone);
  const std::vector<SelfTestResult> results = SelfTestAll(&table);
  EXPECT_EQ(results.size(), 12u);  // two paths, two passes, three dtypes
  for (const SelfTestResult& r : results) {
    EXPECT_TRUE(r.status.ok()) << Name(r.path) << " " << Name(r.pass) << " " << Name(r.dtype) << " "
                               << r.status;
  }
  EXPECT_TRUE(table.available(PathId::kFlashCpu));
}

TEST_F(SelfTestTest, AnyFaultDisablesThePathAlone) {
  for (Fault fault : {Fault::kOut, Fault::kLse, Fault::kMaskedOut, Fault::kDq, Fault::kDk,
                      Fault::kDv, Fault::kNan, Fault::kError, Fault::kFp16Only}) {
    PathTable table = Table(fault);
    SelfTestAll(&table);
    EXPECT_FALSE(table.available(PathId::kFlashCpu)) << static_cast<int>(fault);
    EXPECT_TRUE(table.available(PathId::kStandardCpu));
    const PathTable::Snapshot candidates = table.candidates();
    for (const PathCandidate& candidate : *candidates) {
      if (candidate.path != PathId::kFlashCpu) continue;
      ASSERT_EQ(candidate.standing.size(), 1u);
      EXPECT_EQ(candidate.standing[0].reason, Reason::kSelfTestFailed);
    }
  }
}

TEST_F(SelfTestTest, APathWithForwardPassesOnlyIsTestedInThose) {
  PathTable table = Table(Fault::kForwardOnly);
  int tested = 0;
  for (const SelfTestResult& r : SelfTestAll(&table)) {
    EXPECT_TRUE(r.status.ok()) << r.status;
    if (r.path != PathId::kFlashCpu) continue;
    EXPECT_EQ(r.pass, Pass::kForward);
    ++tested;
  }
  EXPECT_EQ(tested, 3);
  EXPECT_TRUE(table.available(PathId::kFlashCpu));
  Rates rates;
  MeasureRates(table, 1, std::chrono::minutes(1), &rates);
  EXPECT_GT(rates.FlopsPerSecond(Pass::kForward, PathId::kFlashCpu), 0);
  EXPECT_EQ(rates.FlopsPerSecond(Pass::kBackward, PathId::kFlashCpu), 0);
}

TEST_F(SelfTestTest, DisabledPathsAreNotRun) {
  PathTable table = Table(Fault::kNone);
  table.Disable(PathId::kFlashCpu, Reason::kDisabledByConfig, "");
  for (const SelfTestResult& r : SelfTestAll(&table)) EXPECT_NE(r.path, PathId::kFlashCpu);
}

// A call that is over in microseconds says nothing of a rate: a larger one is taken. On a busy
// machine a sleep takes longer, so the best of a few measurements counts.
TEST_F(SelfTestTest, RatesAreMeasuredOnFastHostsToo) {
  const PathTable table = Table(Fault::kFast);
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    double best = 0;
    for (int n = 0; n < 10 && best <= kFastFlopsPerSecond / 20; ++n) {
      Rates rates;
      MeasureRates(table, 2, std::chrono::minutes(1), &rates);
      best = std::max(best, rates.FlopsPerSecond(pass, PathId::kFlashCpu));
    }
    EXPECT_GT(best, kFastFlopsPerSecond / 20);
    EXPECT_LT(best, kFastFlopsPerSecond * 1.01);
  }
}

TEST_F(SelfTestTest, RatesAreMeasuredAndFollowWhatRuns) {
  const PathTable table = Table(Fault::kNone);
  Rates rates;
  MeasureRates(table, 2, std::chrono::minutes(1), &rates);
  EXPECT_GT(rates.copy_bytes_per_second(), 1e8);
  EXPECT_GT(rates.FlopsPerSecond(Pass::kForward, PathId::kFlashCpu), 0);
  EXPECT_EQ(rates.FlopsPerSecond(Pass::kForward, PathId::kFlashSm90), 0);
  Rates fresh;
  fresh.Observe(Pass::kForward, PathId::kFlashCpu, 1000,
                std::chrono::nanoseconds(10));  // too short
  EXPECT_EQ(fresh.FlopsPerSecond(Pass::kForward, PathId::kFlashCpu), 0);
  fresh.Observe(Pass::kForward, PathId::kFlashCpu, 8'000'000, std::chrono::milliseconds(1));
  fresh.Observe(Pass::kForward, PathId::kFlashCpu, 16'000'000, std::chrono::milliseconds(1));
  EXPECT_NEAR(fresh.FlopsPerSecond(Pass::kForward, PathId::kFlashCpu), 9e9, 1);
}

}  // namespace
}  // namespace attn::server
