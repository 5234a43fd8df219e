#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "kernels/api/traffic.h"
#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

// The definition of "visible" in attention.proto, entry by entry.
uint64_t BruteForcePairs(const AttentionProblem& p) {
  uint64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    for (int64_t h = 0; h < p.num_heads; ++h) {
      for (int64_t i = 0; i < s.rows_q; ++i) {
        for (int64_t j = 0; j < s.rows_k; ++j) {
          const int64_t position = i + s.off;
          const bool visible = i < s.len_q && j < s.len_k && j >= position - p.window_left &&
                               j <= position + p.window_right && p.BlockVisible(b, h, i, j);
          pairs += visible ? 1 : 0;
        }
      }
    }
  }
  return pairs;
}

struct RandomProblem {
  AttentionProblem problem;
  std::vector<uint8_t> mask;
};

RandomProblem MakeRandomProblem(std::mt19937& rng) {
  auto uniform = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  const int64_t batch = uniform(0, 3);
  const int64_t kv_heads = uniform(1, 2);
  const int64_t heads = kv_heads * uniform(1, 3);
  AttentionSpec spec;
  if (uniform(0, 1) == 0) {
    spec = BshdSpec({batch, uniform(0, 20), uniform(0, 20), heads, kv_heads, 4, 4});
    for (int64_t b = 0; b < batch && uniform(0, 1) == 1; ++b) spec.seqlens_q.push_back(0);
    spec.seqlens_q.resize(spec.seqlens_q.empty() ? 0 : batch);
    for (auto& n : spec.seqlens_q) n = uniform(0, spec.q.shape[1]);
    spec.seqlens_k.resize(uniform(0, 1) * batch);
    for (auto& n : spec.seqlens_k) n = uniform(0, spec.k.shape[1]);
  } else {
    std::vector<int64_t> lengths_q(batch), lengths_k(batch);
    for (auto& n : lengths_q) n = uniform(0, 20);
    for (auto& n : lengths_k) n = uniform(0, 20);
    spec = ThdSpec(lengths_q, lengths_k, heads, kv_heads, 4);
  }
  spec.alignment = uniform(0, 1) == 0 ? Alignment::kBottomRight : Alignment::kTopLeft;
  spec.causal = uniform(0, 1) == 1;
  if (uniform(0, 1) == 1) spec.window_left = uniform(0, 12);
  if (!spec.causal && uniform(0, 1) == 1) spec.window_right = uniform(0, 12);
  RandomProblem result{*Validate(spec, Pass::kForward), {}};
  if (uniform(0, 1) == 1) {
    BlockMaskSpec mask;
    mask.block_q = uniform(1, 8);
    mask.block_k = uniform(1, 8);
    auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
    mask.mask = Shape({uniform(0, 1) == 0 ? 1 : batch, uniform(0, 1) == 0 ? 1 : heads,
                       blocks(result.problem.seqlen_q, mask.block_q),
                       blocks(result.problem.seqlen_k, mask.block_k)},
                      DType::kUint8);
    spec.block_mask = mask;
    result.problem = *Validate(spec, Pass::kForward);
    result.mask.resize(mask.mask.NumElements() + 1);
    for (auto& m : result.mask) m = static_cast<uint8_t>(uniform(0, 1));
    result.problem.block_mask->data = result.mask.data();
  }
  return result;
}

TEST(VisiblePairsTest, EqualsBruteForceOnRandomProblems) {
  std::mt19937 rng(7);
  uint64_t total = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const RandomProblem random = MakeRandomProblem(rng);
    const uint64_t pairs = VisiblePairs(random.problem);
    ASSERT_EQ(pairs, BruteForcePairs(random.problem)) << "trial " << trial;
    total += pairs;
  }
  EXPECT_GT(total, 100000u);  // the problems were not all empty
}

TEST(VisiblePairsTest, MaskWithoutDataCountsAsAllVisible) {
  AttentionSpec spec = BshdSpec();
  spec.block_mask = BlockMaskSpec{Shape({1, 1, 1, 1}, DType::kUint8), 128, 128};
  EXPECT_EQ(VisiblePairs(*Validate(spec, Pass::kForward)), 2u * 4 * 5 * 7);
}

TEST(VisiblePairsTest, HugeProblemsTakeNoTimeAndSaturate) {
  AttentionSpec spec = BshdSpec({1, kMaxTokens, kMaxTokens, 1, 1, 1, 1});
  spec.causal = true;
  spec.window_left = 1;
  EXPECT_EQ(VisiblePairs(*Validate(spec, Pass::kForward)), 2 * uint64_t(kMaxTokens) - 1);
  spec.causal = false;
  spec.window_left.reset();
  const AttentionProblem all = *Validate(spec, Pass::kForward);
  EXPECT_EQ(VisiblePairs(all), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(Flops(all, Pass::kBackward), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(StandardBytes(all, Pass::kForward, 4), std::numeric_limits<uint64_t>::max());
  // One batch of a million identical sequences.
  const AttentionProblem many = *Validate(BshdSpec({kMaxBatch, 3, 3, 1, 1, 1, 1}), Pass::kForward);
  EXPECT_EQ(VisiblePairs(many), 9 * uint64_t(kMaxBatch));
}

TEST(TrafficTest, FlopsCountVisiblePairs) {
  AttentionSpec spec = BshdSpec({2, 4, 4, 3, 1, 8, 16});
  spec.causal = true;
  const uint64_t pairs = 2 * 3 * (1 + 2 + 3 + 4);
  EXPECT_EQ(Flops(*Validate(spec, Pass::kForward), Pass::kForward), 2 * pairs * (8 + 16));
  EXPECT_EQ(Flops(*Validate(spec, Pass::kBackward), Pass::kBackward), 2 * pairs * (3 * 8 + 2 * 16));
}

TEST(TrafficTest, CompulsoryBytesByHand) {
  // batch 2, seqlen_q 5, seqlen_k 7, 4 heads, 2 kv heads, head_dim 16, head_dim_v 8, fp16.
  AttentionSpec spec = BshdSpec({2, 5, 7, 4, 2, 16, 8}, DType::kFp16);
  spec.seqlens_k = {7, 3};
  spec.bias = Shape({1, 4, 5, 7}, DType::kBf16);
  spec.alibi_slopes = Shape({4});
  spec.sinks = Shape({4});
  spec.block_mask = BlockMaskSpec{Shape({2, 1, 1, 1}, DType::kUint8), 128, 128};
  spec.out_dtype = DType::kFp32;
  const uint64_t q = 2 * 5 * 4 * 16 * 2, kv = (7 + 3) * 2 * (16 + 8) * 2;
  const uint64_t options = 4 * 5 * 7 * 2 + 4 * 4 + 4 * 4 + 2;
  const uint64_t out = 2 * 5 * 4 * 8, lse = 2 * 5 * 4;
  EXPECT_EQ(CompulsoryBytes(*Validate(spec, Pass::kForward), Pass::kForward),
            q + kv + options + out * 4 + lse * 4);

  spec.out = Shape({2, 5, 4, 8}, DType::kFp16);
  spec.dout = Shape({2, 5, 4, 8}, DType::kFp32);
  spec.lse = Shape({2, 4, 5});
  spec.dlse = Shape({2, 4, 5});
  const uint64_t gradients = (2 * 5 * 4 * 16 + 2 * 7 * 2 * 16 + 2 * 7 * 2 * 8) * 4;
  EXPECT_EQ(CompulsoryBytes(*Validate(spec, Pass::kBackward), Pass::kBackward),
            q + kv + options + out * 2 + out * 4 + 2 * lse * 4 + gradients + 4 * 5 * 7 * 4 + 4 * 4);
}

TEST(TrafficTest, StandardBytesStoreScoresFourAndSevenTimes) {
  const AttentionProblem p = *Validate(ThdSpec({3, 0, 5}, {4, 9, 2}), Pass::kBackward);
  const uint64_t entries = 4 * (3 * 4 + 5 * 2);
  EXPECT_EQ(StandardBytes(p, Pass::kForward, 2),
            CompulsoryBytes(p, Pass::kForward) + 4 * entries * 2);
  EXPECT_EQ(StandardBytes(p, Pass::kBackward, 4),
            CompulsoryBytes(p, Pass::kBackward) + 7 * entries * 4);
}

// Landmark: GPT-2 medium attention (batch 64, 16 heads, seqlen 1024, head_dim 64, fp16), forward
// and backward, moves 40.3 GB by the standard algorithm. Source: FlashAttention (Dao et al. 2022),
// Figure 2, where dropout and masking passes over the scores are included; the algorithm's own 4NM
// and 7NM come to 23.6 GB of scores.
TEST(TrafficTest, Gpt2MediumLandmark) {
  const AttentionProblem p =
      *Validate(BshdSpec({64, 1024, 1024, 16, 16, 64, 64}, DType::kFp16), Pass::kBackward);
  const double standard = static_cast<double>(StandardBytes(p, Pass::kForward, 2)) +
                          static_cast<double>(StandardBytes(p, Pass::kBackward, 2));
  EXPECT_GT(standard, 23.6e9);
  EXPECT_LT(standard, 40.3e9);
  const double flash = static_cast<double>(CompulsoryBytes(p, Pass::kForward)) +
                       static_cast<double>(CompulsoryBytes(p, Pass::kBackward));
  EXPECT_LT(flash, 4.4e9);
}

TEST(TrafficTest, ElementsPerHead) {
  EXPECT_DOUBLE_EQ(StandardElementsPerHead(1024, 1024, 64), 2.0 * 1024 * 1024 + 4.0 * 1024 * 64);
  EXPECT_DOUBLE_EQ(FlashElementsPerHead(1024, 1024, 64, 32768),
                   4.0 * 1024 * 64 + 2.0 * 1024 * 1024 * 64 * 64 / 32768);
  EXPECT_DOUBLE_EQ(FlashElementsPerHead(10, 20, 4, 0), 2.0 * 30 * 4);  // nothing kept on chip
}

}  // namespace
}  // namespace attn
