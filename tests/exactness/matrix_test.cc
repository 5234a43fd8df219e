// The exactness rule on generated cases: every CPU path, forward and backward.
#include <gtest/gtest.h>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

class ExactnessTest : public ::testing::TestWithParam<Case> {};

TEST_P(ExactnessTest, EveryPath) { ExpectExact(GetParam(), Paths()); }

constexpr uint64_t kRandomSeed = 20240607;

// The index keeps names apart where a random case repeats.
std::string RandomName(const ::testing::TestParamInfo<Case>& info) {
  return Name(info.param) + "_n" + std::to_string(info.index);
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) { return Name(info.param); }

INSTANTIATE_TEST_SUITE_P(Option, ExactnessTest, ::testing::ValuesIn(SingleOptionCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(OptionPair, ExactnessTest, ::testing::ValuesIn(OptionPairCases()),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Length, ExactnessTest, ::testing::ValuesIn(LengthCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(HeadDim, ExactnessTest, ::testing::ValuesIn(HeadDimCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Numbers, ExactnessTest, ::testing::ValuesIn(NumbersCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Random, ExactnessTest, ::testing::ValuesIn(RandomCases(1500, kRandomSeed)),
                         RandomName);
INSTANTIATE_TEST_SUITE_P(Tile, ExactnessTest, ::testing::ValuesIn(TileCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Large, ExactnessTest, ::testing::ValuesIn(LargeCases()), CaseName);

}  // namespace
}  // namespace attn::exactness
