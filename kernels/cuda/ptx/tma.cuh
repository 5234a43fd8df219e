// The tensor memory accelerator: copies of boxes of a tensor that a map describes.
// Source: PTX ISA 8.5, "cp.async.bulk.tensor", "prefetch{u}", "Tensor-map"; the map is made by
// cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management").
#ifndef ATTN_KERNELS_CUDA_PTX_TMA_CUH_
#define ATTN_KERNELS_CUDA_PTX_TMA_CUH_

#include <cuda.h>

#include <cstdint>

namespace attn::ptx {

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Copies the box at (c0, c1, c2, c3), innermost first, to shared memory and counts its bytes on
// `barrier`. What of it lies outside the tensor becomes zeros, which count too.
__device__ __forceinline__ void CopyBox4(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same to every block of the cluster whose bit is set in `blocks`: to the same address in each,
// counted on the barrier that is at the same address there.
__device__ __forceinline__ void MulticastBox4(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                              int c0, int c1, int c2, int c3, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "h"(blocks)
      : "memory");
}

// Copies from shared memory to the box at (c0, c1, c2, c3); what of it lies outside the tensor is
// not written. Joins the thread's open group of copies.
__device__ __forceinline__ void StoreBox4(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                          int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(
          reinterpret_cast<uint64_t>(map)),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Adds what is in shared memory to the box at (c0, c1, c2, c3), in the type of the map, element by
// element; in no order. What lies outside the tensor stays as it is. Joins the thread's open group
// of copies. Source: "cp.reduce.async.bulk.tensor".
__device__ __forceinline__ void ReduceAddBox4(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                              int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Adds `bytes` of fp32 in shared memory to global memory, element by element; in no order. Both
// addresses and `bytes` are multiples of 16. Joins the thread's open group of copies. Source:
// "cp.reduce.async.bulk".
__device__ __forceinline__ void ReduceAddFp32(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Ends the thread's group of copies. Source: "cp.async.bulk.commit_group".
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until all but the latest kLatest groups of the thread's copies have read shared memory.
// Source: "cp.async.bulk.wait_group".
template <int kLatest>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kLatest) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before what the tensor cores and the copy
// engine do to it after the next barrier. Source: "Async proxy", "fence.proxy".
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_TMA_CUH_
