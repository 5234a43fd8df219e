// How flash_sm90 cuts a call into works: which tile it takes, whether heads share tiles of queries,
// and into how many parts the keys are split. Pure.
#ifndef ATTN_KERNELS_CUDA_SM90_TILING_H_
#define ATTN_KERNELS_CUDA_SM90_TILING_H_

#include <cstdint>

#include "kernels/api/problem.h"
#include "kernels/cuda/sm90/launch.h"

namespace attn::cuda::sm90 {

struct Tiling {
  bool narrow = false;  // the tile of fewer queries
  // 2^pack query heads of a kv head make one: row r of a tile is query r >> pack of head r %
  // 2^pack.
  int pack = 0;
  int splits = 1;       // of the keys
  int split_tiles = 0;  // key tiles per split
};

// The tiling that takes least time by a model of the kernel. `multiprocessors`: each takes one work
// at a time.
Tiling ChooseTiling(const AttentionProblem& p, const Kernels& kernels, int64_t multiprocessors);

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_TILING_H_
