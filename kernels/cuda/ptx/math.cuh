// Fast math and reductions to global memory.
#ifndef ATTN_KERNELS_CUDA_PTX_MATH_CUH_
#define ATTN_KERNELS_CUDA_PTX_MATH_CUH_

namespace attn::ptx {

// 2^x, relative error 2^-22.5; 0 for -infinity; subnormal results flushed to 0. Source: PTX
// ISA 8.5, ex2.approx.ftz.f32.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Adds four neighbours to global memory; `p` is 16-byte aligned. Source: PTX ISA 8.5,
// red.global.add.v4.f32 (sm_90).
__device__ __forceinline__ void ReduceAdd4(float* p, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(p), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#else
  atomicAdd(p, a);
  atomicAdd(p + 1, b);
  atomicAdd(p + 2, c);
  atomicAdd(p + 3, d);
#endif
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_MATH_CUH_
