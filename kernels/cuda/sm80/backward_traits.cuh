// What the parts of the backward kernel share: its traits, where a CTA works, and its steps.
#ifndef ATTN_KERNELS_CUDA_SM80_BACKWARD_TRAITS_CUH_
#define ATTN_KERNELS_CUDA_SM80_BACKWARD_TRAITS_CUH_

#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

// Tile is a BackwardTile of tiles.h. kMasked: for calls with a block mask. Kernels for dropout and
// for options take one too, but search for what it shows (kSearches), which is slower.
template <class T_, class Tile_, Mode kMode, bool kMasked_>
struct BackwardTraits : Tile_ {
  using T = T_;
  static constexpr bool kOptions = kMode == Mode::kOptions, kDropout = kMode == Mode::kDropout;
  static constexpr bool kMasked = kMasked_, kSearches = kOptions || kDropout;
  static constexpr int kThreads = Tile_::kWarps * 32;
  static constexpr int kQkChunks = Tile_::kHeadDim / 8, kVChunks = Tile_::kHeadDimV / 8;
  static constexpr int kMChunks = Tile_::kBlockM / 8;
  // Per warp, in m16 (rows) and n8 (columns) tiles. S^T, dP^T: keys x queries. dK, dV: keys x
  // head_dim. dQ: queries x head_dim.
  static constexpr int kSWarpsM = Tile_::kWarps / Tile_::kSWarpsN;
  static constexpr int kSKeys = Tile_::kBlockN / Tile_::kSWarpsN / 16;
  static constexpr int kSQueries = Tile_::kBlockM / kSWarpsM / 8;
  static constexpr int kDkvWarpsD = Tile_::kWarps / Tile_::kDkvWarpsN;
  static constexpr int kDkvKeys = Tile_::kBlockN / Tile_::kDkvWarpsN / 16;
  static constexpr int kDkDims = Tile_::kHeadDim / kDkvWarpsD / 8;
  static constexpr int kDvDims = Tile_::kHeadDimV / kDkvWarpsD / 8;
  static constexpr int kDqWarpsD = Tile_::kWarps / Tile_::kDqWarpsM;
  static constexpr int kDqQueries = Tile_::kBlockM / Tile_::kDqWarpsM / 16;
  static constexpr int kDqDims = Tile_::kHeadDim / kDqWarpsD / 8;
  static constexpr int kTileBytes =
      ((Tile_::kBlockN + Tile_::kStages * Tile_::kBlockM) * (Tile_::kHeadDim + Tile_::kHeadDimV) +
       2 * Tile_::kBlockN * Tile_::kBlockM) *
      2;
  static constexpr int kRowBytes = 2 * Tile_::kBlockM * 4;  // lse2 and delta of a step
  // Squares of a step for the block mask, and steps of which it is known what it shows.
  static constexpr int kSquareCount = Tile_::kBlockM / kMaskStep * (Tile_::kBlockN / kMaskStep);
  static constexpr uint32_t kSquares = (uint32_t{1} << kSquareCount) - 1;
  static constexpr int kMaskSteps = 1024;
  static constexpr int kSharedBytes =
      kTileBytes + Tile_::kStages * kRowBytes + (kMasked ? kMaskSteps / 8 * kSquareCount : 0);
  static_assert(kSQueries % 2 == 0 && kDkDims % 2 == 0 && kDvDims % 2 == 0 && kDqDims % 2 == 0);
  // Of a lane, for a step: one for two query tiles (n8) of a key tile (m16).
  static constexpr int kDraws = kSKeys * kSQueries / 2;
  static_assert(kDraws <= 8);
};

// Where a CTA works.
struct BackwardPlace {
  DeviceSequence s;
  int b, kv_head, group, n0, warp, lane;
  int m_begin, m_count;  // query tiles that see a key of this tile
  uint32_t k_tile, v_tile, q_tiles, dout_tiles, p_tile, ds_tile;  // shared memory
  uint32_t rows;   // [stage][lse2 or delta][query], FP32
  uint32_t shown;  // [word of 32 steps][square], bits
};

// A step: one query tile of one head.
struct BackwardStep {
  int it;  // number among group * m_count; that many: none left
  int h, m0;
  uint32_t shown;  // bits of its squares (MaskBits)
};

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_BACKWARD_TRAITS_CUH_
