#include "client/cli/random_tensor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "client/cli/tensor_file.h"
#include "kernels/api/dtype.h"
#include "kernels/api/philox.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

// Four independent Gaussian values.
std::array<float, 4> Gaussians(const std::array<uint32_t, 4>& words) {
  std::array<float, 4> values;
  for (int pair = 0; pair < 2; ++pair) {
    // (0, 1): the half keeps the logarithm finite.
    const float u = (static_cast<float>(words[2 * pair] >> 8) + 0.5f) * 0x1p-24f;
    const float angle =
        static_cast<float>(words[2 * pair + 1] >> 8) * (2 * std::numbers::pi_v<float> * 0x1p-24f);
    const float radius = std::sqrt(-2.0f * std::log(u));
    values[2 * pair] = radius * std::cos(angle);
    values[2 * pair + 1] = radius * std::sin(angle);
  }
  return values;
}

void Store(std::byte* bytes, v1::DType dtype, int64_t index, float value) {
  if (dtype == v1::DTYPE_FP32) {
    std::memcpy(bytes + index * 4, &value, 4);
  } else {
    const uint16_t bits = dtype == v1::DTYPE_BF16 ? FloatToBf16(value) : FloatToFp16(value);
    std::memcpy(bytes + index * 2, &bits, 2);
  }
}

}  // namespace

absl::StatusOr<client::HostTensor> RandomTensor(v1::DType dtype, std::vector<int64_t> shape,
                                                uint64_t seed, RandomStream stream) {
  absl::StatusOr<int64_t> size = CheckedByteSize(shape, client::SizeOf(dtype));
  if (!size.ok()) return size.status();
  client::HostTensor tensor = client::HostTensor::Allocate(dtype, std::move(shape));
  std::byte* bytes = tensor.mutable_bytes().data();
  const int64_t count = *size / client::SizeOf(dtype);
  for (int64_t first = 0; first < count; first += 4) {
    const uint64_t block = static_cast<uint64_t>(first) / 4;
    const std::array<uint32_t, 4> words =
        Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                    static_cast<uint32_t>(stream), 0},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const int64_t lanes = std::min<int64_t>(4, count - first);
    if (dtype == v1::DTYPE_UINT8) {
      for (int64_t i = 0; i < lanes; ++i) bytes[first + i] = std::byte(words[i] >> 31);
    } else {
      const std::array<float, 4> values = Gaussians(words);
      for (int64_t i = 0; i < lanes; ++i) Store(bytes, dtype, first + i, values[i]);
    }
  }
  return tensor;
}

}  // namespace attn::cli
