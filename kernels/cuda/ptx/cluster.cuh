// Barriers of a cluster of thread blocks. Source: PTX ISA 8.5, "barrier.cluster".
#ifndef ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_
#define ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_

namespace attn::ptx {

// Every thread of the cluster arrives, and then waits until all have; in turns. Orders no memory.
// Before 9.0 there are no clusters, and nothing happens.
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

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_CLUSTER_CUH_
