#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

using ::testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A bias of 2 * 4 * 50 * 70 elements: more than one chunk of the scan.
struct BiasCase {
  explicit BiasCase(DType dtype) : data(2 * 4 * 50 * 70 * SizeOf(dtype)) {
    AttentionSpec spec = BshdSpec({2, 50, 70, 4, 2, 16, 16});
    spec.bias = Shape({2, 4, 50, 70}, dtype);
    problem = *Validate(spec, Pass::kForward);
    problem.bias->data = data.data();
  }
  void Set(int64_t index, float value) {
    StoreElement(data.data(), problem.bias->dtype, index, value);
  }
  AttentionProblem problem;
  std::vector<unsigned char> data;
};

TEST(ValidateContentsTest, BiasNamesTheEntry) {
  for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    BiasCase c(dtype);
    c.Set(5, -kInf);
    c.Set(6, -3.0f);
    EXPECT_EQ(Text(ValidateContents(c.problem)), "OK");
    const int64_t last = 2 * 4 * 50 * 70 - 1;
    c.Set(last, kNan);
    EXPECT_THAT(Text(ValidateContents(c.problem)),
                HasSubstr("bias[1, 3, 49, 69] is nan; it must be finite or -inf"));
    c.Set(((1 * 4 + 2) * 50 + 7) * 70 + 11, kInf);
    EXPECT_THAT(Text(ValidateContents(c.problem)), HasSubstr("bias[1, 2, 7, 11] is inf"));
  }
}

TEST(ValidateContentsTest, NegativeNanIsNan) {
  BiasCase c(DType::kFp32);
  c.Set(0, -kNan);
  EXPECT_THAT(Text(ValidateContents(c.problem)), HasSubstr("bias[0, 0, 0, 0] is "));
}

TEST(ValidateContentsTest, PackedBiasHasThreeAxes) {
  AttentionSpec spec = ThdSpec({2, 3}, {4, 6});
  spec.bias = Shape({1, 5, 6});
  AttentionProblem p = *Validate(spec, Pass::kForward);
  std::vector<float> bias(30, 0.0f);
  bias[4 * 6 + 2] = kNan;
  p.bias->data = bias.data();
  EXPECT_THAT(Text(ValidateContents(p)), HasSubstr("bias[0, 4, 2] is nan"));
}

TEST(ValidateContentsTest, AlibiSlopesMustBeFinite) {
  AttentionSpec spec = BshdSpec();
  spec.alibi_slopes = Shape({2, 4});
  AttentionProblem p = *Validate(spec, Pass::kForward);
  std::vector<float> slopes(8, 0.5f);
  p.alibi->slopes = slopes.data();
  EXPECT_EQ(Text(ValidateContents(p)), "OK");
  slopes[6] = -kInf;
  EXPECT_THAT(Text(ValidateContents(p)),
              HasSubstr("alibi_slopes[1, 2] is -inf; it must be finite"));
}

TEST(ValidateContentsTest, SinksMayBeMinusInfinity) {
  AttentionSpec spec = BshdSpec();
  spec.sinks = Shape({4});
  AttentionProblem p = *Validate(spec, Pass::kForward);
  std::vector<float> sinks = {0, -kInf, 1, 2};
  p.sinks = sinks.data();
  EXPECT_EQ(Text(ValidateContents(p)), "OK");
  sinks[3] = kInf;
  EXPECT_THAT(Text(ValidateContents(p)), HasSubstr("sinks[3] is inf; it must be finite or -inf"));
}

TEST(ValidateContentsTest, BlockMaskEntriesAreZeroOrOne) {
  AttentionSpec spec = BshdSpec();
  spec.block_mask = BlockMaskSpec{Shape({1, 1, 3, 4}, DType::kUint8), 2, 2};
  AttentionProblem p = *Validate(spec, Pass::kForward);
  std::vector<uint8_t> mask(12, 1);
  mask[0] = 0;
  p.block_mask->data = mask.data();
  EXPECT_EQ(Text(ValidateContents(p)), "OK");
  mask[9] = 2;
  EXPECT_THAT(Text(ValidateContents(p)),
              HasSubstr("block_mask.mask[0, 0, 2, 1] is 2; it must be 0 or 1"));
}

TEST(ValidateContentsTest, NullDataPasses) {
  AttentionSpec spec = BshdSpec();
  spec.bias = Shape({1, 1, 5, 7});
  spec.alibi_slopes = Shape({4});
  spec.sinks = Shape({4});
  spec.block_mask = BlockMaskSpec{Shape({1, 1, 1, 1}, DType::kUint8), 128, 128};
  EXPECT_EQ(Text(ValidateContents(*Validate(spec, Pass::kForward))), "OK");
}

}  // namespace
}  // namespace attn
