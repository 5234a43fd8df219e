// Launching flash_sm80's kernels. Each combination of element type and tile is compiled in a file
// of its own (instance.cu.in).
#ifndef ATTN_KERNELS_CUDA_SM80_LAUNCH_H_
#define ATTN_KERNELS_CUDA_SM80_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/api/dtype.h"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

// What the host has to know of a pair of tiles.
struct ForwardInfo {
  int queries, keys, shared_bytes, blocks_per_sm;
};
struct TileInfo {
  int head_dim, head_dim_v;  // of the tile
  ForwardInfo forward[kModes];
  // Decode; `busy`: thread blocks per multiprocessor whose loads keep memory busy.
  int decode_keys, decode_shared_bytes, decode_blocks_per_sm, decode_busy_blocks;
  int gradient_queries, gradient_shared_bytes;  // QueryGradient
};

// Backward and Finish of one tile.
struct BackwardKernels {
  int queries, keys, shared_bytes;
  cudaError_t (*backward)(const BackwardParams& params, Mode mode, cudaStream_t stream);
  cudaError_t (*finish)(const BackwardParams& params, cudaStream_t stream);
};

// Kernels of one element type and tile. All enqueue on the stream and return the launch's error.
struct Kernels {
  TileInfo tile;
  cudaError_t (*forward)(const ForwardParams& params, Mode mode, cudaStream_t stream);
  // params.tiles counts Decode's tiles: kDecodeRows (query, head) pairs.
  cudaError_t (*decode)(const ForwardParams& params, Mode mode, cudaStream_t stream);
  // Prepare, then row_dot where SumsRowDot(), then Backward once for each slice of `params`,
  // then QueryGradient or Finish. query_gradient and row_dot count query_tiles in their own tiles.
  cudaError_t (*prepare)(const BackwardParams& params, cudaStream_t stream);
  BackwardKernels wide, compact;
  cudaError_t (*query_gradient)(const BackwardParams& params, cudaStream_t stream);
  cudaError_t (*row_dot)(const BackwardParams& params, cudaStream_t stream);  // after prepare
};

// kType: DType::kFp16 or kBf16.
template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf();

cudaError_t LaunchSinkGradient(const BackwardParams& params, cudaStream_t stream);

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_LAUNCH_H_
