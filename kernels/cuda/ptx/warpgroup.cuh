// What four warps do together: registers moved between warpgroups, and named barriers.
// Source: PTX ISA 8.5, "setmaxnreg", "bar{.cta}".
#ifndef ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_
#define ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_

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

// Barrier `id` (1 … 15; 0 is __syncthreads) of `threads` threads, whole warps. NamedArrive counts
// this warp's threads and goes on.
__device__ __forceinline__ void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_WARPGROUP_CUH_
