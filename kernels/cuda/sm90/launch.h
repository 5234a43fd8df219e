// Launching flash_sm90's kernels. Each combination of element type and tile is compiled in a file
// of its own (instance.cu.in).
#ifndef ATTN_KERNELS_CUDA_SM90_LAUNCH_H_
#define ATTN_KERNELS_CUDA_SM90_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/api/dtype.h"
#include "kernels/cuda/sm90/kernel_params.h"

namespace attn::cuda::sm90 {

// What the host has to know of a tile.
struct ForwardInfo {
  int queries, keys, shared_bytes;
};

// Kernels of one element type and tile.
struct Kernels {
  int head_dim, head_dim_v;  // of the tile
  int cluster_keys;          // from so many keys on CTAs cluster; modes kFull and kLimited
  ForwardInfo forward_info[kModes];
  // Enqueues on the stream and returns the launch's error. `cluster`: CTAs that share a work, 1 or
  // kMaxCluster; more than 1, or params.pack > 0, not both, are for kFull and kLimited. `ctas`: at
  // most as many as the device has multiprocessors, and as params.work * cluster.
  cudaError_t (*forward)(const ForwardParams& params, Mode mode, int cluster, int ctas,
                         cudaStream_t stream);
};

// kType: DType::kFp16 or kBf16.
template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf();

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_LAUNCH_H_
