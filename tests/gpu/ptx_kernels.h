// Kernels of one instruction each, for ptx_test.cc. They need compute capability 9.0.
#ifndef ATTN_TESTS_GPU_PTX_KERNELS_H_
#define ATTN_TESTS_GPU_PTX_KERNELS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace attn::cuda {

inline constexpr int kReduceElements = 512;  // of LaunchReduceAddFp32
inline constexpr int kReduceRows = 16;       // tokens of LaunchReduceAddBox's box

// Every block adds (block + 1) * (i % 7) to to[i], i < kReduceElements.
cudaError_t LaunchReduceAddFp32(float* to, int blocks);
// Every block adds 1 + row to each element of the box at (c0, head, token, batch): kReduceRows rows
// of 64 BF16.
cudaError_t LaunchReduceAddBox(const CUtensorMap& map, int c0, int head, int token, int batch,
                               int blocks);

}  // namespace attn::cuda

#endif  // ATTN_TESTS_GPU_PTX_KERNELS_H_
