// Elements of FP32, FP16 and BF16 buffers on the device.
#ifndef ATTN_KERNELS_CUDA_STANDARD_ELEMENT_CUH_
#define ATTN_KERNELS_CUDA_STANDARD_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/api/dtype.h"

namespace attn::cuda::standard {

__device__ __forceinline__ const void* ElementAt(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * (dtype == DType::kFp32 ? 4 : 2);
}

__device__ __forceinline__ float LoadFloat(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFp16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

__device__ __forceinline__ void StoreFloat(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFp16:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
      break;
    case DType::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
      break;
  }
}

// To nearest, as Store8().
template <class T>
__device__ __forceinline__ T FromFloat(float x) {
  return T(x);
}
__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Eight neighbours, 32-byte aligned in fp32 and 16-byte aligned in 16 bits.
__device__ __forceinline__ void Load8(const float* from, float (&x)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// The next eight elements of a row of which `left` are left; zeros beyond. `index` is a multiple of
// 16 bytes.
__device__ __forceinline__ void LoadRow8(const void* data, DType dtype, int64_t index, int left,
                                         float (&x)[8]) {
  if (left < 8) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = n < left ? LoadFloat(data, dtype, index + n) : 0.0f;
  } else if (dtype == DType::kFp32) {
    Load8(static_cast<const float*>(data) + index, x);
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + index);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair =
          dtype == DType::kFp16
              ? __half22float2(*reinterpret_cast<const __half2*>(&words[n]))
              : __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[n]));
      x[2 * n] = pair.x;
      x[2 * n + 1] = pair.y;
    }
  }
}

__device__ __forceinline__ void Store8(float* to, const float (&x)[8]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void Store8(__half* to, const float (&x)[8]) {
  __half2 h[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) h[n] = __floats2half2_rn(x[2 * n], x[2 * n + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(h);
}

__device__ __forceinline__ void Store8(__nv_bfloat16* to, const float (&x)[8]) {
  __nv_bfloat162 h[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) h[n] = __floats2bfloat162_rn(x[2 * n], x[2 * n + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(h);
}

// `index` is a multiple of 16 bytes.
__device__ __forceinline__ void StoreRow8(void* data, DType dtype, int64_t index,
                                          const float (&x)[8]) {
  switch (dtype) {
    case DType::kFp16:
      Store8(static_cast<__half*>(data) + index, x);
      break;
    case DType::kBf16:
      Store8(static_cast<__nv_bfloat16*>(data) + index, x);
      break;
    default:
      Store8(static_cast<float*>(data) + index, x);
      break;
  }
}

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_ELEMENT_CUH_
