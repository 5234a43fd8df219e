// What a call of flash_sm80 launches: tiles, splits, scratch memory, and the traffic of its loop
// nests.
#ifndef ATTN_KERNELS_CUDA_SM80_PLAN_H_
#define ATTN_KERNELS_CUDA_SM80_PLAN_H_

#include <cstdint>

#include "kernels/api/backend.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/sm80/launch.h"

namespace attn::cuda::sm80 {

// The kernels for the element type and the smallest tile that holds both head dims. p.dtype is FP16
// or BF16; head dims are at most 256.
const Kernels& KernelsFor(const AttentionProblem& p);

// Those of its Backward kernels that the device has the shared memory for; wide, if it has for
// neither.
const BackwardKernels& BackwardFor(const Kernels& kernels, const DeviceProperties& device);

// The kernels that the call needs.
Mode ModeOf(const AttentionProblem& p);

// How a forward pass runs.
struct ForwardPlan {
  bool decode = false;    // the kernel for few queries: seqlen_q up to kDecodeQueries
  bool lockstep = false;  // neighbouring kv heads keep in step
  int tiles = 0;          // query tiles of a head; decode: row tiles of a kv head
  int tile_q = 0, tile_k = 0;
  int splits = 1;
  int split_tiles = 0;  // key tiles per split
};
ForwardPlan PlanForward(const AttentionProblem& p, const TileInfo& tile,
                        const DeviceProperties& device);

// Regions of the workspace, in bytes from its start; `bytes` in all. Regions start at multiples of
// 256.
struct BackwardWorkspace {
  int64_t lse2 = 0, delta = 0, dq_accumulator = 0, bytes = 0;
};
BackwardWorkspace PlanBackwardWorkspace(const AttentionProblem& p, const TileInfo& tile);

// L2 to multiprocessor traffic: what the loop nests load and store, tile by tile.
TileModel ModelForward(const AttentionProblem& p, const TileInfo& tile, const ForwardPlan& plan);
TileModel ModelBackward(const AttentionProblem& p, const TileInfo& tile,
                        const BackwardKernels& kernels);

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_PLAN_H_
