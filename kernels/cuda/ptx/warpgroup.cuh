// What warps do together: registers moved between warpgroups, named barriers, one lane elected.
// Source: PTX ISA 8.5, "setmaxnreg", "bar{.cta}".
#ifndef ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_
#define ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_

#include <cstdint>

namespace attn::ptx {

// Registers of each thread from here on, a multiple of 8 from 24 to 256; waits until they are free.
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Barrier `id` (0 … 15; 0 is that of __syncthreads, too) of `threads` threads, whole warps.
// NamedArrive counts this warp's threads and goes on.
__device__ __forceinline__ void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Whether this lane is the one of its warp that is to act for all: always the same. *lane: which.
// The compiler knows that it is one: it puts no loop over lanes around copies and atomics that need
// one. Source: PTX ISA 8.5, "elect.sync".
__device__ __forceinline__ bool ElectOne(uint32_t* lane) {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync %1|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected), "=r"(*lane));
  return elected != 0;
}
__device__ __forceinline__ bool ElectOne() {
  uint32_t lane;
  return ElectOne(&lane);
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_
