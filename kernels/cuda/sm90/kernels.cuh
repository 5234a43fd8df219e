// KernelsOf(): what instance.cu.in instantiates.
#ifndef ATTN_KERNELS_CUDA_SM90_KERNELS_CUH_
#define ATTN_KERNELS_CUDA_SM90_KERNELS_CUH_

#include <type_traits>

#include "kernels/cuda/common/launch_kernel.h"
#include "kernels/cuda/sm90/forward.cuh"
#include "kernels/cuda/sm90/launch.h"
#include "kernels/cuda/sm90/tiles.h"

namespace attn::cuda::sm90 {

template <DType kType, int kHeadDim, int kHeadDimV>
class Launcher {
  using T = std::conditional_t<kType == DType::kBf16, __nv_bfloat16, __half>;
  using Table = Tiles<kHeadDim, kHeadDimV>;
  template <Mode kMode>
  using TileOf = std::conditional_t<
      kMode == Mode::kOptions, typename Table::Options,
      std::conditional_t<kMode == Mode::kFull, typename Table::Full, typename Table::Limited>>;
  static constexpr bool kHasNarrow = !std::is_void_v<typename Table::Narrow>;

  template <Mode kMode, class Tile = TileOf<kMode>, int kCluster = 1, bool kPacked = false>
  static cudaError_t Run(const ForwardParams& p, int ctas, cudaStream_t stream) {
    using Traits = ForwardTraits<T, Tile, kMode, kCluster, kPacked>;
    return LaunchKernel<&Forward<Traits>>({.blocks = ctas,
                                           .threads = Traits::kThreads,
                                           .shared_bytes = Traits::kSharedBytes,
                                           .cluster = kCluster},
                                          p, stream);
  }

  template <Mode kMode, class Tile>
  static cudaError_t RunPackedOrNot(const ForwardParams& p, bool packed, int ctas,
                                    cudaStream_t stream) {
    return packed ? Run<kMode, Tile, 1, true>(p, ctas, stream) : Run<kMode, Tile>(p, ctas, stream);
  }

  // kFull and kLimited.
  template <Mode kMode>
  static cudaError_t RunPlain(const ForwardParams& p, const ForwardKernel& k, int ctas,
                              cudaStream_t stream) {
    if constexpr (Table::kClusterKeys != kNeverCluster) {
      if (k.cluster > 1) return Run<kMode, TileOf<kMode>, kMaxCluster>(p, ctas, stream);
    }
    if constexpr (kHasNarrow) {
      if (k.narrow) {
        return RunPackedOrNot<kMode, typename Table::Narrow>(p, k.packed, ctas, stream);
      }
    }
    return RunPackedOrNot<kMode, TileOf<kMode>>(p, k.packed, ctas, stream);
  }

  static cudaError_t RunForward(const ForwardParams& p, const ForwardKernel& k, int ctas,
                                cudaStream_t stream) {
    switch (k.mode) {
      case Mode::kFull:
        return RunPlain<Mode::kFull>(p, k, ctas, stream);
      case Mode::kLimited:
        return RunPlain<Mode::kLimited>(p, k, ctas, stream);
      case Mode::kBlocks:
        return Run<Mode::kBlocks>(p, ctas, stream);
      case Mode::kOptions:
        break;
    }
    return Run<Mode::kOptions>(p, ctas, stream);
  }

  template <Mode kMode, class Tile = TileOf<kMode>>
  static constexpr ForwardInfo InfoOf() {
    using Traits = ForwardTraits<T, Tile, kMode, 1, false>;
    return {
        .queries = Traits::kQueries, .keys = Traits::kKeys, .shared_bytes = Traits::kSharedBytes};
  }
  static constexpr ForwardInfo NarrowInfo() {
    if constexpr (kHasNarrow) return InfoOf<Mode::kFull, typename Table::Narrow>();
    return {};
  }
  static constexpr double NarrowSlower() {
    if constexpr (kHasNarrow) return Table::kNarrowSlower;
    return 1;
  }

 public:
  static constexpr Kernels kKernels = {
      .head_dim = kHeadDim,
      .head_dim_v = kHeadDimV,
      .cluster_keys = Table::kClusterKeys,
      .forward_info = {InfoOf<Mode::kFull>(), InfoOf<Mode::kLimited>(), InfoOf<Mode::kBlocks>(),
                       InfoOf<Mode::kOptions>()},
      .narrow_info = NarrowInfo(),
      .narrow_slower = NarrowSlower(),
      .forward = &RunForward};
};

template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf() {
  return Launcher<kType, kHeadDim, kHeadDimV>::kKernels;
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_KERNELS_CUH_
