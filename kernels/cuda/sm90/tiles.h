// The tile table of flash_sm90, with the reason beside each number. Measured on an H200 by
// tests/gpu/run.sh; kernels/README.md keeps the log.
#ifndef ATTN_KERNELS_CUDA_SM90_TILES_H_
#define ATTN_KERNELS_CUDA_SM90_TILES_H_

namespace attn::cuda::sm90 {

// head_dim and head_dim_v are rounded up to the tile's; the surplus is zeros in shared memory.
template <int kHeadDim_, int kHeadDimV_, int kKeys_, int kConsumers_, int kStages_, int kQStages_,
          bool kTurns_ = true>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kKeys = kKeys_;            // per step
  static constexpr int kConsumers = kConsumers_;  // warpgroups, of 64 queries each
  static constexpr int kStages = kStages_;        // buffers of keys, and of values
  static constexpr int kQStages = kQStages_;      // of queries
  static constexpr bool kTurns = kTurns_;         // warpgroups take turns in issuing products
};

// Three warpgroups where the accumulators of 64 queries fit the 160 registers that are then a
// thread's: with two of them one's softmax does not fill the time in which the other multiplies.
// From head_dim_v 192 on: two, of 240 registers. Keys: lengths are often powers of two, and 64
// waste nothing at the diagonal or the end, where 80 at head_dim 128 gain 1% in long sequences and
// lose 6% at 512; at head_dim 64 128 keys, because there Q K^T of 64 would wait for shared memory.
// Turns: with three warpgroups and limits one has fewer tiles than another, and waiting for its
// turn costs up to 5% at head_dim 128; elsewhere turns gain. Stages: as many as fit; at 512 tokens
// the third is worth 5%. Options: 64 keys, so that the options find registers.
template <int kHeadDim, int kHeadDimV>
struct Tiles;

template <>
struct Tiles<64, 64> {
  using Full = ForwardTile<64, 64, 128, 3, 3, 2>;
  using Limited = ForwardTile<64, 64, 128, 3, 3, 2>;
  using Options = ForwardTile<64, 64, 64, 2, 3, 2>;
};
template <>
struct Tiles<96, 96> {
  using Full = ForwardTile<96, 96, 64, 3, 4, 2>;
  using Limited = ForwardTile<96, 96, 64, 3, 4, 2, false>;
  using Options = ForwardTile<96, 96, 64, 2, 2, 2>;
};
template <>
struct Tiles<128, 128> {
  using Full = ForwardTile<128, 128, 64, 3, 4, 2>;
  using Limited = ForwardTile<128, 128, 64, 3, 4, 2, false>;
  using Options = ForwardTile<128, 128, 64, 2, 2, 2>;
};
template <>
struct Tiles<192, 128> {
  using Full = ForwardTile<192, 128, 64, 3, 3, 1>;
  using Limited = ForwardTile<192, 128, 64, 3, 3, 1, false>;
  using Options = ForwardTile<192, 128, 64, 2, 2, 1>;
};
template <>
struct Tiles<192, 192> {
  using Full = ForwardTile<192, 192, 64, 2, 3, 1>;
  using Limited = ForwardTile<192, 192, 64, 2, 3, 1>;
  using Options = ForwardTile<192, 192, 64, 2, 2, 1>;
};
template <>
struct Tiles<256, 256> {
  using Full = ForwardTile<256, 256, 64, 2, 2, 1>;
  using Limited = ForwardTile<256, 256, 64, 2, 2, 1>;
  using Options = ForwardTile<256, 256, 64, 2, 2, 1>;
};

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_TILES_H_
