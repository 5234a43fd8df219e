// Long sums of terms of one sign, where nothing cancels: what is summed in one fp32 register for
// too long breaks the rule here first.
#include <gtest/gtest.h>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

class LongSumsTest : public ::testing::TestWithParam<Case> {};

TEST_P(LongSumsTest, EveryPath) { ExpectExact(GetParam(), Paths()); }

INSTANTIATE_TEST_SUITE_P(SameSign, LongSumsTest, ::testing::ValuesIn(SameSignCases()),
                         [](const auto& info) { return Name(info.param); });

}  // namespace
}  // namespace attn::exactness
