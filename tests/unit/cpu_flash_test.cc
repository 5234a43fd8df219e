// flash_cpu beyond exactness (tests/exactness): determinism, independence of threads, cancelling,
// refusals. That it does not count is the plain build's; counting is cpu_counting_flash_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <thread>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/unit/cpu_flash_call.h"

namespace attn {
namespace {

using std::chrono::milliseconds;

absl::Status RunBoth(FlashCall& call, const Backend& backend) {
  if (absl::Status status = call.Run(backend, Pass::kForward); !status.ok()) return status;
  return call.Run(backend, Pass::kBackward);
}

TEST(FlashCpuTest, ThirtyRunsAreBitwiseEqual) {
  ThreadPool pool(4);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  AttentionSpec spec = BshdSpec({2, 300, 700, 4, 2, 40, 24}, DType::kBf16);
  spec.causal = true;
  spec.bias = Shape({1, 1, 300, 700});
  spec.sinks = Shape({4});
  FlashRandom random(1);
  FlashCall call(spec, random);
  std::vector<std::byte> first;
  for (int run = 0; run < 30; ++run) {
    const absl::Status status = RunBoth(call, *backend);
    ASSERT_TRUE(status.ok()) << Text(status);
    if (run == 0) first = call.Outputs();
    ASSERT_EQ(call.Outputs(), first) << "run " << run;
  }
}

TEST(FlashCpuTest, ResultsDoNotDependOnTheNumberOfThreads) {
  ThreadPool one(1), five(5);
  const std::unique_ptr<Backend> single = MakeFlashCpuBackend(&one);
  const std::unique_ptr<Backend> many = MakeFlashCpuBackend(&five);
  for (uint32_t seed = 1000; seed < 1030; ++seed) {
    FlashRandom random(seed);
    FlashCall call(RandomFlashSpec(random), random);
    ASSERT_TRUE(RunBoth(call, *single).ok());
    const std::vector<std::byte> want = call.Outputs();
    ASSERT_TRUE(RunBoth(call, *many).ok());
    ASSERT_EQ(call.Outputs(), want) << "seed " << seed;
  }
}

TEST(FlashCpuTest, CancelledBeforeItStartsDoesNothing) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  FlashRandom random(1);
  FlashCall call(BshdSpec({1, 64, 64, 2, 2, 32, 32}), random);
  CancelToken cancelled;
  cancelled.Cancel();
  CancelToken expired(std::chrono::steady_clock::now() - milliseconds(1));
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(call.Run(*backend, pass, nullptr, &cancelled).code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(call.Run(*backend, pass, nullptr, &expired).code(),
              absl::StatusCode::kDeadlineExceeded);
  }
}

TEST(FlashCpuTest, StopsBetweenTiles) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  FlashRandom random(1);
  // Seconds of work, so that a run that ignores its deadline is told from one that stops.
  FlashCall call(BshdSpec({1, 16384, 16384, 4, 4, 64, 64}), random);
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    CancelToken deadline(std::chrono::steady_clock::now() + milliseconds(20));
    EXPECT_EQ(call.Run(*backend, pass, nullptr, &deadline).code(),
              absl::StatusCode::kDeadlineExceeded);
    CancelToken token;
    std::thread canceller([&token] { token.Cancel(); });
    EXPECT_EQ(call.Run(*backend, pass, nullptr, &token).code(), absl::StatusCode::kCancelled);
    canceller.join();
  }
}

std::vector<Rejection> Rejections(const AttentionSpec& spec) {
  ThreadPool pool(1);
  std::vector<Rejection> rejections;
  MakeFlashCpuBackend(&pool)->AppendRejections(*Validate(spec, Pass::kForward), Pass::kForward,
                                               &rejections);
  return rejections;
}

TEST(FlashCpuTest, NamesEveryReasonAgainstIt) {
  EXPECT_THAT(Rejections(BshdSpec({1, 8, 8, 2, 2, 256, 256})), ::testing::IsEmpty());
  AttentionSpec spec = BshdSpec({1, 130, 130, 2, 2, 264, 300});
  BlockMaskSpec mask;
  mask.block_q = 32;
  mask.block_k = 100;
  mask.mask = Shape({1, 1, 5, 2}, DType::kUint8);
  spec.block_mask = mask;
  EXPECT_THAT(Rejections(spec),
              ::testing::ElementsAre(
                  Rejection{PathId::kFlashCpu, Reason::kHeadDimUnsupported, "head_dim 264 > 256"},
                  Rejection{PathId::kFlashCpu, Reason::kHeadDimUnsupported, "head_dim_v 300 > 256"},
                  Rejection{PathId::kFlashCpu, Reason::kOptionUnsupported,
                            "block_mask.block_q 32 not a multiple of 64"},
                  Rejection{PathId::kFlashCpu, Reason::kOptionUnsupported,
                            "block_mask.block_k 100 not a multiple of 64"}));
}

TEST(FlashCpuTest, NamesItsKernel) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  const AttentionProblem p =
      *Validate(BshdSpec({1, 8, 8, 1, 1, 64, 64}, DType::kBf16), Pass::kForward);
  const std::string target(Name(ChosenSimdTarget()));
  EXPECT_EQ(backend->KernelId(p, Pass::kForward), "flash_cpu_fwd_bf16_d64_" + target);
  EXPECT_EQ(backend->KernelId(p, Pass::kBackward), "flash_cpu_bwd_bf16_d64_" + target);
}

TEST(FlashCpuTest, RefusesAWorkspaceThatIsTooSmall) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  const AttentionProblem p = *Validate(BshdSpec({1, 8, 8, 1, 1, 64, 64}), Pass::kBackward);
  EXPECT_EQ(backend->Backward(p, {}, {}).code(), absl::StatusCode::kInternal);
}

// Every target computes the same function: the fast one is held to the reference by the exactness
// tests, the others to it here.
TEST(FlashCpuTest, EverySimdTargetAgrees) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  const SimdTarget chosen = ChosenSimdTarget();
  for (uint32_t seed = 2000; seed < 2020; ++seed) {
    FlashRandom random(seed);
    AttentionSpec spec = RandomFlashSpec(random);
    spec.q.dtype = spec.k.dtype = spec.v.dtype = DType::kFp32;
    FlashCall call(spec, random);
    SetSimdTargetForTest(chosen);
    ASSERT_TRUE(RunBoth(call, *backend).ok());
    const std::vector<std::byte> want = call.Outputs();
    for (SimdTarget target : SupportedSimdTargets()) {
      SetSimdTargetForTest(target);
      ASSERT_TRUE(RunBoth(call, *backend).ok());
      const std::vector<std::byte> got = call.Outputs();
      ASSERT_EQ(got.size(), want.size());
      double largest = 1e-3;
      for (size_t i = 0; i + 4 <= want.size(); i += 4) {
        const double w = LoadElement(want.data(), DType::kFp32, static_cast<int64_t>(i / 4));
        if (std::isfinite(w)) largest = std::max(largest, std::abs(w));
      }
      for (size_t i = 0; i + 4 <= want.size(); i += 4) {
        const double w = LoadElement(want.data(), DType::kFp32, static_cast<int64_t>(i / 4));
        const double g = LoadElement(got.data(), DType::kFp32, static_cast<int64_t>(i / 4));
        if (std::isfinite(w)) {
          ASSERT_NEAR(g, w, 2e-5 * largest) << Name(target) << " seed " << seed;
        } else {
          ASSERT_EQ(std::isnan(g), std::isnan(w));
          ASSERT_EQ(std::isinf(g), std::isinf(w));
        }
      }
    }
  }
  SetSimdTargetForTest(chosen);
}

}  // namespace
}  // namespace attn
