#include "tests/reference/compare.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace attn::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Where rounding to nearest starts to give infinity: half a step above the largest finite value.
double OverflowThreshold(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return 65520.0;
    case DType::kBf16:
      return std::ldexp(2.0 - std::ldexp(1.0, -8), 127);
    default:
      return std::ldexp(2.0 - std::ldexp(1.0, -24), 127);
  }
}

double Ratio(double got, double want, double bound, double overflow) {
  if (got == want) return 0.0;
  if (std::isnan(got) || std::isinf(want)) return kInfinity;
  if (std::isinf(got)) {
    const bool same_sign = std::signbit(got) == std::signbit(want);
    return same_sign && std::abs(want) + bound >= overflow ? 0.0 : kInfinity;
  }
  return bound > 0.0 ? std::abs(got - want) / bound : kInfinity;
}

}  // namespace

std::string Verdict::ToString() const {
  return absl::StrCat("index ", index, ": got ", got, ", want ", want, ", bound ", bound,
                      ", ratio ", ratio);
}

Verdict Compare(const Tensor& want, const void* got, DType dtype) {
  const double overflow = OverflowThreshold(dtype);
  Verdict worst;
  const int64_t n = static_cast<int64_t>(want.value.size());
  for (int64_t i = 0; i < n; ++i) {
    const double value = LoadElement(got, dtype, i);
    const double ratio = Ratio(value, want.value[i], want.bound[i], overflow);
    if (worst.index < 0 || ratio > worst.ratio) {
      worst = {ratio, i, value, want.value[i], want.bound[i]};
    }
  }
  return worst;
}

}  // namespace attn::reference
