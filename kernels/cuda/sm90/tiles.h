// The tile table of flash_sm90, with the reason beside each number; kernels/README.md keeps the
// log.
#ifndef ATTN_KERNELS_CUDA_SM90_TILES_H_
#define ATTN_KERNELS_CUDA_SM90_TILES_H_

namespace attn::cuda::sm90 {

// head_dim and head_dim_v are rounded up to the tile's; the surplus is zeros in shared memory.
template <int kHeadDim_, int kHeadDimV_, int kKeys_, int kConsumers_, int kStages_, int kQBuffers_,
          int kRowPanels_>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kKeys = kKeys_;            // per step
  static constexpr int kConsumers = kConsumers_;  // warpgroups, of 64 queries each
  static constexpr int kStages = kStages_;        // buffers of keys, and of values
  static constexpr int kQBuffers = kQBuffers_;    // of a warpgroup's queries
  static constexpr int kRowPanels = kRowPanels_;  // of a warpgroup's rows; 0: in its queries
};

// kClusterKeys where CTAs never share.
inline constexpr int kNeverCluster = 1 << 30;

// Warpgroups: as many as find registers for their accumulators, since one's softmax does not fill
// the time in which another multiplies: four of 112 registers at head_dim 64 (and 256 queries leave
// nothing over of lengths that are powers of two), three of 160 up to head_dim_v 128, two of 240
// beyond.
// Keys: lengths are often powers of two, and 64 waste nothing at the diagonal or the end, where 80
// at head_dim 128 gain 1% in long sequences and lose 6% at 512; more do not find registers.
// Stages: as many as fit; at 512 tokens the third is worth 5%.
// Buffers of queries: those of two works where they fit beside that. From head_dim 192 on, rows
// have panels of their own: a third buffer of queries at 256 is worth 1%, quick rows 3%.
// Options: two warpgroups, so that the options find registers.
// Narrow: 128 queries, for Full and Limited, where the others' number leaves rows or
// multiprocessors idle (tiling.h); with 128 keys, because two warpgroups of 64 do not hide what a
// step costs. It takes kNarrowSlower times as long per row and key where there is enough to do.
// kClusterKeys: where queries see so many keys or more, two CTAs share their tiles (Full, Limited).
// What crosses from L2 is halved, which limits head_dim 256 and costs power everywhere; but the two
// wait for each other, and at the diagonal for the rows that see most. At head_dim 256 it gains 1
// to 4% from 4096 keys on, at 128 1% of calls in a row at 16,384, and below that less than nothing.
template <int kHeadDim, int kHeadDimV>
struct Tiles;

template <>
struct Tiles<64, 64> {
  static constexpr int kClusterKeys = kNeverCluster;
  using Full = ForwardTile<64, 64, 64, 4, 5, 8, 0>;
  using Limited = ForwardTile<64, 64, 64, 4, 5, 8, 0>;
  using Options = ForwardTile<64, 64, 64, 2, 3, 4, 0>;
  using Narrow = ForwardTile<64, 64, 128, 2, 4, 4, 0>;
  static constexpr double kNarrowSlower = 1.3;
};
template <>
struct Tiles<96, 96> {
  static constexpr int kClusterKeys = kNeverCluster;
  using Full = ForwardTile<96, 96, 64, 3, 4, 6, 0>;
  using Limited = ForwardTile<96, 96, 64, 3, 4, 6, 0>;
  using Options = ForwardTile<96, 96, 64, 2, 2, 4, 0>;
  using Narrow = ForwardTile<96, 96, 128, 2, 2, 4, 0>;
  static constexpr double kNarrowSlower = 1.1;
};
template <>
struct Tiles<128, 128> {
  static constexpr int kClusterKeys = 16384;
  using Full = ForwardTile<128, 128, 64, 3, 4, 6, 0>;
  using Limited = ForwardTile<128, 128, 64, 3, 4, 6, 0>;
  using Options = ForwardTile<128, 128, 64, 2, 2, 4, 0>;
  using Narrow = ForwardTile<128, 128, 128, 2, 2, 4, 0>;
  static constexpr double kNarrowSlower = 1.05;
};
template <>
struct Tiles<192, 128> {
  static constexpr int kClusterKeys = kNeverCluster;
  using Full = ForwardTile<192, 128, 64, 3, 3, 3, 1>;
  using Limited = ForwardTile<192, 128, 64, 3, 3, 3, 1>;
  using Options = ForwardTile<192, 128, 64, 2, 2, 4, 0>;
  using Narrow = void;
};
template <>
struct Tiles<192, 192> {
  static constexpr int kClusterKeys = 4096;
  using Full = ForwardTile<192, 192, 64, 2, 3, 2, 2>;
  using Limited = ForwardTile<192, 192, 64, 2, 3, 2, 2>;
  using Options = ForwardTile<192, 192, 64, 2, 2, 4, 0>;
  using Narrow = void;
};
template <>
struct Tiles<256, 256> {
  static constexpr int kClusterKeys = 4096;
  using Full = ForwardTile<256, 256, 64, 2, 2, 2, 2>;
  using Limited = ForwardTile<256, 256, 64, 2, 2, 2, 2>;
  using Options = ForwardTile<256, 256, 64, 2, 2, 2, 2>;
  using Narrow = void;
};

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_TILES_H_
