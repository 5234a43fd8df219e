// The tile table of flash_sm80, with the reason beside each number. Measured on an H200 by
// tests/gpu/run.sh; kernels/README.md keeps the log.
#ifndef ATTN_KERNELS_CUDA_SM80_TILES_H_
#define ATTN_KERNELS_CUDA_SM80_TILES_H_

namespace attn::cuda::sm80 {

// head_dim and head_dim_v are rounded up to the tile's; the surplus is zeros in shared memory.
template <int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_, int kMinBlocks_>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;        // queries per CTA
  static constexpr int kBlockN = kBlockN_;        // keys per step
  static constexpr int kWarps = kWarps_;          // each owns kBlockM / kWarps rows
  static constexpr int kMinBlocks = kMinBlocks_;  // CTAs per SM the register budget is set for
};

// Rows of a CTA of Decode: one mma tile.
inline constexpr int kDecodeRows = 16;

template <int kHeadDim_, int kHeadDimV_, int kKeys_, int kStages_, int kMinBlocks_>
struct DecodeTile {
  static constexpr int kKeys = kKeys_;  // a warp takes at a time
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kWarps = 4;
  static constexpr int kStages = kStages_;  // buffers of keys and values of each warp
  static constexpr int kMinBlocks = kMinBlocks_;
};

// S^T and dP^T are computed by a grid of kSWarpsN (keys) x kWarps / kSWarpsN (queries) warps, dK
// and dV by kDkvWarpsN (keys) x … (head_dim), dQ by kDqWarpsM (queries) x … (head_dim).
template <int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_, int kSWarpsN_,
          int kDkvWarpsN_, int kDqWarpsM_, int kStages_>
struct BackwardTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;  // queries per step
  static constexpr int kBlockN = kBlockN_;  // keys per CTA
  static constexpr int kWarps = kWarps_;
  static constexpr int kSWarpsN = kSWarpsN_, kDkvWarpsN = kDkvWarpsN_, kDqWarpsM = kDqWarpsM_;
  static constexpr int kStages = kStages_;  // buffers of Q and dO
};

// Forward: 32 rows per warp, so that each K and V fragment read from shared memory feeds two
// products; two CTAs per SM, so that one's softmax hides under the other's products. From head_dim
// 192 on the accumulator of 32 rows alone would be 192 registers: 16 rows per warp.
// ForwardDropout: as Forward, but at most eight draws of a lane for a tile. ForwardOptions: 16 rows
// per warp; with 32 the options do not find registers.
// Decode: runs of 32 keys, which memory serves faster than 16; more loads in flight than about 64
// KiB per SM gain nothing, so 128 KiB of buffers. Backward: the largest tiles whose accumulators
// (dK and dV: kBlockN x (head_dim + head_dim_v) / 256 per thread) and buffers fit one CTA of eight
// warps per SM. CompactBackward: for devices with 164 KiB of shared memory per block (8.0) at
// head_dim 256, with 100 KiB (8.6, 8.9, 12.0) at the others. QueryGradient: dQ or row_dot alone; 16
// rows per warp.
template <int kHeadDim, int kHeadDimV>
struct Tiles;

template <>
struct Tiles<64, 64> {
  using Decode = DecodeTile<64, 64, 32, 2, 3>;
  using Forward = ForwardTile<64, 64, 128, 128, 4, 2>;
  using ForwardDropout = ForwardTile<64, 64, 128, 128, 4, 2>;
  using ForwardOptions = ForwardTile<64, 64, 64, 64, 4, 3>;
  using Backward = BackwardTile<64, 64, 128, 128, 8, 4, 4, 4, 2>;
  using CompactBackward = BackwardTile<64, 64, 64, 64, 8, 2, 2, 2, 2>;
  using QueryGradient = ForwardTile<64, 64, 64, 64, 4, 2>;
};
template <>
struct Tiles<96, 96> {
  using Decode = DecodeTile<96, 96, 32, 2, 2>;
  using Forward = ForwardTile<96, 96, 128, 64, 4, 2>;
  using ForwardDropout = ForwardTile<96, 96, 128, 64, 4, 2>;
  using ForwardOptions = ForwardTile<96, 96, 64, 64, 4, 2>;
  using Backward = BackwardTile<96, 96, 64, 128, 8, 4, 4, 4, 2>;
  using CompactBackward = BackwardTile<96, 96, 64, 64, 8, 2, 4, 4, 2>;
  using QueryGradient = ForwardTile<96, 96, 64, 64, 4, 2>;
};
template <>
struct Tiles<128, 128> {
  using Decode = DecodeTile<128, 128, 32, 2, 1>;
  using Forward = ForwardTile<128, 128, 128, 64, 4, 2>;
  using ForwardDropout = ForwardTile<128, 128, 128, 64, 4, 2>;
  using ForwardOptions = ForwardTile<128, 128, 64, 64, 4, 2>;
  using Backward = BackwardTile<128, 128, 64, 128, 8, 4, 2, 2, 2>;
  using CompactBackward = BackwardTile<128, 128, 64, 64, 8, 2, 2, 2, 1>;
  using QueryGradient = ForwardTile<128, 128, 64, 64, 4, 2>;
};
template <>
struct Tiles<192, 128> {
  using Decode = DecodeTile<192, 128, 32, 2, 1>;
  using Forward = ForwardTile<192, 128, 64, 64, 4, 2>;
  using ForwardDropout = ForwardTile<192, 128, 64, 64, 4, 2>;
  using ForwardOptions = ForwardTile<192, 128, 64, 64, 4, 2>;
  using Backward = BackwardTile<192, 128, 64, 64, 8, 2, 2, 2, 2>;
  using CompactBackward = BackwardTile<192, 128, 64, 64, 8, 2, 2, 2, 1>;
  using QueryGradient = ForwardTile<192, 128, 64, 64, 4, 1>;
};
template <>
struct Tiles<256, 256> {
  using Decode = DecodeTile<256, 256, 16, 2, 1>;
  using Forward = ForwardTile<256, 256, 64, 64, 4, 2>;
  using ForwardDropout = ForwardTile<256, 256, 64, 64, 4, 2>;
  using ForwardOptions = ForwardTile<256, 256, 64, 64, 4, 2>;
  using Backward = BackwardTile<256, 256, 64, 64, 8, 2, 2, 2, 2>;
  using CompactBackward = BackwardTile<256, 256, 64, 64, 8, 2, 2, 2, 1>;
  using QueryGradient = ForwardTile<256, 256, 64, 64, 4, 1>;
};

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_TILES_H_
