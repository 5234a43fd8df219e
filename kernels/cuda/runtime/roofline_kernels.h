// Kernels that do nothing but load the device. Private to MeasureRoofline().
#ifndef ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_KERNELS_H_
#define ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attn::cuda {

inline constexpr int kRooflineThreads = 256;  // per block
inline constexpr int kRooflineChains = 8;     // independent products per warp and round

// Fills `words` pairs of bf16 with random values: products of zeros take less power than real ones,
// and run faster.
void LaunchRandom(void* data, int64_t words, cudaStream_t stream);

// Reads `words` of 16 bytes, rounded down to a multiple of 4 · blocks · kRooflineThreads.
void LaunchRead(const void* data, int64_t words, int blocks, void* sink, cudaStream_t stream);

// Each warp multiplies kRooflineChains pairs of bf16 tiles, m16n8k16, in each round, with fp32
// sums.
void LaunchMatrix(int rounds, int blocks, void* sink, cudaStream_t stream);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_ROOFLINE_KERNELS_H_
