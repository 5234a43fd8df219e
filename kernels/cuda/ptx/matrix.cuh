// ldmatrix, stmatrix and mma.sync for 16-bit elements, and the packing of fp32 pairs.
// Source: PTX ISA 8.5, "Warp Level Matrix Multiply-Accumulate Instructions": ldmatrix; stmatrix;
// mma.m16n8k16.
//
// Fragment layout of m16n8k16, lane = threadIdx.x % 32 (same section, figures for .f16/.bf16):
//   C (float[4]): rows lane/4 (c0, c1) and lane/4 + 8 (c2, c3); columns 2 * (lane % 4) + {0, 1}.
//   A (uint32[4]): a0 rows 0-7 k 0-7, a1 rows 8-15 k 0-7, a2 rows 0-7 k 8-15, a3 rows 8-15 k 8-15.
//   B (uint32[2]): b0 k 0-7, b1 k 8-15; column lane/4.
#ifndef ATTN_KERNELS_CUDA_PTX_MATRIX_CUH_
#define ATTN_KERNELS_CUDA_PTX_MATRIX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attn::ptx {

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four 8x8 matrices, each as a register pair-wise holds it in C of mma; addresses as above.
__device__ __forceinline__ void StoreMatrix4(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreShared16(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(r) : "r"(address) : "memory");
  return r;
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// Transposes a 4 x 4 matrix of which each lane of a quad has a row: r[t] of lane q becomes r[q] of
// lane t.
__device__ __forceinline__ void TransposeInQuad(uint32_t (&r)[4], int quad) {
  // Exchange with the lane two away: halves of rows.
  const bool upper = (quad & 2) != 0, odd = (quad & 1) != 0;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? r[t] : r[t + 2], 2);
    if (upper) {
      r[t] = other;
    } else {
      r[t + 2] = other;
    }
  }
#pragma unroll
  for (int t = 0; t < 4; t += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? r[t] : r[t + 1], 1);
    if (odd) {
      r[t] = other;
    } else {
      r[t + 1] = other;
    }
  }
}

// What differs between the 16-bit element types. c += a b, fp32 accumulation.
template <class T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  static __device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t x) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x));
  }
};

template <>
struct Element<__half> {
  static __device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t x) {
    return __half22float2(*reinterpret_cast<__half2*>(&x));
  }
};

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_MATRIX_CUH_
