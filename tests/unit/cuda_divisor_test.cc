#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/common/divisor.h"

namespace attn::cuda {
namespace {

constexpr uint32_t kEnd = uint32_t{1} << 31;  // of what is divided

// Divisors around every power of two, and some others.
std::vector<uint32_t> Divisors() {
  std::vector<uint32_t> divisors;
  for (int bit = 0; bit <= 31; ++bit) {
    const uint32_t power = uint32_t{1} << bit;
    for (const uint32_t d : {power - 1, power, power + 1}) {
      if (d >= 1 && d <= kEnd) divisors.push_back(d);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) divisors.push_back(1 + random() % kEnd);
  for (int i = 0; i < 200; ++i) divisors.push_back(1 + random() % 1000);
  return divisors;
}

TEST(DivisorTest, QuotientsAtMultiplesAndEnds) {
  std::mt19937 random(2);
  for (const uint32_t d : Divisors()) {
    const Divisor by = MakeDivisor(d);
    std::vector<uint32_t> numbers = {0, 1, kEnd - 1, kEnd - 2};
    // A quotient is wrong first where it should change: around multiples, the largest above all.
    for (int i = 0; i < 100; ++i) {
      const uint32_t multiple = (i == 0 ? kEnd - 1 : random() % kEnd) / d * d;
      numbers.push_back(multiple);
      if (multiple > 0) numbers.push_back(multiple - 1);
      if (multiple < kEnd - 1) numbers.push_back(multiple + 1);
    }
    for (const uint32_t n : numbers) ASSERT_EQ(Quotient(n, by), n / d) << n << " / " << d;
  }
}

TEST(DivisorTest, SmallNumbersAll) {
  for (uint32_t d = 1; d <= 300; ++d) {
    const Divisor by = MakeDivisor(d);
    for (uint32_t n = 0; n < 3000; ++n) ASSERT_EQ(Quotient(n, by), n / d) << n << " / " << d;
  }
}

}  // namespace
}  // namespace attn::cuda
