// Permuting bytes. Source: PTX ISA 8.5, "prmt".
#ifndef ATTN_KERNELS_CUDA_PTX_BITS_CUH_
#define ATTN_KERNELS_CUDA_PTX_BITS_CUH_

#include <cstdint>

namespace attn::ptx {

// Byte n of the result is byte (selector >> 4 n) & 7 of b:a.
__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Byte n of the result is 0xFF where the top bit of byte (selector >> 4 n) & 3 of x is set, else 0.
// Nibbles of `selector` are 8 + that number.
__device__ __forceinline__ uint32_t SpreadSigns(uint32_t x, uint32_t selector) {
  return Permute(x, 0, selector);
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_BITS_CUH_
