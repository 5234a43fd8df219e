#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "client/load/histogram.h"
#include "client/load/schedule.h"

namespace attn::load {
namespace {

constexpr double kQuantiles[] = {0,   0.001, 0.01,  0.1,    0.25,    0.5,      0.75,
                                 0.9, 0.99,  0.999, 0.9999, 0.99999, 0.999999, 1};

// What ValueAt() is meant to be, from the values themselves.
int64_t Exact(std::vector<int64_t>& sorted, double quantile) {
  const auto rank = static_cast<int64_t>(std::ceil(quantile * static_cast<double>(sorted.size())));
  return sorted[std::clamp<int64_t>(rank, 1, static_cast<int64_t>(sorted.size())) - 1];
}

void ExpectWithinBound(std::vector<int64_t> values) {
  Histogram histogram;
  double sum = 0;
  for (const int64_t value : values) {
    histogram.Record(value);
    sum += static_cast<double>(value);
  }
  std::sort(values.begin(), values.end());
  for (const double quantile : kQuantiles) {
    const int64_t exact = Exact(values, quantile);
    const double error = std::abs(static_cast<double>(histogram.ValueAt(quantile) - exact));
    EXPECT_LE(error, Histogram::kMaxRelativeError * static_cast<double>(exact))
        << "quantile " << quantile << " of " << values.size() << " values, exact " << exact;
  }
  EXPECT_EQ(histogram.min(), values.front());
  EXPECT_EQ(histogram.max(), values.back());
  EXPECT_EQ(histogram.ValueAt(1), values.back());
  EXPECT_EQ(histogram.count(), static_cast<int64_t>(values.size()));
  EXPECT_NEAR(histogram.Mean(), sum / static_cast<double>(values.size()),
              1e-9 * std::max(1.0, histogram.Mean()));
}

TEST(HistogramTest, EmptyIsZero) {
  const Histogram histogram;
  EXPECT_TRUE(histogram.empty());
  EXPECT_EQ(histogram.ValueAt(0.99), 0);
  EXPECT_EQ(histogram.Mean(), 0);
  EXPECT_TRUE(histogram.Buckets().empty());
}

TEST(HistogramTest, SmallValuesAreExact) {
  Histogram histogram;
  for (int64_t value = 0; value < 256; ++value) histogram.Record(value);
  for (int64_t value = 0; value < 256; ++value) {
    EXPECT_EQ(histogram.ValueAt((static_cast<double>(value) + 1) / 256), value);
  }
}

// Every value within 3 of a power of two, and the largest there is: where buckets change width.
TEST(HistogramTest, EveryOctaveKeepsTheBound) {
  for (int octave = 0; octave < 63; ++octave) {
    for (int64_t offset = -3; offset <= 3; ++offset) {
      const int64_t value = std::max<int64_t>(0, (int64_t{1} << octave) + offset);
      Histogram histogram;
      histogram.Record(value);
      histogram.Record(std::numeric_limits<int64_t>::max());
      const double error = std::abs(static_cast<double>(histogram.ValueAt(0.5) - value));
      EXPECT_LE(error, Histogram::kMaxRelativeError * static_cast<double>(value)) << value;
      const std::vector<Histogram::Bucket> buckets = histogram.Buckets();
      EXPECT_LE(buckets[0].lower, value);
      EXPECT_GE(buckets[0].upper, value);
    }
  }
}

TEST(HistogramTest, QuantilesOfDistributionsAreWithinTheBound) {
  Random random(7);
  std::vector<int64_t> uniform, exponential, heavy, two;
  for (int i = 0; i < 200'000; ++i) {
    uniform.push_back(static_cast<int64_t>(random.Uniform() * 1e9));
    exponential.push_back(static_cast<int64_t>(random.Exponential() * 3e6));
    heavy.push_back(static_cast<int64_t>(1e5 * std::pow(1 - random.Uniform(), -1.5)));
    two.push_back(random.Uniform() < 0.98 ? 1'000'000 + i % 100 : 2'000'000'000 + i);
  }
  ExpectWithinBound(uniform);
  ExpectWithinBound(exponential);
  ExpectWithinBound(heavy);
  ExpectWithinBound(two);
  ExpectWithinBound({5});
  ExpectWithinBound(std::vector<int64_t>(1000, 123'456'789));
}

TEST(HistogramTest, MergedIsAsRecordedTogether) {
  Random random(3);
  Histogram one, two, both;
  for (int i = 0; i < 1000; ++i) {
    const auto value = static_cast<int64_t>(random.Exponential() * 1e6);
    (i % 3 == 0 ? one : two).Record(value);
    both.Record(value);
  }
  one.Merge(two);
  one.Merge(Histogram());
  for (const double quantile : kQuantiles) {
    EXPECT_EQ(one.ValueAt(quantile), both.ValueAt(quantile));
  }
  EXPECT_EQ(one.count(), both.count());
  EXPECT_NEAR(one.Mean(), both.Mean(), 1e-6);
}

TEST(HistogramTest, NegativeCountsAsZero) {
  Histogram histogram;
  histogram.Record(-5);
  EXPECT_EQ(histogram.max(), 0);
  EXPECT_EQ(histogram.CountUpTo(0), 1);
  EXPECT_EQ(histogram.CountUpTo(-1), 0);
}

}  // namespace
}  // namespace attn::load
