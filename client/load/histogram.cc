#include "client/load/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace attn::load {

int64_t Histogram::IndexOf(int64_t value) {
  constexpr int64_t kLinear = int64_t{1} << kSubBits;
  if (value < kLinear) return value;
  const int octave = std::bit_width(static_cast<uint64_t>(value)) - 1;  // 2^octave <= value
  const int shift = octave - kSubBits;
  // value >> shift is in [kLinear, 2 * kLinear).
  return kLinear * shift + (value >> shift);
}

Histogram::Bucket Histogram::Bounds(int64_t index) {
  constexpr int64_t kLinear = int64_t{1} << kSubBits;
  if (index < kLinear) return {index, index, 0};
  const int64_t shift = index / kLinear - 1;
  const int64_t lower = (index - kLinear * shift) << shift;
  return {lower, lower + ((int64_t{1} << shift) - 1), 0};
}

void Histogram::Record(int64_t value) {
  value = std::max<int64_t>(value, 0);
  const size_t index = static_cast<size_t>(IndexOf(value));
  if (index >= counts_.size()) counts_.resize(index + 1);
  ++counts_[index];
  min_ = count_ == 0 ? value : std::min(min_, value);
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
  ++count_;
}

void Histogram::Merge(const Histogram& other) {
  if (other.count_ == 0) return;
  if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
  count_ += other.count_;
}

int64_t Histogram::ValueAt(double quantile) const {
  if (count_ == 0) return 0;
  const auto wanted = static_cast<int64_t>(std::ceil(quantile * static_cast<double>(count_)));
  const int64_t rank = std::clamp<int64_t>(wanted, 1, count_);
  if (rank == count_) return max_;
  int64_t seen = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen < rank) continue;
    const Bucket bucket = Bounds(static_cast<int64_t>(i));
    return std::clamp(bucket.lower + (bucket.upper - bucket.lower) / 2, min_, max_);
  }
  return max_;
}

int64_t Histogram::CountUpTo(int64_t value) const {
  if (value < 0) return 0;
  const size_t end = std::min(counts_.size(), static_cast<size_t>(IndexOf(value)) + 1);
  int64_t seen = 0;
  for (size_t i = 0; i < end; ++i) seen += counts_[i];
  return seen;
}

std::vector<Histogram::Bucket> Histogram::Buckets() const {
  std::vector<Bucket> buckets;
  for (size_t i = 0; i < counts_.size(); ++i) {
    if (counts_[i] == 0) continue;
    buckets.push_back(Bounds(static_cast<int64_t>(i)));
    buckets.back().count = counts_[i];
  }
  return buckets;
}

}  // namespace attn::load
