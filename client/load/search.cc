#include "client/load/search.h"

namespace attn::load {

std::optional<double> RateSearch::Next() const {
  if (left_ <= 0) return std::nullopt;
  if (passed_ && failed_ && *failed_ - *passed_ <= precision_ * *passed_) return std::nullopt;
  return next_;
}

void RateSearch::Tell(bool passed) {
  --left_;
  (passed ? passed_ : failed_) = next_;
  if (passed_ && failed_) {
    next_ = (*passed_ + *failed_) / 2;
  } else {
    next_ = passed ? next_ * 2 : next_ / 2;
  }
}

}  // namespace attn::load
