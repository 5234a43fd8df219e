// Programmatic dependent launch: a kernel may start before its predecessor in the stream has ended,
// and waits for it where it needs its results. Before 9.0 the stream's order alone holds. Source:
// PTX ISA 8.5, "griddepcontrol".
#ifndef ATTN_KERNELS_CUDA_PTX_GRID_CUH_
#define ATTN_KERNELS_CUDA_PTX_GRID_CUH_

namespace attn::ptx {

// Lets the next kernel of the stream start once every block of this grid has said so or ended.
__device__ __forceinline__ void AllowDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the grids that this one depends on have ended and their writes are visible.
__device__ __forceinline__ void AwaitPredecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_GRID_CUH_
