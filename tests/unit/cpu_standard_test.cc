// What is standard_cpu's own: its workspace, cancellation, and results that do not depend on
// threads. tests/exactness holds its numbers to the exactness rule.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class Buffers {
 public:
  explicit Buffers(const AttentionProblem& p)
      : p_(p),
        q_(Normal(DqElements(p))),
        k_(Normal(DkElements(p))),
        v_(Normal(DvElements(p))),
        dout_(Normal(OutElements(p))),
        dlse_(Normal(LseElements(p))),
        out_(OutElements(p)),
        lse_(LseElements(p)),
        dq_(q_.size()),
        dk_(k_.size()),
        dv_(v_.size()),
        dbias_(DbiasElements(p)),
        dsink_(p.num_heads) {}

  absl::Status Run(const Backend& backend, Pass pass, const CancelToken* cancel = nullptr,
                   int64_t workspace_shortfall = 0) {
    const int64_t bytes = backend.WorkspaceBytes(p_, pass) - workspace_shortfall;
    std::vector<std::byte> memory(bytes + 64);
    auto* begin =
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    RunContext context;
    context.workspace = {begin, static_cast<size_t>(bytes)};
    context.cancel = cancel;
    if (pass == Pass::kForward) {
      return backend.Forward(p_, {q_.data(), k_.data(), v_.data(), out_.data(), lse_.data()},
                             context);
    }
    BackwardTensors t{q_.data(), k_.data(), v_.data(), out_.data(), lse_.data(), dout_.data()};
    t.dlse = p_.has_dlse ? dlse_.data() : nullptr;
    t.dq = dq_.data();
    t.dk = dk_.data();
    t.dv = dv_.data();
    t.dbias = dbias_.data();
    t.dsink = dsink_.data();
    return backend.Backward(p_, t, context);
  }

  std::vector<std::vector<float>> Outputs() const {
    return {out_, lse_, dq_, dk_, dv_, dbias_, dsink_};
  }

 private:
  std::vector<float> Normal(int64_t n) {
    std::vector<float> x(n);
    for (float& value : x) value = std::normal_distribution<float>()(rng_);
    return x;
  }

  const AttentionProblem& p_;
  std::mt19937 rng_{5};
  std::vector<float> q_, k_, v_, dout_, dlse_;
  std::vector<float> out_, lse_, dq_, dk_, dv_, dbias_, dsink_;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

TEST(StandardCpuTest, TakesEveryValidProblem) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  AttentionSpec spec = BshdSpec({2, 5, 7, 4, 2, 509, 3});
  spec.block_mask = BlockMaskSpec{Shape({1, 1, 3, 7}, DType::kUint8), 2, 1};
  spec.softcap = 3.0f;
  std::vector<Rejection> rejections;
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    backend->AppendRejections(*Validate(spec, pass), pass, &rejections);
  }
  EXPECT_TRUE(rejections.empty());
  EXPECT_EQ(backend->path(), PathId::kStandardCpu);
}

TEST(StandardCpuTest, KernelIdNamesPassDtypeAndDims) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  const AttentionProblem same =
      *Validate(BshdSpec({1, 1, 1, 1, 1, 64, 64}, DType::kBf16), Pass::kForward);
  EXPECT_THAT(backend->KernelId(same, Pass::kForward), StartsWith("standard_cpu_fwd_bf16_d64_"));
  const AttentionProblem wide = *Validate(BshdSpec({1, 1, 1, 1, 1, 64, 96}), Pass::kForward);
  EXPECT_THAT(backend->KernelId(wide, Pass::kBackward),
              StartsWith("standard_cpu_bwd_fp32_d64_dv96_"));
}

// Grouped heads and a bias shared by batch and heads: both are sums over heads, which threads must
// not reorder.
TEST(StandardCpuTest, ResultsDoNotDependOnThreads) {
  AttentionSpec spec = BshdSpec({3, 70, 300, 6, 2, 24, 40});
  spec.bias = Shape({1, 1, 70, 300});
  spec.sinks = Shape({6});
  spec.softcap = 4.0f;
  spec.dropout = DropoutSpec{0.25f, 9, 0};
  spec.dlse = Shape({3, 6, 70});
  AttentionProblem p = *Validate(spec, Pass::kBackward);
  const std::vector<float> bias(70 * 300, 0.125f);
  const std::vector<float> sinks(6, 0.5f);
  p.bias->data = bias.data();
  p.sinks = sinks.data();
  std::vector<std::vector<float>> expected;
  for (int workers : {1, 2, 3, 7, 40}) {
    ThreadPool pool(workers);
    const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
    Buffers buffers(p);
    ASSERT_TRUE(buffers.Run(*backend, Pass::kForward).ok());
    ASSERT_TRUE(buffers.Run(*backend, Pass::kBackward).ok());
    if (expected.empty()) expected = buffers.Outputs();
    for (size_t tensor = 0; tensor < expected.size(); ++tensor) {
      EXPECT_TRUE(SameBits(buffers.Outputs()[tensor], expected[tensor]))
          << "tensor " << tensor << ", " << workers << " workers";
    }
  }
}

TEST(StandardCpuTest, WorkspaceGrowsWithWorkersOnlyUpToTheHeads) {
  ThreadPool one(1);
  ThreadPool many(16);
  const AttentionProblem p = *Validate(BshdSpec({1, 200, 300, 2, 2, 16, 16}), Pass::kForward);
  const int64_t single = MakeStandardCpuBackend(&one)->WorkspaceBytes(p, Pass::kForward);
  EXPECT_GE(single, 200 * 300 * 4);
  EXPECT_EQ(MakeStandardCpuBackend(&many)->WorkspaceBytes(p, Pass::kForward), 2 * single);
}

TEST(StandardCpuTest, RefusesAShortWorkspace) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  const AttentionProblem p = *Validate(BshdSpec(), Pass::kBackward);
  Buffers buffers(p);
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    const absl::Status status = buffers.Run(*backend, pass, nullptr, 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(Text(status), HasSubstr("bytes; it needs "));
  }
}

TEST(StandardCpuTest, StopsWhenCancelledOrPastTheDeadline) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  const AttentionProblem p = *Validate(BshdSpec({1, 2048, 2048, 64, 8, 16, 16}), Pass::kBackward);
  Buffers buffers(p);  // a quarter of a second of work at the very least
  CancelToken cancelled;
  cancelled.Cancel();
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(buffers.Run(*backend, pass, &cancelled).code(), absl::StatusCode::kCancelled);
    const auto start = std::chrono::steady_clock::now();
    const CancelToken deadline(start + std::chrono::milliseconds(20));
    EXPECT_EQ(buffers.Run(*backend, pass, &deadline).code(), absl::StatusCode::kDeadlineExceeded);
  }
}

}  // namespace
}  // namespace attn
