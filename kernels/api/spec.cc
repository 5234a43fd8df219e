#include "kernels/api/spec.h"

namespace attn {
namespace {

// a * b, or -1 where the product does not fit below kMaxElements. Both at least 0.
int64_t LimitedProduct(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product >= kMaxElements) return -1;
  return product;
}

bool HasNegative(const std::vector<int64_t>& values) {
  for (int64_t value : values) {
    if (value < 0) return true;
  }
  return false;
}

bool HasZero(const std::vector<int64_t>& values) {
  for (int64_t value : values) {
    if (value == 0) return true;
  }
  return false;
}

}  // namespace

std::string_view Name(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

int64_t TensorSpec::NumElements() const {
  if (HasNegative(shape)) return -1;
  if (HasZero(shape)) return 0;  // before multiplying: the other extents may be of any size
  int64_t elements = 1;
  for (int64_t extent : shape) {
    elements = LimitedProduct(elements, extent);
    if (elements < 0) return -1;
  }
  return elements;
}

int64_t TensorSpec::SpanElements() const {
  const int64_t elements = NumElements();
  if (elements <= 0 || strides.empty()) return elements;
  if (strides.size() != shape.size() || HasNegative(strides)) return -1;
  int64_t last = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const int64_t distance = LimitedProduct(shape[axis] - 1, strides[axis]);
    if (distance < 0) return -1;
    last += distance;  // both below 2^62
    if (last >= kMaxElements - 1) return -1;
  }
  return last + 1;
}

}  // namespace attn
