#include "kernels/api/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/api/text.h"

namespace attn {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

absl::Status CheckParts(std::span<const PartialResult> parts, int64_t rows, int64_t head_dim_v) {
  if (parts.empty()) return absl::InvalidArgumentError("parts has 0 entries; at least 1 is needed");
  if (rows < 0) return absl::InvalidArgumentError(Cat("rows is ", rows, "; at least 0"));
  if (head_dim_v < 0) {
    return absl::InvalidArgumentError(Cat("head_dim_v is ", head_dim_v, "; at least 0"));
  }
  for (size_t part = 0; part < parts.size(); ++part) {
    for (int64_t row = 0; row < rows; ++row) {
      const float lse = parts[part].lse[row];
      if (std::isnan(lse) || lse == std::numeric_limits<float>::infinity()) {
        return absl::InvalidArgumentError(
            Cat("lse of part ", part, ", row ", row, " is ", lse, "; it must be finite or -inf"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status MergePartials(std::span<const PartialResult> parts, int64_t rows, int64_t head_dim_v,
                           float* out, float* lse) {
  // Everything is checked before anything is written: the output may be one of the parts.
  if (absl::Status status = CheckParts(parts, rows, head_dim_v); !status.ok()) return status;
  std::vector<double> weights(parts.size());
  for (int64_t row = 0; row < rows; ++row) {
    float max_lse = kNegInf;
    for (const PartialResult& part : parts) max_lse = std::max(max_lse, part.lse[row]);
    float* out_row = out + row * head_dim_v;
    if (max_lse == kNegInf) {
      std::fill_n(out_row, head_dim_v, 0.0f);
      lse[row] = kNegInf;
      continue;
    }
    double sum = 0.0;
    for (size_t part = 0; part < parts.size(); ++part) {
      weights[part] = std::exp(static_cast<double>(parts[part].lse[row]) - max_lse);
      sum += weights[part];
    }
    lse[row] = static_cast<float>(max_lse + std::log(sum));
    for (int64_t d = 0; d < head_dim_v; ++d) {
      double value = 0.0;
      for (size_t part = 0; part < parts.size(); ++part) {
        // A part that saw no key may hold anything in its out row.
        if (weights[part] == 0.0) continue;
        value += weights[part] * parts[part].out[row * head_dim_v + d];
      }
      out_row[d] = static_cast<float>(value / sum);
    }
  }
  return absl::OkStatus();
}

}  // namespace attn
