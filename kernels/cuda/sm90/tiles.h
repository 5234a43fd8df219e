// The tile table of flash_sm90, with the reason beside each number. Measured on an H200 by
// tests/gpu/run.sh; kernels/README.md keeps the log.
#ifndef ATTN_KERNELS_CUDA_SM90_TILES_H_
#define ATTN_KERNELS_CUDA_SM90_TILES_H_

namespace attn::cuda::sm90 {

// head_dim and head_dim_v are rounded up to the tile's; the surplus is zeros in shared memory.
template <int kHeadDim_, int kHeadDimV_, int kKeys_, int kConsumers_, int kStages_, int kQStages_>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kKeys = kKeys_;            // per step
  static constexpr int kConsumers = kConsumers_;  // warpgroups, of 64 queries each
  static constexpr int kStages = kStages_;        // buffers of keys, and of values
  static constexpr int kQStages = kQStages_;      // of queries
};

template <int kHeadDim, int kHeadDimV>
struct Tiles;

template <>
struct Tiles<64, 64> {
  using Full = ForwardTile<64, 64, 128, 3, 3, 2>;
  using Limited = ForwardTile<64, 64, 128, 3, 3, 2>;
  using Blocks = ForwardTile<64, 64, 128, 3, 3, 2>;
  using Options = ForwardTile<64, 64, 64, 2, 3, 2>;
};
template <>
struct Tiles<96, 96> {
  using Full = ForwardTile<96, 96, 80, 3, 3, 2>;
  using Limited = ForwardTile<96, 96, 80, 3, 3, 2>;
  using Blocks = ForwardTile<96, 96, 128, 2, 2, 2>;
  using Options = ForwardTile<96, 96, 64, 2, 2, 2>;
};
template <>
struct Tiles<128, 128> {
  using Full = ForwardTile<128, 128, 80, 3, 3, 2>;
  using Limited = ForwardTile<128, 128, 80, 3, 3, 2>;
  using Blocks = ForwardTile<128, 128, 128, 2, 2, 2>;
  using Options = ForwardTile<128, 128, 64, 2, 2, 2>;
};
template <>
struct Tiles<192, 128> {
  using Full = ForwardTile<192, 128, 80, 3, 3, 1>;
  using Limited = ForwardTile<192, 128, 80, 3, 3, 1>;
  using Blocks = ForwardTile<192, 128, 128, 2, 2, 1>;
  using Options = ForwardTile<192, 128, 64, 2, 2, 1>;
};
template <>
struct Tiles<192, 192> {
  using Full = ForwardTile<192, 192, 112, 2, 2, 1>;
  using Limited = ForwardTile<192, 192, 96, 2, 2, 1>;
  using Blocks = ForwardTile<192, 192, 64, 2, 2, 1>;
  using Options = ForwardTile<192, 192, 64, 2, 2, 1>;
};
template <>
struct Tiles<256, 256> {
  using Full = ForwardTile<256, 256, 80, 2, 2, 1>;
  using Limited = ForwardTile<256, 256, 64, 2, 2, 1>;
  using Blocks = ForwardTile<256, 256, 64, 2, 2, 1>;
  using Options = ForwardTile<256, 256, 64, 2, 2, 1>;
};

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_TILES_H_
