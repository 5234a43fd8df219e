// A log-linear histogram of non-negative 64-bit values: any value can be recorded, and every
// quantile is known to within kMaxRelativeError.
//
// Layout (the idea of HdrHistogram, hdrhistogram.org): values below 2^8 have a bucket each. Above,
// each octave [2^e, 2^(e+1)) is cut into 2^8 buckets of equal width 2^(e-8). A quantile is answered
// with the middle of its bucket, which is off by at most half a width: 2^(e-9), at most 2^-9 (0.2%)
// of any value of that octave. Minimum, maximum, count and mean are exact (the mean up to the
// rounding of a double sum).
#ifndef ATTN_CLIENT_LOAD_HISTOGRAM_H_
#define ATTN_CLIENT_LOAD_HISTOGRAM_H_

#include <cstdint>
#include <vector>

namespace attn::load {

// Not thread-safe.
class Histogram {
 public:
  // Bound of |ValueAt(q) - v| / v, where v is the value itself that stands at quantile q.
  static constexpr double kMaxRelativeError = 1.0 / 512;

  // Negative values count as 0.
  void Record(int64_t value);
  void Merge(const Histogram& other);

  int64_t count() const { return count_; }
  bool empty() const { return count_ == 0; }
  int64_t min() const { return count_ == 0 ? 0 : min_; }
  int64_t max() const { return max_; }
  double Mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }

  // The smallest recorded value that at least ceil(quantile * count) values (and at least one) do
  // not exceed, within kMaxRelativeError. `quantile` is in [0, 1]; 1 gives the exact maximum. 0
  // where nothing is recorded.
  int64_t ValueAt(double quantile) const;

  // How many recorded values are in buckets that lie wholly at or below `value`'s bucket.
  int64_t CountUpTo(int64_t value) const;

  // A bucket that holds something: lower <= value <= upper.
  struct Bucket {
    int64_t lower = 0, upper = 0, count = 0;
  };
  std::vector<Bucket> Buckets() const;

 private:
  static constexpr int kSubBits = 8;
  static int64_t IndexOf(int64_t value);
  static Bucket Bounds(int64_t index);

  std::vector<int64_t> counts_;  // as long as the largest value needs
  int64_t count_ = 0;
  int64_t min_ = 0, max_ = 0;
  double sum_ = 0;
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_HISTOGRAM_H_
