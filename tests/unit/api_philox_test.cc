#include <gtest/gtest.h>

#include <array>
#include <string>

#include "kernels/api/philox.h"

namespace attn {
namespace {

using Words = std::array<uint32_t, 4>;

// Source: Random123, tests/kat_vectors, philox4x32 with 10 rounds.
TEST(PhiloxTest, PublishedVectors) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(
      Philox4x32({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}),
      (Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      Philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
      (Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(PhiloxTest, ThresholdRoundsHalvesAwayFromZero) {
  EXPECT_EQ(DropoutThreshold(0.0f), 65536u);
  EXPECT_EQ(DropoutThreshold(0.1f), 58982u);
  EXPECT_EQ(DropoutThreshold(0.5f), 32768u);
  EXPECT_EQ(DropoutThreshold(0.9f), 6554u);
  EXPECT_EQ(DropoutThreshold(0x1p-17f), 65536u);
  EXPECT_EQ(DropoutThreshold(1.0f - 0x1p-17f), 1u);
  EXPECT_EQ(DropoutThreshold(1.0f - 0x1p-18f), 0u);
}

std::string MaskRow(uint64_t seed, uint32_t offset, uint32_t head, uint32_t i, int n, float p) {
  std::string row;
  for (int j = 0; j < n; ++j) {
    const Words words = DropoutWords(seed, offset, head, i, static_cast<uint32_t>(j / 8));
    const bool keeps = DropoutKeeps(words, static_cast<uint32_t>(j % 8), DropoutThreshold(p));
    row += keeps ? '1' : '0';
  }
  return row;
}

// Rows written by an independent implementation of the definition in attention.proto (Dropout).
TEST(PhiloxTest, GoldenMasks) {
  EXPECT_EQ(MaskRow(0, 0, 0, 0, 40, 0.5f), "0100000000111001011111110011101100001000");
  EXPECT_EQ(MaskRow(0x123456789ABCDEF0u, 7, 5, 3, 40, 0.1f),
            "1111111101111111010111101111110111111111");
  EXPECT_EQ(MaskRow(42, 0xFFFFFFFFu, 65535, 1000, 33, 0.9f), "000000000100000000001000010000000");
  EXPECT_EQ(MaskRow(0xFFFFFFFFFFFFFFFFu, 1, 0, 0xFFFFFFFFu, 24, 0.3f), "101110100101101011111111");
}

TEST(PhiloxTest, KeepsTheStatedShare) {
  int64_t kept = 0;
  constexpr int kRows = 200;
  constexpr int kCols = 800;
  for (int i = 0; i < kRows; ++i) {
    for (char c : MaskRow(99, 0, 3, static_cast<uint32_t>(i), kCols, 0.2f)) kept += c == '1';
  }
  // Six standard deviations of a binomial with 160,000 draws: 960.
  EXPECT_NEAR(static_cast<double>(kept), 0.8 * kRows * kCols, 960);
}

}  // namespace
}  // namespace attn
