// The parts of Validate(). Private to kernels/api.
#ifndef ATTN_KERNELS_API_VALIDATE_INTERNAL_H_
#define ATTN_KERNELS_API_VALIDATE_INTERNAL_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/problem.h"
#include "kernels/api/spec.h"
#include "kernels/api/text.h"

namespace attn::internal {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(Cat(parts...));
}

bool IsFloatType(DType dtype);
std::string ShapeText(const std::vector<int64_t>& shape);  // "[2, 5, 4, 64]"

// Extents at least 0, elements and span below kMaxElements, strides one per axis, at least 0, the
// last 1. `field` is the name used in messages.
absl::Status CheckTensor(std::string_view field, const TensorSpec& tensor);

// CheckTensor(), and strides absent or those of a contiguous tensor.
absl::Status CheckContiguous(std::string_view field, const TensorSpec& tensor);

// One axis of a tensor: what it must be, and the text that says so ("num_heads").
struct AxisRule {
  std::string_view name;
  int64_t extent = 0;
  bool or_one = false;  // 1 (broadcast) is taken too
};
absl::Status CheckAxes(std::string_view field, const TensorSpec& tensor,
                       const std::vector<AxisRule>& axes);

// Everything of AttentionOptions: reads the shapes that `problem` already has, and fills in the
// rest of it.
absl::Status ValidateOptions(const AttentionSpec& spec, AttentionProblem* problem);

}  // namespace attn::internal

#endif  // ATTN_KERNELS_API_VALIDATE_INTERNAL_H_
