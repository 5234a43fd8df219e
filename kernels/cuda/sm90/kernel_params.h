// What flash_sm90's forward kernels are told, beside what every CUDA kernel is told.
#ifndef ATTN_KERNELS_CUDA_SM90_KERNEL_PARAMS_H_
#define ATTN_KERNELS_CUDA_SM90_KERNEL_PARAMS_H_

#include <cuda.h>

#include "kernels/cuda/common/divisor.h"
#include "kernels/cuda/common/params.h"

namespace attn::cuda::sm90 {

inline constexpr int kPanel = 64;          // elements of a row of shared memory: 128 bytes
inline constexpr int kWarpgroupRows = 64;  // queries of a consumer warpgroup

// What Forward is compiled for. kFull: no right or left limit and no block mask, so that only the
// last key tile is masked. kLimited: limits. kBlocks: a block mask, limits or not. kOptions:
// softcap, ALiBi, bias, dropout, or a scale that is not positive, with or without the others.
// Lengths, sinks and splits are in all.
enum class Mode { kFull, kLimited, kBlocks, kOptions };
inline constexpr int kModes = 4;
inline constexpr int kMaxCluster = 2;  // CTAs that share a work
inline constexpr int kMaxPack = 4;     // a warp has 16 rows

struct ForwardParams {
  // Maps of (element, head, token, batch); boxes of kPanel elements of 2^pack heads and as many
  // tokens as make the rows of a warpgroup (q) or a warp (out_map), and of one head and as many
  // tokens as a CTA copies of a step's keys (a cluster's share them). In THD there is one batch.
  // out_map: only where whole rows are written, and in 16 bits.
  CUtensorMap q, k, v, out_map;
  // First what the producer looks at before it can copy anything, close together: when a kernel
  // starts each line of it is a miss.
  SequenceParams sequences;
  int64_t lse_head;  // elements between heads of an lse-shaped buffer
  int32_t num_heads;
  // A row is query row >> pack of head row % 2^pack of the 2^pack query heads that a work takes
  // together, neighbours of one kv head. Of the heads of works, (group >> pack) share a kv head.
  int32_t pack, work_heads;
  // Work: tiles * splits of each of work_heads * batch, in sections of `section` heads, whose keys
  // and values the L2 cache holds; within one, all heads' first tiles before all heads' second. The
  // last section has last_section heads; the others are whole.
  int32_t tiles, section, last_section;
  uint32_t work;
  int32_t splits;       // 1: none
  int32_t split_tiles;  // key tiles per split
  // The above as divisors; section_work: the work of a section that is not the last.
  Divisor by_work_heads, by_work_group, by_section, by_last_section, by_section_work, by_splits;
  uint32_t* counters;  // two: work handed out beyond the first of each CTA; CTAs that are done
  // Count tiles of queries from the last row on: the last have most keys and are handed out first.
  bool last_first;
  // Values of rows that a sequence has beyond len_k may be anything; otherwise they are read as
  // zeros, because the tensor ends there.
  bool loose_keys;
  bool out_fp32;
  bool out_ends;  // each sequence's rows end where the tensor, or its batch, does
  int32_t head_dim_v;
  void* out;  // contiguous, layout of q
  float* lse;
  TensorStrides out_strides;
  float *partial_out, *partial_lse;
  int64_t partial_rows;  // rows of an lse-shaped buffer
  ScoreParams score;
};

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_KERNEL_PARAMS_H_
