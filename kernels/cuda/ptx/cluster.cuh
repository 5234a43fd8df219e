// Clusters of thread blocks: barriers, and addresses of each other's shared memory.
// Source: PTX ISA 8.5, "barrier.cluster", "mapa", "st.async", "Special Registers:
// %cluster_ctarank".
#ifndef ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_
#define ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_

#include <cstdint>

namespace attn::ptx {

// Every thread of the cluster arrives, and then waits until all have; in turns. What they did to
// memory before they arrived is done then, unless Relaxed. Before 9.0 there are no clusters, and
// nothing happens.
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}

// This block's place in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// Where in the cluster's shared memory block `rank` has what this one has at `address`.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Writes 4 bytes to a block's shared memory and counts them on a barrier there; both addresses are
// ClusterAddress()es of that block.
__device__ __forceinline__ void StoreCluster4(uint32_t to, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_
