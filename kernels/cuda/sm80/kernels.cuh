// KernelsOf(): what instance.cu.in instantiates.
#ifndef ATTN_KERNELS_CUDA_SM80_KERNELS_CUH_
#define ATTN_KERNELS_CUDA_SM80_KERNELS_CUH_

#include <type_traits>

#include "kernels/cuda/common/launch_kernel.h"
#include "kernels/cuda/sm80/backward.cuh"
#include "kernels/cuda/sm80/backward_rows.cuh"
#include "kernels/cuda/sm80/decode.cuh"
#include "kernels/cuda/sm80/forward.cuh"
#include "kernels/cuda/sm80/launch.h"
#include "kernels/cuda/sm80/query_gradient.cuh"
#include "kernels/cuda/sm80/tiles.h"

namespace attn::cuda::sm80 {

template <DType kType, int kHeadDim, int kHeadDimV>
class Launcher {
  using T = std::conditional_t<kType == DType::kBf16, __nv_bfloat16, __half>;
  using Table = Tiles<kHeadDim, kHeadDimV>;
  template <Mode kMode>
  using ForwardOf = ForwardTraits<
      T,
      std::conditional_t<kMode == Mode::kPlain, typename Table::Forward,
                         std::conditional_t<kMode == Mode::kDropout, typename Table::ForwardDropout,
                                            typename Table::ForwardOptions>>,
      kMode>;
  template <class Tile, Mode kMode, bool kMasked>
  using BackwardOf = BackwardTraits<T, Tile, kMode, kMasked>;
  template <bool kOptions>
  using DecodeOf = DecodeTraits<T, typename Table::Decode, kOptions>;
  template <bool kRowDot>
  using GradientOf = QueryGradientTraits<T, typename Table::QueryGradient, kRowDot>;

  template <class Traits, auto kKernel, class Params>
  static cudaError_t Run(int64_t blocks, const Params& params, cudaStream_t stream,
                         int cluster = 1) {
    return LaunchKernel<kKernel>({.blocks = blocks,
                                  .threads = Traits::kThreads,
                                  .shared_bytes = Traits::kSharedBytes,
                                  .cluster = cluster},
                                 params, stream);
  }

  template <Mode kMode>
  static cudaError_t RunForwardOf(const ForwardParams& p, cudaStream_t stream) {
    using Traits = ForwardOf<kMode>;
    const int64_t blocks = int64_t{p.tiles} * p.splits * p.num_heads * p.sequences.batch;
    return Run<Traits, &Forward<Traits>>(blocks, p, stream);
  }

  static cudaError_t RunForward(const ForwardParams& p, Mode mode, cudaStream_t stream) {
    switch (mode) {
      case Mode::kPlain:
        return RunForwardOf<Mode::kPlain>(p, stream);
      case Mode::kDropout:
        return RunForwardOf<Mode::kDropout>(p, stream);
      case Mode::kOptions:
        break;
    }
    return RunForwardOf<Mode::kOptions>(p, stream);
  }

  // Its loop waits for memory: options of their own would be no faster.
  static cudaError_t RunDecode(const ForwardParams& p, Mode mode, cudaStream_t stream) {
    const int64_t blocks = int64_t{p.splits} * p.tiles * p.num_kv_heads * p.sequences.batch;
    const int cluster = p.lockstep ? kLockstepHeads : 1;
    return mode != Mode::kPlain
               ? Run<DecodeOf<true>, &Decode<DecodeOf<true>>>(blocks, p, stream, cluster)
               : Run<DecodeOf<false>, &Decode<DecodeOf<false>>>(blocks, p, stream, cluster);
  }

  static cudaError_t RunPrepare(const BackwardParams& p, cudaStream_t stream) {
    const int64_t blocks = int64_t{p.prepare_blocks} * p.num_heads * p.sequences.batch;
    return LaunchKernel<&Prepare<T, kHeadDim>>({.blocks = blocks, .threads = kPrepareRows * 8}, p,
                                               stream);
  }

  template <class Tile, Mode kMode, bool kMasked>
  static cudaError_t RunBackwardOf(const BackwardParams& p, cudaStream_t stream) {
    using Traits = BackwardOf<Tile, kMode, kMasked>;
    const int64_t blocks = int64_t{p.key_tiles} * p.kv_count * p.batch_count;
    return Run<Traits, &Backward<Traits>>(blocks, p, stream);
  }

  template <class Tile>
  static cudaError_t RunBackward(const BackwardParams& p, Mode mode, cudaStream_t stream) {
    switch (mode) {
      case Mode::kPlain:
        return p.score.block_mask != nullptr ? RunBackwardOf<Tile, Mode::kPlain, true>(p, stream)
                                             : RunBackwardOf<Tile, Mode::kPlain, false>(p, stream);
      case Mode::kDropout:
        return RunBackwardOf<Tile, Mode::kDropout, false>(p, stream);
      case Mode::kOptions:
        break;
    }
    return RunBackwardOf<Tile, Mode::kOptions, false>(p, stream);
  }

  template <class Tile>
  static cudaError_t RunFinish(const BackwardParams& p, cudaStream_t stream) {
    using Traits = BackwardOf<Tile, Mode::kPlain, false>;
    const int64_t blocks = int64_t{p.query_tiles} * p.num_heads * p.sequences.batch;
    return LaunchKernel<&Finish<Traits>>({.blocks = blocks, .threads = Traits::kThreads}, p,
                                         stream);
  }

  template <class Tile>
  static constexpr BackwardKernels BackwardKernelsOf() {
    return {.queries = Tile::kBlockM,
            .keys = Tile::kBlockN,
            .shared_bytes = BackwardOf<Tile, Mode::kPlain, true>::kSharedBytes,
            .backward = &RunBackward<Tile>,
            .finish = &RunFinish<Tile>};
  }

  template <bool kRowDot>
  static cudaError_t RunQueryGradient(const BackwardParams& p, cudaStream_t stream) {
    using Traits = GradientOf<kRowDot>;
    const int64_t blocks = int64_t{p.query_tiles} * p.num_heads * p.sequences.batch;
    return Run<Traits, &QueryGradient<Traits>>(blocks, p, stream);
  }

  template <Mode kMode>
  static constexpr ForwardInfo ForwardInfoOf() {
    using Traits = ForwardOf<kMode>;
    return {.queries = Traits::kBlockM,
            .keys = Traits::kBlockN,
            .shared_bytes = Traits::kSharedBytes,
            .blocks_per_sm = Traits::kMinBlocks};
  }

 public:
  static constexpr Kernels kKernels = {
      .tile = {.head_dim = kHeadDim,
               .head_dim_v = kHeadDimV,
               .forward = {ForwardInfoOf<Mode::kPlain>(), ForwardInfoOf<Mode::kDropout>(),
                           ForwardInfoOf<Mode::kOptions>()},
               .decode_keys = Table::Decode::kKeys,
               .decode_shared_bytes = DecodeOf<false>::kSharedBytes,
               .decode_blocks_per_sm = Table::Decode::kMinBlocks,
               .decode_busy_blocks =
                   (65536 - 1) / (Table::Decode::kWarps * DecodeOf<false>::kStageBytes) + 1,
               .gradient_queries = GradientOf<false>::kBlockM,
               .gradient_shared_bytes = GradientOf<false>::kSharedBytes},
      .forward = &RunForward,
      .decode = &RunDecode,
      .prepare = &RunPrepare,
      .wide = BackwardKernelsOf<typename Table::Backward>(),
      .compact = BackwardKernelsOf<typename Table::CompactBackward>(),
      .query_gradient = &RunQueryGradient<false>,
      .row_dot = &RunQueryGradient<true>};
};

template <DType kType, int kHeadDim, int kHeadDimV>
const Kernels& KernelsOf() {
  return Launcher<kType, kHeadDim, kHeadDimV>::kKernels;
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_KERNELS_CUH_
