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
  int queries = 0, keys = 0, shared_bytes = 0;
};

// Which of the kernels. What is not the default is for kFull and kLimited, and a cluster for
// neither of the others.
struct ForwardKernel {
  Mode mode;
  bool narrow = false;  // the tile of fewer queries
  bool packed = false;  // params.pack > 0
  int cluster = 1;      // CTAs that share a work, 1 or kMaxCluster
};

// Kernels of one element type and tile.
struct Kernels {
  int head_dim, head_dim_v;  // of the tile
  int cluster_keys;          // from so many keys on CTAs cluster; modes kFull and kLimited
  ForwardInfo forward_info[kModes];
  ForwardInfo narrow_info;  // of the narrow kernels; no queries: there are none
  double narrow_slower;  // their time per row and key, where all rows are there, over the others'
  // Enqueues on the stream and returns the launch's error. `ctas`: at most as many as the device
  // has multiprocessors, and as params.work * kernel.cluster.
  cudaError_t (*forward)(const ForwardParams& params, const ForwardKernel& kernel, int ctas,
                         cudaStream_t stream);
};

// kType: DType::kFp16 or kBf16.
template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf();

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_LAUNCH_H_
