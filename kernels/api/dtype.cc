#include "kernels/api/dtype.h"

#include <bit>
#include <cstring>

namespace attn {
namespace {

constexpr uint32_t kFp32Inf = 0x7F800000u;

}  // namespace

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return "FP32";
    case DType::kFp16:
      return "FP16";
    case DType::kBf16:
      return "BF16";
    case DType::kUint8:
      return "UINT8";
  }
  return "UNKNOWN";
}

std::string_view LowerName(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return "fp32";
    case DType::kFp16:
      return "fp16";
    case DType::kBf16:
      return "bf16";
    case DType::kUint8:
      return "uint8";
  }
  return "unknown";
}

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | kFp32Inf | (mantissa << 13));
  if (exponent == 0) {
    // Zero or subnormal: mantissa * 2^-24, exact in float.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kFp32Inf) {
    // NaN: keep the top of the payload, and make it quiet so that it cannot become infinity.
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  }
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // >= 2^16
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the step is 2^-24. Adding 0.5 makes the float's own step 2^-24, so that its
    // rounding (nearest, ties to even) is the one wanted.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  // Normal: rebias, then round the 13 low bits away; a carry moves into the exponent, and from the
  // largest exponent into infinity, as it should.
  const uint32_t rebiased = magnitude - (112u << 23);
  const uint32_t rounded = rebiased + 0xFFFu + ((rebiased >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > kFp32Inf) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float LoadElement(const void* data, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(data) + index * SizeOf(dtype);
  if (dtype == DType::kFp32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  if (dtype == DType::kUint8) return static_cast<float>(*bytes);
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == DType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
}

void StoreElement(void* data, DType dtype, int64_t index, float value) {
  auto* bytes = static_cast<unsigned char*>(data) + index * SizeOf(dtype);
  if (dtype == DType::kFp32) {
    std::memcpy(bytes, &value, sizeof(value));
    return;
  }
  if (dtype == DType::kUint8) {
    *bytes = static_cast<unsigned char>(value);
    return;
  }
  const uint16_t bits = dtype == DType::kFp16 ? FloatToFp16(value) : FloatToBf16(value);
  std::memcpy(bytes, &bits, sizeof(bits));
}

}  // namespace attn
