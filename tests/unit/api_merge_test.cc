#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/api/merge.h"
#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

using ::testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row of scores and values over a range of keys: (out, lse) in double, as attention defines.
struct Row {
  std::vector<float> out;
  float lse = -kInf;
};
Row Attend(const std::vector<double>& scores, const std::vector<std::vector<double>>& values,
           size_t begin, size_t end, double sink) {
  double max = sink;
  for (size_t j = begin; j < end; ++j) max = std::max(max, scores[j]);
  Row row;
  const size_t dims = values[0].size();
  row.out.assign(dims, 0.0f);
  if (max == -kInf) return row;
  double sum = std::exp(sink - max);
  std::vector<double> out(dims, 0.0);
  for (size_t j = begin; j < end; ++j) {
    const double p = std::exp(scores[j] - max);
    sum += p;
    for (size_t d = 0; d < dims; ++d) out[d] += p * values[j][d];
  }
  row.lse = static_cast<float>(max + std::log(sum));
  for (size_t d = 0; d < dims; ++d) row.out[d] = static_cast<float>(out[d] / sum);
  return row;
}

TEST(MergeTest, EmptyWithEmptyIsEmpty) {  // attention_cases 4
  const float lse = -kInf;
  const float garbage[2] = {kNan, kInf};  // an empty part's out row is not read
  float out[2] = {7, 7};
  float merged = 7;
  const PartialResult parts[] = {{garbage, &lse}, {garbage, &lse}};
  ASSERT_TRUE(MergePartials(parts, 1, 2, out, &merged).ok());
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(out[1], 0.0f);
  EXPECT_EQ(merged, -kInf);
}

TEST(MergeTest, EmptyWithFullIsFull) {
  const float empty_lse = -kInf;
  const float lse = 1.25f;
  const float garbage[2] = {kNan, kNan};
  const float out[2] = {3.0f, -4.5f};
  float merged_out[2];
  float merged_lse;
  const PartialResult parts[] = {{garbage, &empty_lse}, {out, &lse}};
  ASSERT_TRUE(MergePartials(parts, 1, 2, merged_out, &merged_lse).ok());
  EXPECT_EQ(merged_out[0], 3.0f);
  EXPECT_EQ(merged_out[1], -4.5f);
  EXPECT_EQ(merged_lse, 1.25f);
}

TEST(MergeTest, AnySplitEqualsTheWhole) {
  std::mt19937 rng(1);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 200; ++trial) {
    const size_t keys = 1 + rng() % 40;
    const double scale = trial % 3 == 0 ? 100.0 : 2.0;
    std::vector<double> scores(keys);
    std::vector<std::vector<double>> values(keys, std::vector<double>(5));
    for (auto& s : scores) s = scale * normal(rng);
    for (auto& v : values) {
      for (auto& x : v) x = normal(rng);
    }
    const Row whole = Attend(scores, values, 0, keys, -kInf);
    std::vector<Row> rows;
    for (size_t begin = 0; begin < keys;) {
      const size_t end = std::min(keys, begin + 1 + rng() % 12);
      rows.push_back(Attend(scores, values, begin, end, -kInf));
      begin = end;
    }
    std::vector<PartialResult> parts;
    for (const Row& row : rows) parts.push_back({row.out.data(), &row.lse});
    std::vector<float> out(5);
    float lse;
    ASSERT_TRUE(MergePartials(parts, 1, 5, out.data(), &lse).ok());
    // lse of a part is rounded to fp32, which moves its weight by half an ulp of lse.
    const double tolerance = 1e-6 + 2e-7 * std::fabs(whole.lse);
    EXPECT_NEAR(lse, whole.lse, tolerance);
    for (int d = 0; d < 5; ++d) EXPECT_NEAR(out[d], whole.out[d], 4 * tolerance);
  }
}

TEST(MergeTest, SinkInExactlyOnePartEqualsTheWhole) {  // attention_cases 23
  const std::vector<double> scores = {0.5, -1.0, 2.0, 0.25};
  const std::vector<std::vector<double>> values = {{1, 2}, {3, -4}, {0.5, 6}, {-7, 8}};
  const double sink = 1.5;
  const Row whole = Attend(scores, values, 0, 4, sink);
  auto merge = [&](double sink_first, double sink_second, std::vector<float>* out) {
    const Row first = Attend(scores, values, 0, 2, sink_first);
    const Row second = Attend(scores, values, 2, 4, sink_second);
    const PartialResult parts[] = {{first.out.data(), &first.lse},
                                   {second.out.data(), &second.lse}};
    float lse = 0;
    out->resize(2);
    EXPECT_TRUE(MergePartials(parts, 1, 2, out->data(), &lse).ok());
    return lse;
  };
  std::vector<float> out;
  EXPECT_NEAR(merge(sink, -kInf, &out), whole.lse, 1e-6);
  EXPECT_NEAR(out[0], whole.out[0], 2e-6);
  EXPECT_NEAR(out[1], whole.out[1], 2e-6);
  EXPECT_NEAR(merge(-kInf, sink, &out), whole.lse, 1e-6);
  EXPECT_NEAR(out[0], whole.out[0], 2e-6);
  // In both, the sink counts twice: that is the documented mistake, and it shows.
  const double twice = std::log(std::exp(double{whole.lse}) + std::exp(sink));
  EXPECT_NEAR(merge(sink, sink, &out), twice, 1e-6);
}

TEST(MergeTest, SinkAloneInARowWithoutKeysKeepsItsLse) {
  const float empty_lse = -kInf;
  const float sink_lse = 0.75f;
  const float zero[1] = {0.0f};
  const PartialResult parts[] = {{zero, &empty_lse}, {zero, &sink_lse}};
  float out;
  float lse;
  ASSERT_TRUE(MergePartials(parts, 1, 1, &out, &lse).ok());
  EXPECT_EQ(out, 0.0f);
  EXPECT_EQ(lse, 0.75f);
}

TEST(MergeTest, OutputMayAliasAPart) {
  std::vector<float> out_a = {1, 2, 3, 4};
  std::vector<float> lse_a = {0, -kInf};
  const std::vector<float> out_b = {5, 6, 7, 8};
  const std::vector<float> lse_b = {0, 2};
  const PartialResult parts[] = {{out_a.data(), lse_a.data()}, {out_b.data(), lse_b.data()}};
  ASSERT_TRUE(MergePartials(parts, 2, 2, out_a.data(), lse_a.data()).ok());
  EXPECT_THAT(out_a, ::testing::ElementsAre(3, 4, 7, 8));
  EXPECT_FLOAT_EQ(lse_a[0], std::log(2.0f));
  EXPECT_EQ(lse_a[1], 2.0f);
}

TEST(MergeTest, RefusesBadInputByNameAndWritesNothing) {
  const float lse[2] = {0, kNan};
  const float out[2] = {1, 1};
  float merged_out[2] = {42, 42};
  float merged_lse[2] = {42, 42};
  const PartialResult parts[] = {{out, out}, {out, lse}};
  absl::Status status = MergePartials(parts, 2, 1, merged_out, merged_lse);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(status), HasSubstr("lse of part 1, row 1 is nan; it must be finite or -inf"));
  EXPECT_EQ(merged_out[0], 42);
  EXPECT_EQ(merged_lse[0], 42);

  const float infinite[2] = {kInf, 0};
  const PartialResult bad[] = {{out, infinite}};
  EXPECT_THAT(Text(MergePartials(bad, 2, 1, merged_out, merged_lse)),
              HasSubstr("lse of part 0, row 0 is inf"));
  EXPECT_THAT(Text(MergePartials({}, 1, 1, merged_out, merged_lse)),
              HasSubstr("parts has 0 entries"));
  EXPECT_THAT(Text(MergePartials(parts, -1, 1, merged_out, merged_lse)), HasSubstr("rows is -1"));
  EXPECT_THAT(Text(MergePartials(parts, 1, -2, merged_out, merged_lse)),
              HasSubstr("head_dim_v is -2"));
}

TEST(MergeTest, NoRowsIsFine) {
  const PartialResult parts[] = {{nullptr, nullptr}};
  EXPECT_TRUE(MergePartials(parts, 0, 64, nullptr, nullptr).ok());
}

}  // namespace
}  // namespace attn
