// cp.async: 16-byte copies from global to shared memory that bypass registers.
// Source: PTX ISA 8.5, "Data Movement and Conversion Instructions: cp.async" and
// "cp.async.wait_group".
#ifndef ATTN_KERNELS_CUDA_PTX_ASYNC_COPY_CUH_
#define ATTN_KERNELS_CUDA_PTX_ASYNC_COPY_CUH_

#include <cstdint>

namespace attn::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes where !valid (`source` is then not read).
__device__ __forceinline__ void CopyAsync16(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending committed groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace attn::ptx

#endif  // ATTN_KERNELS_CUDA_PTX_ASYNC_COPY_CUH_
