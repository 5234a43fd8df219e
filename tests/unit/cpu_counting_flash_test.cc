// flash_cpu in the counting build: what the loads and stores counted is what Model() says.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/unit/cpu_flash_call.h"

namespace attn {
namespace {

TEST(FlashTrafficTest, CountersEqualTheModelOnRandomProblems) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  uint64_t moved = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    FlashRandom random(seed);
    FlashCall call(RandomFlashSpec(random), random);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      TrafficCounters counters;
      const absl::Status status = call.Run(*backend, pass, &counters);
      ASSERT_TRUE(status.ok()) << Text(status);
      const TileModel model = backend->Model(call.problem(pass), pass);
      ASSERT_EQ(counters.loaded_bytes.load(), model.loaded_bytes) << seed << " " << Name(pass);
      ASSERT_EQ(counters.stored_bytes.load(), model.stored_bytes) << seed << " " << Name(pass);
      moved += model.bytes();
    }
  }
  EXPECT_GT(moved, uint64_t{1} << 28);
}

TEST(FlashTrafficTest, CountersEqualTheModelWhereInputsAreRead) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  for (uint32_t seed = 100; seed < 104; ++seed) {
    FlashRandom random(seed);
    FlashCall call(RandomShortSpec(random), random);
    TrafficCounters counters;
    const FlashCall::Reader reader(call);
    const absl::Status status = call.Run(*backend, Pass::kForward, &counters, nullptr, &reader);
    ASSERT_TRUE(status.ok()) << Text(status);
    const TileModel model = backend->Model(call.problem(Pass::kForward), Pass::kForward);
    ASSERT_EQ(counters.loaded_bytes.load(), model.loaded_bytes) << seed;
    ASSERT_EQ(counters.stored_bytes.load(), model.stored_bytes) << seed;
  }
}

// A plan may be asked for before there are tensors, of any length: 2^38 tiles are not walked over.
TEST(FlashTrafficTest, ModelOfLongSequencesWithFewValueDims) {
  constexpr int64_t kTokens = int64_t{1} << 25, kDims = 64, kFewDims = 8;
  ThreadPool pool(1);
  AttentionSpec spec = BshdSpec({1, kTokens, kTokens, 1, 1, kDims, kFewDims}, DType::kBf16);
  spec.out = spec.dout = attn::Shape({1, kTokens, 1, kFewDims}, DType::kBf16);
  spec.lse = attn::Shape({1, 1, kTokens});
  const TileModel model =
      MakeFlashCpuBackend(&pool)->Model(*Validate(spec, Pass::kBackward), Pass::kBackward);
  // row_dot reads all keys and values for every 64 rows.
  EXPECT_GT(model.loaded_bytes, uint64_t{kTokens} / 64 * kTokens * (kDims + kFewDims) * 2);
}

TEST(FlashTrafficTest, CausalMovesLessThanFull) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeFlashCpuBackend(&pool);
  AttentionSpec spec = BshdSpec({1, 1024, 1024, 2, 2, 64, 64});
  const TileModel full = backend->Model(*Validate(spec, Pass::kForward), Pass::kForward);
  spec.causal = true;
  const TileModel causal = backend->Model(*Validate(spec, Pass::kForward), Pass::kForward);
  EXPECT_LT(causal.loaded_bytes, full.loaded_bytes);
  EXPECT_EQ(causal.stored_bytes, full.stored_bytes);
}

}  // namespace
}  // namespace attn
