#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/api/dtype.h"

namespace attn {
namespace {

// What a 16-bit float means, from its definition and not from bit tricks.
double Meaning(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Narrowing that searches for the nearest of the two neighbours, ties to the even one.
uint16_t NearestEven(float value, int exponent_bits, int mantissa_bits) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  uint16_t low = 0;  // largest finite value not over magnitude
  for (int step = 1 << 14; step > 0; step >>= 1) {
    const int candidate = low + step;
    if (candidate < infinity &&
        Meaning(static_cast<uint16_t>(candidate), exponent_bits, mantissa_bits) <= magnitude) {
      low = static_cast<uint16_t>(candidate);
    }
  }
  const double below = Meaning(low, exponent_bits, mantissa_bits);
  // Overflow is decided as if the exponent range went on.
  const double above = low + 1 < infinity
                           ? Meaning(low + 1, exponent_bits, mantissa_bits)
                           : below + (below - Meaning(low - 1, exponent_bits, mantissa_bits));
  const double down = magnitude - below;
  const double up = above - magnitude;
  const bool take_above = up < down || (up == down && (low & 1) != 0);
  return static_cast<uint16_t>(sign | (low + (take_above ? 1 : 0)));
}

TEST(DTypeTest, NamesAndSizes) {
  EXPECT_EQ(Name(DType::kFp32), "FP32");
  EXPECT_EQ(Name(DType::kFp16), "FP16");
  EXPECT_EQ(Name(DType::kBf16), "BF16");
  EXPECT_EQ(Name(DType::kUint8), "UINT8");
  EXPECT_EQ(LowerName(DType::kBf16), "bf16");
  EXPECT_EQ(SizeOf(DType::kFp32), 4);
  EXPECT_EQ(SizeOf(DType::kFp16), 2);
  EXPECT_EQ(SizeOf(DType::kBf16), 2);
  EXPECT_EQ(SizeOf(DType::kUint8), 1);
}

TEST(DTypeTest, WideningIsExactForEveryPattern) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const double fp16 = Meaning(b, 5, 10);
    const double bf16 = Meaning(b, 8, 7);
    if (std::isnan(fp16)) {
      EXPECT_TRUE(std::isnan(Fp16ToFloat(b)));
    } else {
      ASSERT_EQ(static_cast<double>(Fp16ToFloat(b)), fp16) << bits;
      ASSERT_EQ(std::signbit(Fp16ToFloat(b)), std::signbit(fp16)) << bits;
    }
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(b)));
    } else {
      ASSERT_EQ(static_cast<double>(Bf16ToFloat(b)), bf16) << bits;
    }
  }
}

TEST(DTypeTest, NarrowingInvertsWideningForEveryPattern) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    if (std::isnan(Fp16ToFloat(b))) {
      EXPECT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(Fp16ToFloat(b)))));
    } else {
      ASSERT_EQ(FloatToFp16(Fp16ToFloat(b)), b);
    }
    if (std::isnan(Bf16ToFloat(b))) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(Bf16ToFloat(b)))));
    } else {
      ASSERT_EQ(FloatToBf16(Bf16ToFloat(b)), b);
    }
  }
}

TEST(DTypeTest, NarrowingRoundsToNearestEvenAtEveryBoundary) {
  // Around every value and every midpoint between neighbours.
  for (int bits = 0; bits < 0x7C00; ++bits) {
    const double value = Meaning(static_cast<uint16_t>(bits), 5, 10);
    const double next =
        bits + 1 < 0x7C00 ? Meaning(static_cast<uint16_t>(bits + 1), 5, 10) : 65536.0;
    const auto mid = static_cast<float>((value + next) / 2);
    for (float x : {mid, std::nextafter(mid, 0.0f), std::nextafter(mid, 1e9f), -mid}) {
      ASSERT_EQ(FloatToFp16(x), NearestEven(x, 5, 10)) << x;
    }
  }
  for (int bits = 0; bits < 0x7F80; bits += 7) {
    const auto low = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    for (uint32_t tail : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const auto x = std::bit_cast<float>(std::bit_cast<uint32_t>(low) | tail);
      ASSERT_EQ(FloatToBf16(x), NearestEven(x, 8, 7)) << x;
    }
  }
}

TEST(DTypeTest, NarrowingOverflowsToInfinityAndKeepsNan) {
  EXPECT_EQ(FloatToFp16(65519.0f), 0x7BFF);
  EXPECT_EQ(FloatToFp16(65520.0f), 0x7C00);
  EXPECT_EQ(FloatToFp16(-1e30f), 0xFC00);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7F80);
  // A NaN whose payload lies only in the bits that are dropped.
  const auto nan = std::bit_cast<float>(0x7F800001u);
  EXPECT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(nan))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(nan))));
}

TEST(DTypeTest, LoadAndStoreElement) {
  for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    unsigned char buffer[3 * 4 + 1] = {};
    StoreElement(buffer + 1, dtype, 2, -1.5f);  // an odd address is allowed
    EXPECT_EQ(LoadElement(buffer + 1, dtype, 2), -1.5f);
    EXPECT_EQ(LoadElement(buffer + 1, dtype, 1), 0.0f);
  }
}

}  // namespace
}  // namespace attn
