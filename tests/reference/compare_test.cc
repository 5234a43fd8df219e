#include "tests/reference/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/reference/small_call.h"

namespace attn::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double RatioOf(double want, double bound, float got, DType dtype = DType::kFp32) {
  uint32_t storage = 0;
  StoreElement(&storage, dtype, 0, got);
  return Compare({{want}, {bound}}, &storage, dtype).ratio;
}

TEST(CompareTest, RatioIsErrorOverBound) { EXPECT_EQ(RatioOf(1.0, 0.5, 1.25f), 0.5); }

TEST(CompareTest, ExactValuesMustBeMet) {
  EXPECT_EQ(RatioOf(0.0, 0.0, 0.0f), 0.0);
  EXPECT_EQ(RatioOf(0.0, 0.0, 1e-40f), kInf);
  EXPECT_EQ(RatioOf(-kInf, 0.0, -std::numeric_limits<float>::infinity()), 0.0);
  EXPECT_EQ(RatioOf(-kInf, 1.0, -1e30f), kInf) << "a large finite number is not -inf";
}

TEST(CompareTest, NanNeverPasses) {
  EXPECT_EQ(RatioOf(1.0, kInf, std::nanf("")), kInf);
  EXPECT_EQ(RatioOf(-kInf, 0.0, std::nanf("")), kInf);
}

TEST(CompareTest, InfinityOnlyWhereTheDtypeEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(RatioOf(65520.0, 0.0, inf, DType::kFp16), 0.0);
  EXPECT_EQ(RatioOf(65000.0, 1.0, inf, DType::kFp16), kInf);
  EXPECT_EQ(RatioOf(65520.0, 0.0, -inf, DType::kFp16), kInf);
  EXPECT_EQ(RatioOf(65520.0, 1.0, inf, DType::kBf16), kInf);
}

TEST(CompareTest, ReportsTheWorstElement) {
  const float got[] = {1.0f, 2.5f, 3.1f};
  const Verdict v = Compare({{1, 2, 3}, {1, 1, 1}}, got, DType::kFp32);
  EXPECT_EQ(v.index, 1);
  EXPECT_EQ(v.got, 2.5);
  EXPECT_EQ(v.ToString(), "index 1: got 2.5, want 2, bound 1, ratio 0.5");
}

// The bounds of a call small enough to write out: one query, one key, so p = 1 and ds = 0.
TEST(BoundTest, OneQueryOneKeyByHand) {
  SmallCall c(1, 1, 1, 1, 1, 1, 1);
  c.q = {4.0f};
  c.k = {0.5f};
  c.v = {-2.0f};
  c.dout = {0.5f};
  c.AddDlse();
  c.dlse = {0.25f};
  const Result r = c.Backward();
  const double u = std::ldexp(1.0, -22), eta = std::ldexp(1.0, -100);
  const double ci = std::ldexp(2.0, -20);  // S = |4 * 0.5|
  EXPECT_DOUBLE_EQ(r.out.bound[0], u * 2 + (u + ci) * 2 + eta * 3);
  EXPECT_DOUBLE_EQ(r.lse.bound[0], 2e-5 + ci);
  // ds = dlse = 0.25; A = |0.5 * -2| = 1.
  const double w = (u + ci) * (0.25 + 1.0 + 0.25) + u * 1.0 + eta;
  EXPECT_DOUBLE_EQ(r.dq.bound[0], u * 0.125 + w * 0.5 + eta);
  EXPECT_DOUBLE_EQ(r.dk.bound[0], u * 1.0 + w * 4.0 + eta);
  EXPECT_DOUBLE_EQ(r.dv.bound[0], u * 0.5 + (u + ci + eta) * 0.5 + eta);
}

TEST(BoundTest, OutputDtypeOnlyTakesTheLastRounding) {
  SmallCall c(1, 1, 1, 1, 1, 1, 1);
  std::vector<uint16_t> one = {FloatToBf16(1.0f)};
  for (TensorSpec* t : {&c.spec.q, &c.spec.k, &c.spec.v}) t->dtype = DType::kBf16;
  Data data = c.data();
  data.q = data.k = data.v = one.data();
  const double u = std::ldexp(1.0, -8), ci = std::ldexp(1.0, -20), eta = std::ldexp(1.0, -100);
  EXPECT_DOUBLE_EQ(Compute(c.spec, data).out.bound[0], 2 * u + ci + 2 * eta);
  c.spec.out_dtype = DType::kFp32;
  EXPECT_DOUBLE_EQ(Compute(c.spec, data).out.bound[0], u + ci + std::ldexp(1.0, -22) + 2 * eta);
}

TEST(BoundTest, SinkAndSoftcapEnterTheLogitError) {
  SmallCall c(1, 1, 1, 1, 1, 1, 1);
  c.q = {1.0f};
  c.k = {1.0f};
  c.AddSinks();
  c.sinks = {-8.0f};
  c.spec.softcap = 2.0f;
  const Result r = c.Forward();
  EXPECT_NEAR(r.lse.bound[0],
              1e-5 * std::max(1.0, std::abs(r.lse.value[0])) + 9 * std::ldexp(1.0, -20), 1e-18);
}

}  // namespace
}  // namespace attn::reference
