// What a call of flash_sm90 launches: tiles, splits, the order of work, and the traffic of its loop
// nest. Pure.
#ifndef ATTN_KERNELS_CUDA_SM90_PLAN_H_
#define ATTN_KERNELS_CUDA_SM90_PLAN_H_

#include <cstdint>

#include "kernels/api/backend.h"
#include "kernels/api/problem.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/sm90/launch.h"
#include "kernels/cuda/sm90/tiling.h"

namespace attn::cuda::sm90 {

// Up to this many queries flash_sm80 has a kernel of its own, which packs a group's heads.
inline constexpr int64_t kDecodeQueries = 16;

// The kernels for the element type and the smallest tile that holds both head dims. p.dtype is FP16
// or BF16; head dims are at most 256.
const Kernels& KernelsFor(const AttentionProblem& p);

// The kernels that the call needs.
Mode ModeOf(const AttentionProblem& p);

// Whether all tiles of queries have about as many keys. If not, the last have most: tiles then end
// with the last row, and the first may have whole warpgroups before the first row.
bool TilesAlike(const AttentionProblem& p);

struct ForwardPlan : Tiling {
  int tile_q = 0, tile_k = 0;
  int64_t tiles = 0;  // query tiles of a cluster, of a head of the longest sequence
  // Heads whose work is handed out together; of the last such section.
  int64_t section = 1, last_section = 1;
  // CTAs that share a tile of queries, of tile_q rows each, and copy its keys for each other.
  int cluster = 1;
  int64_t work = 0;  // tiles * splits of every (packed) head and sequence
  int ctas = 0;
};
ForwardPlan PlanForward(const AttentionProblem& p, const Kernels& kernels,
                        const DeviceProperties& device);

// Whether some sequence's keys end before the tensor does, so that a key tile may hold rows of no
// concern.
bool HasLooseKeys(const AttentionProblem& p);

// q, k or v as its tensor map has it. A map holds no stride of 0, so where one head of keys and
// values is stored for all (both have that stride), it is the only one.
StridedTensor MapInput(const AttentionProblem& p, Slot slot);
// out, which is contiguous.
StridedTensor MapOutput(const AttentionProblem& p);
// Query heads of a head of keys, in those terms.
int64_t MapGroup(const AttentionProblem& p);

// L2 to multiprocessor traffic: what the loop nest loads and stores, tile by tile.
TileModel ModelForward(const AttentionProblem& p, const Kernels& kernels, const ForwardPlan& plan);

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_PLAN_H_
