// From a raw product q . k to a score in log2 units: what is the same for every CUDA kernel.
#ifndef ATTN_KERNELS_CUDA_COMMON_SCORE_CUH_
#define ATTN_KERNELS_CUDA_COMMON_SCORE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "kernels/cuda/common/params.h"
#include "kernels/cuda/ptx/math.cuh"

namespace attn::cuda {

// Sequence b.
__device__ __forceinline__ DeviceSequence SequenceOf(const SequenceParams& p, int b) {
  if (p.array != nullptr) return p.array[b];
  DeviceSequence s = p.first;
  s.batch = b;
  s.lse = b * p.lse_batch;
  s.padded = static_cast<int64_t>(b) * p.padded_batch;
  return s;
}

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Largest magnitude of a log2 score at which fma(s, scale, -base), base = top * scale rounded,
// leaves the score `top` within 2^-19 of 0. Farther out that rounding would show: it stands in the
// sum, but not in the probabilities, which are rounded to 16 bits.
inline constexpr float kExactBase = 64.0f;
// By how much (log2) a row's scores may pass what its probabilities are relative to before that is
// raised and the accumulator rescaled. 2^8 is no loss: a rounding is relative to what is rounded.
inline constexpr float kLazyRise = 8.0f;

// lse of a row with keys from its maximum (log2 units), the sum relative to it, and the sink
// (-infinity: none); *factor becomes what its sum of values is multiplied by.
__device__ __forceinline__ float FinishRow(float max2, float sum, float sink, float* factor) {
  float lse2 = max2 + __log2f(sum);
  *factor = __fdividef(1.0f, sum);
  if (sink != -CUDART_INF_F) {
    const float sink2 = sink * kLog2E, top = fmaxf(lse2, sink2);
    const float with_sink = top + __log2f(ptx::Exp2(lse2 - top) + ptx::Exp2(sink2 - top));
    *factor *= ptx::Exp2(lse2 - with_sink);
    lse2 = with_sink;
  }
  return lse2 * kLn2;
}

__device__ __forceinline__ float LoadBias(const ScoreParams& p, int64_t index) {
  switch (p.bias_type) {
    case BiasType::kFp32:
      return __ldg(static_cast<const float*>(p.bias) + index);
    case BiasType::kFp16:
      return __half2float(__ldg(static_cast<const __half*>(p.bias) + index));
    case BiasType::kBf16:
      return __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(p.bias) + index));
    case BiasType::kNone:
      break;
  }
  return 0.0f;
}

// What the options of one (sequence, head) need.
struct HeadOptions {
  float slope;            // ALiBi; 0: none
  int64_t bias_row0;      // index of bias row 0, column 0 of this sequence and head
  uint32_t dropout_head;  // b * num_heads + h
  const uint8_t* block_mask;
};

__device__ __forceinline__ HeadOptions OptionsOf(const ScoreParams& p, const DeviceSequence& s,
                                                 int b, int h, int num_heads) {
  HeadOptions o;
  o.slope =
      p.alibi != nullptr ? __ldg(p.alibi + static_cast<int64_t>(b) * p.alibi_batch + h) : 0.0f;
  o.bias_row0 = b * p.bias_batch + h * p.bias_head + s.q_token * p.bias_cols;
  o.dropout_head = static_cast<uint32_t>(b) * num_heads + h;
  o.block_mask =
      p.block_mask != nullptr ? p.block_mask + b * p.mask_batch + h * p.mask_head : nullptr;
  return o;
}

// softcap * tanh(t / softcap); *slope becomes its derivative, 1 - tanh^2.
template <bool kWithSlope>
__device__ __forceinline__ float SoftCap(float softcap, float t, float* slope) {
  const float tanh_t = tanhf(t / softcap);
  if constexpr (kWithSlope) {
    // 4e / (1 + e)^2 with e = exp(-2|x|) stays relatively exact in saturation, where 1 - tanh^2
    // cancels.
    const float e = expf(-2.0f * fabsf(t / softcap));
    *slope = 4.0f * e / ((1.0f + e) * (1.0f + e));
  }
  return softcap * tanh_t;
}

// Score of (i, j) in log2 units from the raw product; *cap_slope becomes the softcap's derivative,
// 1 - tanh^2. (i, j) must be inside the sequence where there is a bias.
template <bool kWithSlope>
__device__ __forceinline__ float Score2(const ScoreParams& p, const HeadOptions& o, float raw,
                                        int i, int j, int off, float* cap_slope) {
  float t = raw * p.scale;
  if (p.softcap > 0.0f) {
    t = SoftCap<kWithSlope>(p.softcap, t, cap_slope);
  } else if constexpr (kWithSlope) {
    *cap_slope = 1.0f;
  }
  if (p.bias_type != BiasType::kNone)
    t += LoadBias(p, o.bias_row0 + static_cast<int64_t>(i) * p.bias_cols + j);
  if (o.slope != 0.0f) t -= o.slope * fabsf(static_cast<float>(i + off - j));
  return t * kLog2E;
}

// The options of a tile's scores, option by option: the tile is unrolled, and code for options that
// a call does not have would otherwise stand between the instructions of those it has. x: raw
// products into log2 scores. row(a, b, e) and col(a, b, e): query and key of an element. Without
// bias nothing is read; with it only elements inside the sequence are. kWithSlope: gradient is
// multiplied by the softcap's derivative; otherwise it is not looked at.
template <bool kWithSlope, int kA, int kB, class Row, class Col>
__device__ __forceinline__ void ApplyScoreOptions(const ScoreParams& p, const HeadOptions& o,
                                                  int len_q, int len_k, int off, const Row& row,
                                                  const Col& col, float (&x)[kA][kB][4],
                                                  float (*gradient)[kB][4]) {
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int b = 0; b < kB; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(a, b, e);
      }
    }
  };
  if (p.softcap > 0.0f) {
    each([&](int a, int b, int e) {
      float slope;
      x[a][b][e] = SoftCap<kWithSlope>(p.softcap, x[a][b][e] * p.scale, &slope) * kLog2E;
      if constexpr (kWithSlope) gradient[a][b][e] *= slope;
    });
  } else {
    each([&](int a, int b, int e) { x[a][b][e] *= p.scale_log2; });
  }
  const auto add_bias = [&](const auto* bias, const auto& to_float) {
    each([&](int a, int b, int e) {
      const int i = row(a, b, e), j = col(a, b, e);
      if (i < len_q && j < len_k) {
        const auto value = __ldg(bias + o.bias_row0 + static_cast<int64_t>(i) * p.bias_cols + j);
        x[a][b][e] = fmaf(to_float(value), kLog2E, x[a][b][e]);
      }
    });
  };
  if (p.bias_type == BiasType::kFp32) {
    add_bias(static_cast<const float*>(p.bias), [](float v) { return v; });
  } else if (p.bias_type == BiasType::kFp16) {
    add_bias(static_cast<const __half*>(p.bias), [](__half v) { return __half2float(v); });
  } else if (p.bias_type == BiasType::kBf16) {
    add_bias(static_cast<const __nv_bfloat16*>(p.bias),
             [](__nv_bfloat16 v) { return __bfloat162float(v); });
  }
  if (o.slope != 0.0f) {
    const float slope2 = o.slope * kLog2E;
    each([&](int a, int b, int e) {
      const int distance = row(a, b, e) + off - col(a, b, e);
      x[a][b][e] = fmaf(-slope2, fabsf(static_cast<float>(distance)), x[a][b][e]);
    });
  }
}

// Blocks of the mask are multiples of this, so each kMaskStep x kMaskStep square of a tile is shown
// or hidden as a whole.
inline constexpr int kMaskStep = 64;

// One bit per square of the tile at (m0, n0), row by row; squares beyond the lengths count as
// hidden.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ uint32_t MaskBits(const ScoreParams& p, const uint8_t* mask, int len_q,
                                             int len_k, int m0, int n0) {
  uint32_t bits = 0;
#pragma unroll
  for (int m = 0; m < kBlockM / kMaskStep; ++m) {
#pragma unroll
    for (int n = 0; n < kBlockN / kMaskStep; ++n) {
      const int i = m0 + m * kMaskStep, j = n0 + n * kMaskStep;
      if (i < len_q && j < len_k) {
        const int64_t at = static_cast<int64_t>(i / p.block_q) * p.mask_cols + j / p.block_k;
        bits |= static_cast<uint32_t>(__ldg(mask + at) != 0) << (m * (kBlockN / kMaskStep) + n);
      }
    }
  }
  return bits;
}

// A warp looks for the first of candidates first, first + step, … (count of them) whose bits are
// not 0. Returns its number (count: none) and its bits. Called by whole warps with equal arguments.
template <class BitsOf>
__device__ __forceinline__ int FindShown(int count, const BitsOf& bits_of, uint32_t* bits) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < count; base += 32) {
    const uint32_t mine = base + lane < count ? bits_of(base + lane) : 0;
    const uint32_t any = __ballot_sync(~0u, mine != 0);
    if (any != 0) {
      const int first = __ffs(any) - 1;
      *bits = __shfl_sync(~0u, mine, first);
      return base + first;
    }
  }
  *bits = 0;
  return count;
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_SCORE_CUH_
