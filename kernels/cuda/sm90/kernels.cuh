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
  template <Mode kMode, int kCluster = 1, bool kPacked = false>
  using ForwardOf = ForwardTraits<
      T,
      std::conditional_t<
          kMode == Mode::kOptions, typename Table::Options,
          std::conditional_t<kMode == Mode::kFull, typename Table::Full, typename Table::Limited>>,
      kMode, kCluster, kPacked>;

  template <Mode kMode, int kCluster = 1, bool kPacked = false>
  static cudaError_t RunForwardOf(const ForwardParams& p, int ctas, cudaStream_t stream) {
    using Traits = ForwardOf<kMode, kCluster, kPacked>;
    return LaunchKernel<&Forward<Traits>>({.blocks = ctas,
                                           .threads = Traits::kThreads,
                                           .shared_bytes = Traits::kSharedBytes,
                                           .cluster = kCluster},
                                          p, stream);
  }

  static cudaError_t RunForward(const ForwardParams& p, Mode mode, int cluster, int ctas,
                                cudaStream_t stream) {
    if constexpr (Table::kClusterKeys != kNeverCluster) {
      if (cluster == kMaxCluster) {
        return mode == Mode::kFull ? RunForwardOf<Mode::kFull, kMaxCluster>(p, ctas, stream)
                                   : RunForwardOf<Mode::kLimited, kMaxCluster>(p, ctas, stream);
      }
    }
    if (p.pack > 0) {
      return mode == Mode::kFull ? RunForwardOf<Mode::kFull, 1, true>(p, ctas, stream)
                                 : RunForwardOf<Mode::kLimited, 1, true>(p, ctas, stream);
    }
    switch (mode) {
      case Mode::kFull:
        return RunForwardOf<Mode::kFull>(p, ctas, stream);
      case Mode::kLimited:
        return RunForwardOf<Mode::kLimited>(p, ctas, stream);
      case Mode::kBlocks:
        return RunForwardOf<Mode::kBlocks>(p, ctas, stream);
      case Mode::kOptions:
        break;
    }
    return RunForwardOf<Mode::kOptions>(p, ctas, stream);
  }

  template <Mode kMode>
  static constexpr ForwardInfo InfoOf() {
    using Traits = ForwardOf<kMode>;
    return {
        .queries = Traits::kQueries, .keys = Traits::kKeys, .shared_bytes = Traits::kSharedBytes};
  }

 public:
  static constexpr Kernels kKernels = {
      .head_dim = kHeadDim,
      .head_dim_v = kHeadDimV,
      .cluster_keys = Table::kClusterKeys,
      .forward_info = {InfoOf<Mode::kFull>(), InfoOf<Mode::kLimited>(), InfoOf<Mode::kBlocks>(),
                       InfoOf<Mode::kOptions>()},
      .forward = &RunForward};
};

template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf() {
  return Launcher<kType, kHeadDim, kHeadDimV>::kKernels;
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_KERNELS_CUH_
