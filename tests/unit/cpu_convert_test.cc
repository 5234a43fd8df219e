// Conversions over all 16-bit values, transposition and row operations, on every SIMD target.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/simd.h"

namespace attn {
namespace {

class ConvertTest : public ::testing::TestWithParam<SimdTarget> {
 protected:
  ConvertTest() : chosen_(ChosenSimdTarget()) { SetSimdTargetForTest(GetParam()); }
  ~ConvertTest() override { SetSimdTargetForTest(chosen_); }

 private:
  const SimdTarget chosen_;
};

void ExpectNarrowsLikeScalar(const std::vector<float>& values, DType dtype) {
  std::vector<uint16_t> got(values.size());
  NarrowRow(values.data(), static_cast<int64_t>(values.size()), dtype, got.data());
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t want;
    StoreElement(&want, dtype, 0, values[i]);
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(LoadElement(&got[i], dtype, 0))) << std::hex << got[i];
    } else {
      ASSERT_EQ(got[i], want) << Name(dtype) << " of " << values[i] << " (bits " << std::hex
                              << std::bit_cast<uint32_t>(values[i]) << ")";
    }
  }
}

TEST_P(ConvertTest, WidensEvery16BitValueExactly) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(bits.size());
  for (DType dtype : {DType::kFp16, DType::kBf16}) {
    WidenRow(bits.data(), dtype, static_cast<int64_t>(bits.size()), wide.data());
    for (size_t i = 0; i < bits.size(); ++i) {
      const float want = LoadElement(bits.data(), dtype, static_cast<int64_t>(i));
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(want)) << i;
      }
    }
  }
}

TEST_P(ConvertTest, NarrowsAroundEvery16BitValueToNearestEven) {
  for (DType dtype : {DType::kFp16, DType::kBf16}) {
    std::vector<float> values;
    for (uint32_t i = 0; i < 65536; ++i) {
      // The value itself, its neighbours in fp32, and the point halfway to the next value with its
      // neighbours, where rounding decides.
      const uint16_t bits = static_cast<uint16_t>(i), next = static_cast<uint16_t>(i + 1);
      const float value = LoadElement(&bits, dtype, 0);
      const float half = static_cast<float>(
          (static_cast<double>(value) + static_cast<double>(LoadElement(&next, dtype, 0))) / 2);
      for (float x : {value, half}) {
        values.push_back(x);
        values.push_back(std::nextafter(x, INFINITY));
        values.push_back(std::nextafter(x, -INFINITY));
      }
    }
    ExpectNarrowsLikeScalar(values, dtype);
  }
}

TEST_P(ConvertTest, NarrowsRandomBitsToNearestEven) {
  std::mt19937 rng(7);
  std::vector<float> values(1 << 18);
  for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(rng()));
  for (DType dtype : {DType::kFp16, DType::kBf16}) ExpectNarrowsLikeScalar(values, dtype);
}

TEST_P(ConvertTest, TouchesNothingBeyondTheRow) {
  for (int64_t n = 0; n <= 40; ++n) {
    const std::vector<uint16_t> source(n, 0x3C00);
    std::vector<float> wide(n + 1, 5.0f);
    WidenRow(source.data(), DType::kFp16, n, wide.data());
    ASSERT_EQ(wide[n], 5.0f);
    std::vector<uint16_t> narrow(n + 1, 77);
    NarrowRow(wide.data(), n, DType::kFp16, narrow.data());
    ASSERT_EQ(narrow[n], 77);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(narrow[i], 0x3C00);
  }
}

TEST_P(ConvertTest, TransposesAnyShape) {
  for (int64_t rows : {0, 1, 3, 4, 7, 16, 19}) {
    for (int64_t cols : {0, 1, 4, 5, 16, 33}) {
      const int64_t from = cols + 2, to = rows + 3;
      std::vector<float> source(rows * from), got(cols * to + 1, -1.0f);
      for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i);
      TransposeTile(source.data(), from, rows, cols, got.data(), to);
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < to; ++r) {
          ASSERT_EQ(got[c * to + r], r < rows ? source[r * from + c] : -1.0f);
        }
      }
    }
  }
}

TEST_P(ConvertTest, RowOperationsMatchDoublePrecision) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n <= 70; ++n) {
    std::vector<float> x(n), y(n + 1, 9.0f);
    for (int64_t i = 0; i < n; ++i) {
      x[i] = normal(rng);
      y[i] = normal(rng);
    }
    double dot = 0, magnitude = 0;
    for (int64_t i = 0; i < n; ++i) {
      dot += static_cast<double>(x[i]) * y[i];
      magnitude += std::abs(static_cast<double>(x[i]) * y[i]);
    }
    ASSERT_NEAR(DotRow(x.data(), y.data(), n), dot, std::ldexp(magnitude, -21) + 1e-30);
    std::vector<float> z = y;
    AddScaledRow(x.data(), 0.5f, n, z.data());
    for (int64_t i = 0; i < n; ++i) ASSERT_NEAR(z[i], y[i] + 0.5f * x[i], 1e-6f);
    ScaleRow(3.0f, n, z.data());
    for (int64_t i = 0; i < n; ++i) ASSERT_NEAR(z[i], 3.0f * (y[i] + 0.5f * x[i]), 3e-6f);
    ASSERT_EQ(z[n], 9.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, ConvertTest, ::testing::ValuesIn(SupportedSimdTargets()),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace attn
