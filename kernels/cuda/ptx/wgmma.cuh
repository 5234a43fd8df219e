// wgmma: products of a warpgroup, C[64, N] += A[64, 16] B[16, N], asynchronous, fp32 accumulators
// in registers, 16-bit elements. Source: PTX ISA 8.5, "Asynchronous Warpgroup Level Matrix
// Instructions": wgmma.mma_async (shapes .m64nNk16, register fragments figures for .k16, matrix
// descriptor), wgmma.fence, wgmma.commit_group, wgmma.wait_group.
//
// Fragments, warp w of four, lane l: C[n][4] for columns 8 n …: as mma.m16n8k16's C for rows 16 w
// …; A in registers as its A.
#ifndef ATTN_KERNELS_CUDA_PTX_WGMMA_CUH_
#define ATTN_KERNELS_CUDA_PTX_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attn::ptx {

// Before the first product after registers that it reads or writes were written otherwise.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
// Ends a group of products.
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most kPending groups of this warpgroup are in flight. Registers of those that are
// done must pass through Settle() before they are read or written.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of registers across the wait above it.
template <int kCount>
__device__ __forceinline__ void Settle(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
  }
}
template <int kCount>
__device__ __forceinline__ void Settle(uint32_t (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
  }
}

// Descriptor of a matrix in shared memory whose rows are 128 bytes with the 128-byte swizzle, in
// panels of 64 elements; `address` is a multiple of 16, panels of 1024. Eight rows are 1024 bytes.
// panel_bytes: from one panel to the next along N; only where rows run along K (kRowsAlongK).
// Source: "Shared Memory Matrix Layout", "Matrix Descriptor Format".
__device__ __forceinline__ uint64_t WgmmaDescriptor(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{panel_bytes / 16} << 16 | (address & 0x3FFFF) / 16;
}

// kN: of wgmma's shapes. Ss: A and B in shared memory, both with rows of K. Rs: A in registers, B
// with rows of N. accumulate: false starts from zero.
template <class T, int kN>
struct Wgmma;

// Register lists of the instructions below, 16 at a time.
#define ATTN_R0                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_R1                              \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_R2                              \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_R3                              \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_R4                              \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define ATTN_R5                              \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define ATTN_R6                                  \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define ATTN_R7                                      \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define ATTN_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_C16(n) ATTN_C4(n), ATTN_C4(n + 1), ATTN_C4(n + 2), ATTN_C4(n + 3)

// N, the element type and its name, the list of registers, the operands after them: %D0 …, and the
// accumulators.
#define ATTN_WGMMA(N, T, NAME, LIST, D0, D1, D2, D3, D4, D5, ...)                            \
  template <>                                                                                \
  struct Wgmma<T, N> {                                                                       \
    static __device__ __forceinline__ void Ss(float (&c)[N / 8][4], uint64_t a, uint64_t b,  \
                                              bool accumulate) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " D2                                    \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST \
                   "}, " D0 ", " D1 ", p, 1, 1, 0, 0;\n}\n"                                  \
                   : __VA_ARGS__                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                     \
    }                                                                                        \
    static __device__ __forceinline__ void Rs(float (&c)[N / 8][4], const uint32_t (&a)[4],  \
                                              uint64_t b, bool accumulate) {                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " D5                                    \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST \
                   "}, {" D0 ", " D1 ", " D2 ", " D3 "}, " D4 ", p, 1, 1, 1;\n}\n"           \
                   : __VA_ARGS__                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                     \
                     "r"(static_cast<int>(accumulate)));                                     \
    }                                                                                        \
  }
#define ATTN_WGMMA_64(T, NAME)                                                            \
  ATTN_WGMMA(64, T, NAME, ATTN_R0 ", " ATTN_R1, "%32", "%33", "%34", "%35", "%36", "%37", \
             ATTN_C16(0), ATTN_C16(4))
#define ATTN_WGMMA_96(T, NAME)                                                                  \
  ATTN_WGMMA(96, T, NAME, ATTN_R0 ", " ATTN_R1 ", " ATTN_R2, "%48", "%49", "%50", "%51", "%52", \
             "%53", ATTN_C16(0), ATTN_C16(4), ATTN_C16(8))
#define ATTN_WGMMA_128(T, NAME)                                                                 \
  ATTN_WGMMA(128, T, NAME, ATTN_R0 ", " ATTN_R1 ", " ATTN_R2 ", " ATTN_R3, "%64", "%65", "%66", \
             "%67", "%68", "%69", ATTN_C16(0), ATTN_C16(4), ATTN_C16(8), ATTN_C16(12))
#define ATTN_WGMMA_192(T, NAME)                                                               \
  ATTN_WGMMA(192, T, NAME,                                                                    \
             ATTN_R0 ", " ATTN_R1 ", " ATTN_R2 ", " ATTN_R3 ", " ATTN_R4 ", " ATTN_R5, "%96", \
             "%97", "%98", "%99", "%100", "%101", ATTN_C16(0), ATTN_C16(4), ATTN_C16(8),      \
             ATTN_C16(12), ATTN_C16(16), ATTN_C16(20))
#define ATTN_WGMMA_256(T, NAME)                                                                    \
  ATTN_WGMMA(256, T, NAME,                                                                         \
             ATTN_R0 ", " ATTN_R1 ", " ATTN_R2 ", " ATTN_R3 ", " ATTN_R4 ", " ATTN_R5 ", " ATTN_R6 \
                     ", " ATTN_R7,                                                                 \
             "%128", "%129", "%130", "%131", "%132", "%133", ATTN_C16(0), ATTN_C16(4),             \
             ATTN_C16(8), ATTN_C16(12), ATTN_C16(16), ATTN_C16(20), ATTN_C16(24), ATTN_C16(28))
ATTN_WGMMA_64(__nv_bfloat16, "bf16");
ATTN_WGMMA_64(__half, "f16");
ATTN_WGMMA_96(__nv_bfloat16, "bf16");
ATTN_WGMMA_96(__half, "f16");
ATTN_WGMMA_128(__nv_bfloat16, "bf16");
ATTN_WGMMA_128(__half, "f16");
ATTN_WGMMA_192(__nv_bfloat16, "bf16");
ATTN_WGMMA_192(__half, "f16");
ATTN_WGMMA_256(__nv_bfloat16, "bf16");
ATTN_WGMMA_256(__half, "f16");
#undef ATTN_WGMMA_64
#undef ATTN_WGMMA_96
#undef ATTN_WGMMA_128
#undef ATTN_WGMMA_192
#undef ATTN_WGMMA_256
#undef ATTN_WGMMA
#undef ATTN_C16
#undef ATTN_C4
#undef ATTN_R0
#undef ATTN_R1
#undef ATTN_R2
#undef ATTN_R3
#undef ATTN_R4
#undef ATTN_R5
#undef ATTN_R6
#undef ATTN_R7

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_WGMMA_CUH_
