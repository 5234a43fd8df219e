// Values worked out by hand, and identities of softmax.
#include "tests/reference/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/api/philox.h"
#include "tests/reference/small_call.h"

namespace attn::reference {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr double kInf = std::numeric_limits<double>::infinity();

MATCHER_P(NearEach, tolerance, "") {
  const double a = std::get<0>(arg), b = std::get<1>(arg);
  return a == b || std::abs(a - b) <= tolerance;
}

// Q = 0 and V_j = j: out is the mean visible index, lse = ln of how many are visible.
SmallCall Counting(int64_t seqlen_q, int64_t seqlen_k) {
  SmallCall c(1, seqlen_q, seqlen_k, 1, 1, 2, 1);
  std::fill(c.q.begin(), c.q.end(), 0.0f);
  for (int64_t j = 0; j < seqlen_k; ++j) c.v[j] = static_cast<float>(j);
  c.spec.causal = true;
  return c;
}

TEST(ReferenceTest, CausalWithMoreQueriesThanKeys) {
  SmallCall c = Counting(5, 2);
  const Result br = c.Forward();
  EXPECT_THAT(br.out.value, ElementsAre(0, 0, 0, 0, 0.5));
  EXPECT_THAT(br.lse.value, ElementsAre(-kInf, -kInf, -kInf, 0, std::log(2.0)));
  c.spec.alignment = Alignment::kTopLeft;
  EXPECT_THAT(c.Forward().out.value, ElementsAre(0, 0.5, 0.5, 0.5, 0.5));
}

TEST(ReferenceTest, CausalWithMoreKeysThanQueries) {
  SmallCall c = Counting(2, 5);
  EXPECT_THAT(c.Forward().out.value, ElementsAre(1.5, 2));
  c.spec.alignment = Alignment::kTopLeft;
  EXPECT_THAT(c.Forward().out.value, ElementsAre(0, 0.5));
}

TEST(ReferenceTest, WindowCountsInclusively) {
  SmallCall c = Counting(5, 5);
  c.spec.causal = false;
  c.spec.window_left = 1;
  c.spec.window_right = 2;
  EXPECT_THAT(c.Forward().out.value, ElementsAre(1, 1.5, 2.5, 3, 3.5));
}

TEST(ReferenceTest, BlocksCountFromTheOrigin) {
  SmallCall c = Counting(3, 5);
  c.spec.causal = false;
  c.spec.block_mask =
      BlockMaskSpec{.mask = {.dtype = DType::kUint8, .shape = {1, 1, 2, 3}, .strides = {}},
                    .block_q = 2,
                    .block_k = 2};
  c.block_mask = {0, 1, 0, 0, 0, 0};
  const Result r = c.Forward();
  EXPECT_THAT(r.out.value, ElementsAre(2.5, 2.5, 0));
  EXPECT_EQ(r.lse.value[2], -kInf);
  EXPECT_EQ(r.visible_pairs, 4);
}

TEST(ReferenceTest, LogitsByHand) {
  // One query, two keys: t = 0.5 * (2, -1) = (1, -0.5); s = 0.8 tanh(t / 0.8) + bias - slope
  // |i+off-j|.
  SmallCall c(1, 1, 2, 1, 1, 1, 1);
  c.q = {2.0f};
  c.k = {1.0f, -0.5f};
  c.v = {1.0f, 3.0f};
  c.spec.softmax_scale = 0.5f;
  c.spec.softcap = 0.75f;
  c.AddBias(1, 1);
  c.bias = {0.25f, 0.5f};
  c.AddAlibi(1);
  c.slopes = {0.125f};
  c.AddSinks();
  c.sinks = {-0.5f};
  const double s0 = 0.75 * std::tanh(1.0 / 0.75) + 0.25 - 0.125;  // position 0 + off 1: |1 - 0|
  const double s1 = 0.75 * std::tanh(-0.5 / 0.75) + 0.5;
  const double sum = std::exp(s0) + std::exp(s1) + std::exp(-0.5);
  const Result r = c.Forward();
  EXPECT_NEAR(r.lse.value[0], std::log(sum), 1e-15);
  EXPECT_NEAR(r.out.value[0], (std::exp(s0) + 3 * std::exp(s1)) / sum, 1e-15);
}

TEST(ReferenceTest, RowsWithoutKeysGiveTheSink) {
  SmallCall c = Counting(3, 1);
  c.AddSinks();
  c.sinks = {0.75f};
  c.AddDlse();
  c.spec.seqlens_q = {2};
  const Result r = c.Backward();
  EXPECT_EQ(r.lse.value[0], 0.75);
  EXPECT_EQ(r.lse.bound[0], 0.0);
  EXPECT_EQ(r.out.value[0], 0.0);
  EXPECT_EQ(r.out.bound[0], 0.0);
  EXPECT_EQ(r.lse.value[2], -kInf) << "padding has no sink";
}

TEST(ReferenceTest, DropoutScalesWhatPhiloxKeeps) {
  SmallCall c(2, 3, 21, 2, 2, 2, 1);
  std::fill(c.q.begin(), c.q.end(), 0.0f);
  std::fill(c.v.begin(), c.v.end(), 1.0f);
  c.spec.dropout = DropoutSpec{.p = 0.5f, .seed = 0x123456789ABCDEFull, .offset = 9};
  const Result r = c.Forward();
  EXPECT_THAT(r.lse.value, Each(std::log(21.0)));  // undropped
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t h = 0; h < 2; ++h) {
        int kept = 0;
        for (uint32_t j = 0; j < 21; ++j) {
          const auto w = DropoutWords(0x123456789ABCDEFull, 9, b * 2 + h, i, j / 8);
          kept += ((w[j % 8 / 2] >> (j % 2 * 16)) & 0xFFFF) < 32768;
        }
        EXPECT_NEAR(r.out.value[(b * 3 + i) * 2 + h], 2.0 * kept / 21, 1e-14);
      }
    }
  }
}

TEST(ReferenceTest, LossOfLseAloneGivesMeanOfVisibleKeys) {
  SmallCall c = Counting(2, 4);
  std::fill(c.dout.begin(), c.dout.end(), 0.0f);
  c.dlse = {1.0f, 1.0f};
  const Result r = c.Backward();
  const double scale = 1.0 / std::sqrt(2.0);
  for (int64_t d = 0; d < 2; ++d) {
    const double first3 = double{c.k[d]} + c.k[2 + d] + c.k[4 + d];
    EXPECT_NEAR(r.dq.value[d], scale * first3 / 3, 1e-15);
    EXPECT_NEAR(r.dq.value[2 + d], scale * (first3 + c.k[6 + d]) / 4, 1e-15);
  }
}

TEST(ReferenceTest, ProbabilitiesSumToOne) {
  SmallCall c(2, 7, 9, 4, 2, 8, 3);
  c.spec.window_left = 2;
  std::fill(c.v.begin(), c.v.end(), 1.0f);
  const Result r = c.Forward();
  EXPECT_THAT(r.out.value, Pointwise(NearEach(1e-14), std::vector<double>(r.out.value.size(), 1)));
}

TEST(ReferenceTest, ConstantBiasShiftsOnlyLse) {
  SmallCall c(2, 7, 9, 4, 2, 8, 3);
  const Result plain = c.Backward();
  c.AddBias(1, 1);
  std::fill(c.bias.begin(), c.bias.end(), 2.5f);
  const Result shifted = c.Backward();
  std::vector<double> lse = plain.lse.value;
  for (double& x : lse) x += 2.5;
  EXPECT_THAT(shifted.lse.value, Pointwise(NearEach(1e-14), lse));
  EXPECT_THAT(shifted.out.value, Pointwise(NearEach(1e-14), plain.out.value));
  EXPECT_THAT(shifted.dk.value, Pointwise(NearEach(1e-14), plain.dk.value));
}

TEST(ReferenceTest, RowsOfDbiasSumToDlse) {
  SmallCall c(1, 4, 6, 2, 1, 8, 3);
  c.AddBias(1, 2);
  c.AddDlse();
  const Result r = c.Backward();
  for (size_t row = 0; row < 8; ++row) {
    double sum = 0.0;
    for (size_t j = 0; j < 6; ++j) sum += r.dbias.value[row * 6 + j];
    EXPECT_NEAR(sum, c.dlse[row], 1e-14);
  }
}

TEST(ReferenceTest, GroupedHeadsEqualRepeatedHeads) {
  SmallCall grouped(2, 5, 7, 6, 2, 4, 3);
  SmallCall repeated(2, 5, 7, 6, 6, 4, 3);
  repeated.q = grouped.q;
  repeated.dout = grouped.dout;
  for (int64_t row = 0; row < 2 * 7; ++row) {
    for (int64_t h = 0; h < 6; ++h) {
      std::copy_n(&grouped.k[(row * 2 + h / 3) * 4], 4, &repeated.k[(row * 6 + h) * 4]);
      std::copy_n(&grouped.v[(row * 2 + h / 3) * 3], 3, &repeated.v[(row * 6 + h) * 3]);
    }
  }
  const Result a = grouped.Backward(), b = repeated.Backward();
  EXPECT_EQ(a.out.value, b.out.value);
  EXPECT_EQ(a.dq.value, b.dq.value);
  std::vector<double> dk(a.dk.value.size(), 0.0);
  for (int64_t row = 0; row < 2 * 7; ++row) {
    for (int64_t n = 0; n < 6 * 4; ++n) {
      dk[(row * 2 + n / 12) * 4 + n % 4] += b.dk.value[row * 24 + n];
    }
  }
  EXPECT_THAT(a.dk.value, Pointwise(NearEach(1e-14), dk));
}

TEST(ReferenceTest, PackedSequencesEqualPaddedOnes) {
  SmallCall padded(2, 5, 7, 2, 1, 4, 3);
  padded.spec.causal = true;
  padded.spec.seqlens_q = {3, 5};
  padded.spec.seqlens_k = {7, 4};
  SmallCall packed(1, 8, 11, 2, 1, 4, 3);
  packed.spec.causal = true;
  packed.spec.layout = Layout::kThd;
  packed.spec.cu_seqlens_q = {0, 3, 8};
  packed.spec.cu_seqlens_k = {0, 7, 11};
  for (TensorSpec* t : {&packed.spec.q, &packed.spec.k, &packed.spec.v, &*packed.spec.dout}) {
    t->shape.erase(t->shape.begin());
  }
  std::copy_n(padded.q.begin(), 24, packed.q.begin());
  std::copy_n(padded.q.begin() + 40, 40, packed.q.begin() + 24);
  std::copy_n(padded.dout.begin(), 18, packed.dout.begin());
  std::copy_n(padded.dout.begin() + 30, 30, packed.dout.begin() + 18);
  std::copy_n(padded.k.begin(), 44, packed.k.begin());
  std::copy_n(padded.v.begin(), 33, packed.v.begin());
  std::fill(padded.k.begin() + 44, padded.k.end(), std::nanf(""));  // keys 4 … 6 of sequence 1
  std::fill(padded.v.begin() + 33, padded.v.end(), std::nanf(""));
  const Result a = padded.Backward(), b = packed.Backward();
  EXPECT_TRUE(std::equal(b.out.value.begin() + 18, b.out.value.end(), a.out.value.begin() + 30));
  EXPECT_TRUE(std::equal(b.dq.value.begin() + 24, b.dq.value.end(), a.dq.value.begin() + 40));
  EXPECT_TRUE(std::equal(b.dk.value.begin(), b.dk.value.end(), a.dk.value.begin()));
  EXPECT_TRUE(
      std::equal(b.lse.value.begin() + 3, b.lse.value.begin() + 8, a.lse.value.begin() + 10));
  EXPECT_EQ(a.visible_pairs, b.visible_pairs);
}

TEST(ReferenceTest, ThreadsDoNotChangeAnything) {
  SmallCall c(3, 9, 8, 4, 2, 4, 3);
  c.AddBias(1, 1);
  const Result one = c.Backward();
  const Result four = Compute(c.spec, c.data(), {.backward = true, .threads = 4});
  EXPECT_EQ(one.dk.value, four.dk.value);
  EXPECT_EQ(one.dq.bound, four.dq.bound);
  EXPECT_THAT(four.dbias.value, Pointwise(NearEach(1e-14), one.dbias.value));
}

}  // namespace
}  // namespace attn::reference
