// Element types of tensors, and exact scalar conversions between them.
#ifndef ATTN_KERNELS_API_DTYPE_H_
#define ATTN_KERNELS_API_DTYPE_H_

#include <cstdint>
#include <string_view>

namespace attn {

enum class DType : uint8_t { kFp32, kFp16, kBf16, kUint8 };

// "FP32", "FP16", "BF16", "UINT8".
std::string_view Name(DType dtype);
// "fp32", … : as kernel ids and metric labels spell it.
std::string_view LowerName(DType dtype);

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return 4;
    case DType::kFp16:
    case DType::kBf16:
      return 2;
    case DType::kUint8:
      return 1;
  }
  return 0;
}

// Widening is exact. Narrowing rounds to nearest, ties to even; overflow gives infinity; NaN stays
// NaN; subnormals are kept.
float Fp16ToFloat(uint16_t bits);
float Bf16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float value);
uint16_t FloatToBf16(float value);

// Element `index` of a buffer of FP32, FP16 or BF16. For references and tests; kernels use SIMD.
float LoadElement(const void* data, DType dtype, int64_t index);
void StoreElement(void* data, DType dtype, int64_t index, float value);

}  // namespace attn

#endif  // ATTN_KERNELS_API_DTYPE_H_
