// Elementary functions and the steps on a tile of scores, against double precision, on every SIMD
// target.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/api/philox.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/score_row.h"
#include "kernels/cpu/simd.h"

namespace attn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class TileTest : public ::testing::TestWithParam<SimdTarget> {
 protected:
  TileTest() : chosen_(ChosenSimdTarget()) { SetSimdTargetForTest(GetParam()); }
  ~TileTest() override { SetSimdTargetForTest(chosen_); }

 private:
  const SimdTarget chosen_;
};

TEST_P(TileTest, ExpRowIsAccurateAndSumsWhatItStores) {
  // Without fused multiply-adds the exponent's product is rounded once more.
  const bool fused = GetParam() >= SimdTarget::kAvx2;
  std::vector<float> x;
  for (float v = -87.0f; v <= 20.0f; v += 0.00137f) x.push_back(v);
  std::vector<float> p = x;
  const float sum = ExpRow(0.0f, static_cast<int64_t>(p.size()), p.data());
  double total = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    const double limit = 2e-7 + (fused ? 0.0 : 1e-7 * std::abs(x[i]));
    ASSERT_NEAR(p[i] / want, 1.0, limit) << x[i];
    total += p[i];
  }
  EXPECT_NEAR(sum / total, 1.0, 1e-5);
}

TEST_P(TileTest, ExpRowAtTheEdges) {
  float x[] = {0.0f, -kInfinity, -1000.0f, -88.5f, 3.0f};
  EXPECT_FLOAT_EQ(ExpRow(3.0f, 0, x), 0.0f);
  ExpRow(0.0f, 5, x);
  EXPECT_EQ(x[0], 1.0f);  // exactly, so that counting oracles are exact
  EXPECT_EQ(x[1], 0.0f);
  EXPECT_EQ(x[2], 0.0f);
  EXPECT_EQ(x[3], 0.0f);
}

TEST_P(TileTest, TanhAndItsGradientHaveSmallRelativeErrors) {
  std::vector<float> x;
  for (float v = -12.0f; v <= 12.0f; v += 0.00073f) x.push_back(v);
  for (float v : {1e-30f, 1e-10f, 1e-4f, 0.624999f, 0.625f, 0.625001f}) {
    x.push_back(v);
    x.push_back(-v);
  }
  x.resize((x.size() + 15) / 16 * 16, 0.0f);
  std::vector<float> t = x, grad(x.size());
  SoftcapTile(static_cast<int64_t>(x.size()) / 16, 16, 1.0f, t.data(), grad.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i], cosh = std::cosh(v);
    if (v == 0) {
      ASSERT_EQ(t[i], 0.0f);
      continue;
    }
    ASSERT_NEAR(t[i] / std::tanh(v), 1.0, 4e-7) << v;
    ASSERT_NEAR(grad[i] * cosh * cosh, 1.0, 5e-7 + 2e-7 * std::abs(v)) << v;
  }
}

TEST_P(TileTest, OnlineSoftmaxEqualsSoftmaxOverAllKeys) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal(0, 8);
  for (int64_t cols : {16, 32, 48, 64}) {
    const int64_t keys = 37, tiles = 5;
    std::vector<float> m(cols, -kInfinity), l(cols, 0.0f), alpha(cols), scale(cols), lse(cols);
    std::vector<double> sum(cols, 0.0);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      std::vector<float> s(keys * cols);
      for (int64_t i = 0; i < keys * cols; ++i) {
        // The first column never sees a key; the first tile is hidden from every odd column.
        const int64_t c = i % cols;
        s[i] = c == 0 || (tile == 0 && c % 2 == 1) ? -kInfinity : normal(rng);
        sum[c] += std::exp2(static_cast<double>(s[i]));
      }
      SoftmaxTile(keys, cols, s.data(), m.data(), l.data(), alpha.data());
      for (float p : s) ASSERT_TRUE(p >= 0 && p <= 1);
    }
    FinishColumns(cols, m.data(), l.data(), nullptr, scale.data(), lse.data());
    EXPECT_EQ(lse[0], -kInfinity);
    EXPECT_EQ(scale[0], 0.0f);
    for (int64_t c = 1; c < cols; ++c) {
      ASSERT_NEAR(lse[c], std::log(sum[c]), 1e-6 * std::abs(std::log(sum[c])) + 1e-6);
      ASSERT_NEAR(scale[c] * std::exp2(-static_cast<double>(m[c])) * sum[c], 1.0, 1e-5);
    }
    const std::vector<float> sinks(cols, 1.25f);
    FinishColumns(cols, m.data(), l.data(), sinks.data(), scale.data(), lse.data());
    EXPECT_EQ(lse[0], 1.25f);  // exactly the sink
    EXPECT_EQ(scale[0], 0.0f);
    for (int64_t c = 1; c < cols; ++c) {
      const double want = std::log(sum[c] + std::exp(1.25));
      ASSERT_NEAR(lse[c], want, 1e-6 * std::abs(want) + 1e-6);
    }
  }
}

TEST_P(TileTest, MergedColumnsEqualOneSoftmax) {
  const int64_t cols = 16, dv = 3;
  std::vector<float> o1(dv * cols, 2.0f), m1(cols, 1.0f), l1(cols, 4.0f);
  std::vector<float> o2(dv * cols, 8.0f), m2(cols, 3.0f), l2(cols, 1.0f);
  m1[0] = m2[0] = m2[1] = -kInfinity;
  l1[0] = l2[0] = l2[1] = 0.0f;
  o1[0] = o2[0] = o2[1] = 0.0f;
  MergeColumns(dv, cols, o2.data(), m2.data(), l2.data(), o1.data(), m1.data(), l1.data());
  EXPECT_EQ(m1[0], -kInfinity);
  EXPECT_EQ(l1[0], 0.0f);
  EXPECT_EQ(o1[0], 0.0f);
  EXPECT_EQ(l1[1], 4.0f);
  EXPECT_EQ(o1[1], 2.0f);
  EXPECT_EQ(m1[2], 3.0f);
  EXPECT_NEAR(l1[2], 4.0f * 0.25f + 1.0f, 1e-6f);
  EXPECT_NEAR(o1[2], 2.0f * 0.25f + 8.0f, 1e-5f);
}

TEST_P(TileTest, DropoutMatchesPhiloxLaneByLane) {
  DropoutOption dropout;
  dropout.seed = 0x123456789ABCDEFull;
  dropout.offset = 7;
  dropout.threshold = 40000;
  const int64_t keys = 21, cols = 32, j0 = 64;
  std::vector<uint32_t> query(cols), head(cols);
  for (int64_t c = 0; c < cols; ++c) {
    query[c] = static_cast<uint32_t>(1000 + 3 * c);
    head[c] = static_cast<uint32_t>(c % 5);
  }
  std::vector<float> keep(keys * cols), row(keys);
  DropoutTile(dropout, j0, keys, cols, query.data(), head.data(), 1.5f, keep.data());
  for (int64_t c = 0; c < cols; ++c) {
    DropoutRow(dropout, head[c], query[c], j0, keys, row.data());
    for (int64_t j = 0; j < keys; ++j) {
      const auto words = DropoutWords(dropout.seed, dropout.offset, head[c], query[c],
                                      static_cast<uint32_t>((j0 + j) / 8));
      const bool kept = DropoutKeeps(words, static_cast<uint32_t>((j0 + j) % 8), dropout.threshold);
      ASSERT_EQ(keep[j * cols + c], kept ? 1.5f : 0.0f) << j << ", " << c;
      ASSERT_EQ(row[j] != 0, kept);
    }
  }
}

TEST_P(TileTest, MaskHidesExactlyOutsideTheRange) {
  const int64_t keys = 9, cols = 16;
  std::vector<int32_t> lo(cols), hi(cols);
  for (int32_t c = 0; c < cols; ++c) {
    lo[c] = c % 5;
    hi[c] = c % 10;
  }
  std::vector<float> s(keys * cols, 1.0f);
  MaskTile(keys, cols, lo.data(), hi.data(), s.data());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < cols; ++c) {
      ASSERT_EQ(s[j * cols + c], j >= lo[c] && j < hi[c] ? 1.0f : -kInfinity);
    }
  }
}

TEST_P(TileTest, RowDotAddsUpWhatDropoutKeeps) {
  constexpr int64_t kKeys = 37, kCols = 48;
  std::mt19937 rng(11);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> p(kKeys * kCols), dp(p.size()), keep(p.size());
  for (size_t n = 0; n < p.size(); ++n) {
    p[n] = std::abs(uniform(rng));
    dp[n] = uniform(rng);
    keep[n] = n % 3 == 0 ? 0.0f : 1.5f;
  }
  for (bool dropout : {false, true}) {
    const float* kept = dropout ? keep.data() : nullptr;
    std::vector<float> sum(kCols, -2.0f);  // added to what is there
    RowDotTile(kKeys, kCols, kept, p.data(), dp.data(), sum.data());
    for (int64_t c = 0; c < kCols; ++c) {
      double want = -2.0;
      for (int64_t j = 0; j < kKeys; ++j) {
        const int64_t at = j * kCols + c;
        want += static_cast<double>(p[at]) * dp[at] * (kept == nullptr ? 1.0f : kept[at]);
      }
      ASSERT_NEAR(sum[c], want, 1e-5) << "column " << c;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, TileTest, ::testing::ValuesIn(SupportedSimdTargets()),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace attn
