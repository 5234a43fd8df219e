// flash_cpu with inputs that do not lie in one piece of memory (RunContext::reader).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/flash_forward.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/unit/cpu_flash_call.h"

namespace attn {
namespace {

InputWindows Windows(const AttentionSpec& spec) {
  const AttentionProblem p = *Validate(spec, Pass::kForward);
  return InputWindows(p, ForwardPlan(p));
}

TEST(FlashReaderTest, GivesTheBitsOfTheOrdinaryRun) {
  ThreadPool pool(3);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  for (uint32_t seed = 0; seed < 8; ++seed) {
    FlashRandom random(seed);
    FlashCall call(RandomShortSpec(random), random);
    ASSERT_TRUE(backend->ReadsInputs(call.problem(Pass::kForward), Pass::kForward)) << seed;
    ASSERT_FALSE(backend->ReadsInputs(call.problem(Pass::kBackward), Pass::kBackward));
    call.ClearOutputs();
    ASSERT_TRUE(call.Run(*backend, Pass::kForward).ok());
    const std::vector<std::byte> want = call.Outputs();
    call.ClearOutputs();
    ASSERT_NE(call.Outputs(), want);
    uint64_t reading_ns = 0;
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status =
        call.Run(*backend, Pass::kForward, nullptr, nullptr,
                 std::make_unique<FlashCall::Reader>(call).get(), &reading_ns);
    const std::chrono::nanoseconds wall = std::chrono::steady_clock::now() - start;
    ASSERT_TRUE(status.ok()) << Text(status);
    ASSERT_EQ(call.Outputs(), want) << "seed " << seed;
    EXPECT_GT(reading_ns, 0u);
    EXPECT_LT(reading_ns, static_cast<uint64_t>(wall.count()));
  }
}

TEST(FlashReaderTest, StopsBetweenWindows) {
  // Asks for the stop while the first window is read.
  class Stopping : public FlashCall::Reader {
   public:
    Stopping(const FlashCall& call, CancelToken* token) : Reader(call), token_(token) {}
    void Read(Tensor tensor, uint64_t offset, uint64_t count, std::byte* to) const override {
      Reader::Read(tensor, offset, count, to);
      token_->Cancel();
      ++reads;
    }
    mutable std::atomic<int> reads{0};

   private:
    CancelToken* token_;
  };
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  FlashRandom random(1);
  FlashCall call(BshdSpec({2048, 1, 1, 16, 16, 64, 64}, DType::kFp16), random);
  CancelToken token;
  Stopping reader(call, &token);
  EXPECT_EQ(call.Run(*backend, Pass::kForward, nullptr, &token, &reader).code(),
            absl::StatusCode::kCancelled);
  EXPECT_LE(reader.reads.load(), 2 * 3);  // of 48 windows, at most one on each worker
}

TEST(FlashReaderTest, TakesManyShortSequencesThatLieApart) {
  AttentionSpec spec = BshdSpec({4096, 1, 1, 64, 1, 128, 128}, DType::kBf16);
  InputWindows windows = Windows(spec);
  EXPECT_EQ(windows.sequences, 15);  // of 16,896 bytes in 262,144
  EXPECT_EQ(windows.count, 274);
  EXPECT_EQ(windows.q_extent, 64 * 128);
  spec.q.strides = {64 * 128 + 64, 64 * 128, 128, 1};  // a gap after each sequence
  windows = Windows(spec);
  EXPECT_GT(windows.count, 0);
  EXPECT_EQ(windows.q_extent, 64 * 128);
}

TEST(FlashReaderTest, LeavesOtherProblemsToTheCaller) {
  EXPECT_EQ(Windows(BshdSpec({8, 1, 1, 64, 1, 128, 128}, DType::kBf16)).count, 0);  // small
  EXPECT_EQ(Windows(BshdSpec({64, 512, 512, 8, 8, 64, 64})).count, 0);  // long sequences
  EXPECT_EQ(Windows(BshdSpec({0, 1, 1, 64, 1, 128, 128})).count, 0);
  AttentionSpec spec = BshdSpec({4096, 1, 1, 64, 1, 128, 128}, DType::kBf16);
  spec.k.strides = {0, 128, 128, 1};  // one k for all sequences
  EXPECT_EQ(Windows(spec).count, 0);
  spec.k.strides = {128, 128 * 4096, 128, 1};
  spec.q.strides = {128, 128, 4096 * 128, 1};  // sequences within each other
  EXPECT_EQ(Windows(spec).count, 0);
  EXPECT_EQ(
      Windows(ThdSpec(std::vector<int64_t>(4096, 1), std::vector<int64_t>(4096, 1), 64, 1, 128))
          .count,
      0);
}

TEST(FlashReaderTest, RefusesAReaderThatItHasNoUseFor) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  FlashRandom random(1);
  FlashCall call(BshdSpec({1, 8, 8, 1, 1, 64, 64}), random);
  const FlashCall::Reader reader(call);
  EXPECT_EQ(call.Run(*backend, Pass::kForward, nullptr, nullptr, &reader).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace attn
