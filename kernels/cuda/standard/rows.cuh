// What the forward and the backward row kernels share.
#ifndef ATTN_KERNELS_CUDA_STANDARD_ROWS_CUH_
#define ATTN_KERNELS_CUDA_STANDARD_ROWS_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/standard/element.cuh"
#include "kernels/cuda/standard/rows.h"

namespace attn::cuda::standard {

// Neighbouring keys one thread has: what one draw of the dropout mask decides.
inline constexpr int kUnit = 8;

// One row of one matrix, and which keys it sees by lengths, causal and window: [begin, end).
struct RowPlace {
  int i, head;
  int begin, end;
  int64_t score_row;  // row of the score buffers
  int64_t lse;        // index in an lse-shaped buffer
  HeadOptions options;
  const uint8_t* mask_row;
};

// What the kernels are compiled for: scale, lengths, causal and windows; these and dropout; all
// options. The second costs registers that a plain call does not have to give, the third twice as
// many.
enum class Level { kPlain, kDropout, kAll };

template <Level kLevel>
__device__ __forceinline__ RowPlace PlaceRow(const RowsParams& p, int matrix, int i) {
  RowPlace at;
  const int g = matrix % p.group_heads;
  const int kv = matrix / p.group_heads % p.kv_heads;
  const int b = matrix / p.group_heads / p.kv_heads;
  at.i = i;
  at.head = (p.kv0 + kv) * p.group + p.group0 + g;
  at.begin = max(0, i + p.off - p.score.window_left);
  at.end = min(p.keys, i + p.off + p.score.window_right + 1);
  at.score_row = static_cast<int64_t>(matrix) * p.rows + i;
  at.lse = p.lse0 + b * p.lse_step + at.head * p.lse_head + i;
  at.mask_row = nullptr;
  if constexpr (kLevel != Level::kPlain) {
    DeviceSequence s = {};
    s.q_token = p.q_token0 + b * p.q_token_step;
    at.options = OptionsOf(p.score, s, p.batch0 + b, at.head, p.num_heads);
    if (at.options.block_mask != nullptr) {
      at.mask_row =
          at.options.block_mask + static_cast<int64_t>(i / p.score.block_q) * p.score.mask_cols;
    }
  }
  return at;
}

// Whether a unit has a key that lengths, causal and window show.
__device__ __forceinline__ bool AnyVisible(const RowPlace& at, int j0) {
  return j0 < at.end && j0 + kUnit > at.begin;
}

// Out of line: inlined into every element of an unrolled row it crowds out the rest.
template <bool kWithSlope>
__device__ __noinline__ float2 CapScore(float softcap, float t) {
  float slope = 1.0f;
  const float capped = SoftCap<kWithSlope>(softcap, t, &slope);
  return make_float2(capped, slope);
}

__device__ __forceinline__ DType DTypeOf(BiasType type) {
  return type == BiasType::kFp16   ? DType::kFp16
         : type == BiasType::kBf16 ? DType::kBf16
                                   : DType::kFp32;
}

// Score2() of score.cuh for eight keys, in natural units: one branch per option and unit. `keys` of
// them exist.
template <bool kGradient>
__device__ __forceinline__ void AddOptions(const ScoreParams& p, const RowPlace& at, int off,
                                           int j0, int keys, float (&x)[kUnit],
                                           float (&slope)[kUnit]) {
  if (p.softcap > 0.0f) {
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      const float2 capped = CapScore<kGradient>(p.softcap, x[e]);
      x[e] = capped.x;
      if constexpr (kGradient) slope[e] = capped.y;
    }
  }
  if (p.bias_type != BiasType::kNone) {
    const DType dtype = DTypeOf(p.bias_type);
    const int64_t index = at.options.bias_row0 + at.i * p.bias_cols + j0;
    const bool aligned = reinterpret_cast<uintptr_t>(ElementAt(p.bias, dtype, index)) % 16 == 0;
    float bias[kUnit];
    if (aligned || keys < kUnit) {
      LoadRow8(p.bias, dtype, index, keys, bias);
    } else {
#pragma unroll
      for (int e = 0; e < kUnit; ++e) bias[e] = LoadFloat(p.bias, dtype, index + e);
    }
#pragma unroll
    for (int e = 0; e < kUnit; ++e) x[e] += bias[e];
  }
  if (at.options.slope != 0.0f) {
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      x[e] -= at.options.slope * fabsf(static_cast<float>(at.i + off - j0 - e));
    }
  }
}

// Which keys of a unit the block mask shows, bit per key. Those beyond `keys` are not looked up.
__device__ __forceinline__ uint32_t MaskedKeys(const ScoreParams& p, const RowPlace& at, int j0,
                                               int keys) {
  if (at.mask_row == nullptr) return 0xFFu;
  const int first = j0 / p.block_k, last = (j0 + min(keys, kUnit) - 1) / p.block_k;
  if (first == last) return __ldg(at.mask_row + first) != 0 ? 0xFFu : 0;
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    if (e < keys)
      bits |= static_cast<uint32_t>(__ldg(at.mask_row + (j0 + e) / p.block_k) != 0) << e;
  }
  return bits;
}

// Raw products of a unit become scores, -inf where hidden; slope: of the softcap,
// where kGradient.
template <Level kLevel, bool kGradient>
__device__ __forceinline__ void UnitScores(const RowsParams& p, const RowPlace& at, int j0,
                                           float (&x)[kUnit], float (&slope)[kUnit]) {
#pragma unroll
  for (int e = 0; e < kUnit; ++e) x[e] *= p.score.scale;
  uint32_t shown = 0xFFu;
  if constexpr (kLevel == Level::kAll) {
    if (AnyVisible(at, j0)) {
      const int keys = p.keys - j0;
      AddOptions<kGradient>(p.score, at, p.off, j0, keys, x, slope);
      shown = MaskedKeys(p.score, at, j0, keys);
    }
  }
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    const int j = j0 + e;
    const bool visible = j >= at.begin && j < at.end && (shown >> e & 1) != 0;
    if (!visible) x[e] = -CUDART_INF_F;
  }
}

// The row that a group of kThreads threads has: a warp's or a whole block's.
template <int kThreads>
__device__ __forceinline__ void RowSync() {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Over the threads of a row; every thread gets the same bits.
template <int kThreads, class Op>
__device__ __forceinline__ float RowReduce(float x, Op op, float* shared) {
  x = WarpReduce(x, op);
  if constexpr (kThreads == 32) return x;
  __syncthreads();  // the previous reduction is read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  x = lane < kThreads / 32 ? shared[lane] : Op::kEmpty;
  return WarpReduce(x, op);
}

// Threads of a block: four rows where a row is a warp's.
template <int kThreads>
inline constexpr int kBlockThreads = kThreads == 32 ? 128 : kThreads;

inline Level LevelOf(const ScoreParams& s) {
  if (s.softcap > 0.0f || s.alibi != nullptr || s.bias_type != BiasType::kNone ||
      s.block_mask != nullptr) {
    return Level::kAll;
  }
  return s.threshold < 65536 ? Level::kDropout : Level::kPlain;
}

// Which keys of a unit dropout keeps, bit per key.
template <Level kLevel>
__device__ __forceinline__ uint32_t UnitKeeps(const RowsParams& p, const RowPlace& at, int j0) {
  if constexpr (kLevel == Level::kPlain) return 0xFFu;
  if (p.score.threshold == 65536) return 0xFFu;
  return KeepBits(p.score, at.options.dropout_head, at.i, j0 / kUnit);
}

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_ROWS_CUH_
