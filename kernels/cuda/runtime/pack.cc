#include "kernels/cuda/runtime/pack.h"

#include <algorithm>
#include <cstring>

namespace attn::cuda {
namespace {

constexpr int64_t kTooMany = int64_t{1} << 62;

int64_t Clamped(__int128 value) {
  return value > kTooMany ? kTooMany : static_cast<int64_t>(value);
}

}  // namespace

int64_t StridedTensor::SpanBytes() const {
  if (empty()) return 0;
  const auto last = [](int64_t extent, int64_t stride) {
    return static_cast<__int128>(extent - 1) * stride;
  };
  const __int128 elements =
      last(batch, strides.batch) + last(tokens, strides.token) + last(heads, strides.head) + dim;
  return Clamped(elements * element_bytes);
}

bool StridedTensor::RowsAligned() const {
  const auto aligned = [this](int64_t extent, int64_t stride) {
    return extent <= 1 || stride * element_bytes % kRowAlignment == 0;
  };
  return empty() || (aligned(batch, strides.batch) && aligned(tokens, strides.token) &&
                     aligned(heads, strides.head));
}

StridedTensor Packed(const StridedTensor& tensor) {
  StridedTensor packed = tensor;
  const int64_t unit = kRowAlignment / tensor.element_bytes;
  packed.strides.head = (tensor.dim + unit - 1) / unit * unit;
  packed.strides.token = Clamped(static_cast<__int128>(packed.strides.head) * tensor.heads);
  // One sequence axis has no batch stride (THD says 0).
  packed.strides.batch =
      tensor.batch <= 1 ? 0 : Clamped(static_cast<__int128>(packed.strides.token) * tensor.tokens);
  return packed;
}

Strides NormalStrides(const StridedTensor& tensor) {
  const Strides packed = Packed(tensor).strides;
  Strides strides = tensor.strides;
  const auto aligned = [&tensor](int64_t stride) {
    return stride * tensor.element_bytes % kRowAlignment == 0;
  };
  if (!aligned(strides.batch)) strides.batch = packed.batch;
  if (!aligned(strides.token)) strides.token = packed.token;
  if (!aligned(strides.head)) strides.head = packed.head;
  return strides;
}

void PackOnHost(const PackJob& job) {
  const StridedTensor& from = job.from;
  const Strides to = Packed(from).strides;
  const auto* source = static_cast<const std::byte*>(job.source);
  auto* destination = static_cast<std::byte*>(job.destination);
  const int64_t row_bytes = from.dim * from.element_bytes;
  const int64_t padded_bytes = to.head * from.element_bytes;
  for (int64_t row = 0; row < from.batch * from.tokens * from.heads; ++row) {
    const int64_t head = row % from.heads;
    const int64_t token = row / from.heads % from.tokens;
    const int64_t batch = row / from.heads / from.tokens;
    const int64_t at =
        batch * from.strides.batch + token * from.strides.token + head * from.strides.head;
    std::byte* out = destination + row * padded_bytes;
    std::memcpy(out, source + at * from.element_bytes, row_bytes);
    std::memset(out + row_bytes, 0, padded_bytes - row_bytes);
  }
}

}  // namespace attn::cuda
