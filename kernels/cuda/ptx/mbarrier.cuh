// Barriers in shared memory on which threads and the copy engine arrive, and which have phases.
// Source: PTX ISA 8.5, "Parallel Synchronization and Communication Instructions: mbarrier".
#ifndef ATTN_KERNELS_CUDA_PTX_MBARRIER_CUH_
#define ATTN_KERNELS_CUDA_PTX_MBARRIER_CUH_

#include <cstdint>

namespace attn::ptx {

// A phase ends after `arrivals` arrivals and all bytes expected meanwhile. One thread does so;
// others, the copy engine included, see it after FenceBarrierInit() and a barrier of the block.
__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// One arrival; what this thread did before is visible to those who wait for the phase.
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// The same of those threads that `arrives`; without a branch, after which the compiler might no
// longer know that the threads of a warp go the same way.
__device__ __forceinline__ void BarrierArriveIf(uint32_t barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.b32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(arrives))
      : "memory");
}

// The same for a barrier of any block of the cluster, by its ClusterAddress().
__device__ __forceinline__ void ClusterBarrierArriveIf(uint32_t barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.b32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(arrives))
      : "memory");
}

// One arrival; the phase also waits for `bytes` of the copy engine.
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has ended: 0 for the first, 1 for the second, … Parity 1 of
// a barrier in its first phase has ended.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra out;\n"
      "bra again;\n"
      "out:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_MBARRIER_CUH_
