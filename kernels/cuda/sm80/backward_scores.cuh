// Backward, from raw products to P^T and dS^T: scores, options, dropout, and their way into shared
// memory.
#ifndef ATTN_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_
#define ATTN_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/backward_traits.cuh"

namespace attn::cuda::sm80 {

// Query and key of this lane's element e of S^T tile (i, j), relative to the tile.
template <class Traits>
__device__ __forceinline__ int QueryOf(const BackwardPlace& at, int j, int e) {
  return (at.warp / Traits::kSWarpsN) * Traits::kSQueries * 8 + j * 8 + (at.lane & 3) * 2 + (e & 1);
}
template <class Traits>
__device__ __forceinline__ int KeyOf(const BackwardPlace& at, int i, int e) {
  return ((at.warp % Traits::kSWarpsN) * Traits::kSKeys + i) * 16 + at.lane / 4 + (e >> 1) * 8;
}

template <class Traits>
__device__ __forceinline__ bool Visible(const BackwardParams& p, const BackwardPlace& at,
                                        const BackwardStep& step, int query, int key) {
  constexpr int kColumns = Traits::kBlockN / kMaskStep;
  const int i = step.m0 + query + at.s.off, j = at.n0 + key;
  return j < at.s.len_k && j <= i + p.score.window_right && j >= i - p.score.window_left &&
         (step.shown >> (query / kMaskStep * kColumns + key / kMaskStep) & 1) != 0;
}

template <class Traits>
using ScoreTile = float[Traits::kSKeys][Traits::kSQueries][4];

// Zeroes the probabilities of pairs that the step must not see. Tiles that are seen whole, which
// are most, are left at once.
template <class Traits>
__device__ __forceinline__ void HideInvisible(const BackwardParams& p, const BackwardPlace& at,
                                              const BackwardStep& step, ScoreTile<Traits>& s) {
  const int first = step.m0 + at.s.off;
  const bool whole = first + p.score.window_right >= at.n0 + Traits::kBlockN - 1 &&
                     first + Traits::kBlockM - 1 - p.score.window_left <= at.n0 &&
                     at.n0 + Traits::kBlockN <= at.s.len_k && step.shown == Traits::kSquares;
  if (whole) return;
#pragma unroll
  for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!Visible<Traits>(p, at, step, QueryOf<Traits>(at, j, e), KeyOf<Traits>(at, i, e))) {
          s[i][j][e] = 0.0f;
        }
      }
    }
  }
}

// Without options: raw products into probabilities.
template <class Traits>
__device__ __forceinline__ void Probabilities(const BackwardParams& p, const BackwardPlace& at,
                                              const BackwardStep& step, const float* lse2,
                                              ScoreTile<Traits>& s) {
#pragma unroll
  for (int j = 0; j < Traits::kSQueries; ++j) {
    const float2 l = *reinterpret_cast<const float2*>(lse2 + j * 8);
#pragma unroll
    for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][j][e] = ptx::Exp2(fmaf(s[i][j][e], p.score.scale_log2, e & 1 ? -l.y : -l.x));
      }
    }
  }
  HideInvisible<Traits>(p, at, step, s);
}

// Which elements dropout keeps. Of the eight draws (query, eight keys) for two query tiles of a key
// tile each of the eight lanes of a pair of queries makes one: lane m that of query tile m / 4,
// query m % 2, keys m / 2 % 2. So element e of query tile j is byte e of word j % 2, and draw
// DrawOf(i, j). The draws are a loop for the sake of the instruction cache.
template <class Traits>
__device__ __forceinline__ Keeps DrawStep(const BackwardParams& p, const BackwardPlace& at,
                                          const BackwardStep& step) {
  constexpr int kPairs = Traits::kSQueries / 2;
  const uint32_t head = static_cast<uint32_t>(at.b) * p.num_heads + step.h;
  const int m = at.lane / 4;
  const int query = step.m0 + QueryOf<Traits>(at, m >> 2, m & 1);
  const int block = (at.n0 + KeyOf<Traits>(at, 0, m & 2) - m) / 8;
  KeepDraws draws;
#pragma unroll 4
  for (int c = 0; c < Traits::kDraws; ++c) {
    draws.Add(p.score, DrawKeys(p.score, head, query + c % kPairs * 16, block + c / kPairs * 2));
  }
  return ExchangeInColumn(draws, at.lane);
}
template <class Traits>
__device__ __forceinline__ constexpr int DrawOf(int i, int j) {
  return i * (Traits::kSQueries / 2) + j / 2;
}

// x of what is not kept becomes 0.
template <class Traits>
__device__ __forceinline__ void Drop(const Keeps& keeps, ScoreTile<Traits>& x) {
#pragma unroll
  for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t mask = keeps.Mask<Traits::kDraws>(j % 2, e, DrawOf<Traits>(i, j));
        x[i][j][e] = __uint_as_float(__float_as_uint(x[i][j][e]) & mask);
      }
    }
  }
}

__device__ __forceinline__ void AddBiasGradient(const BackwardParams& p, const HeadOptions& options,
                                                int i, int j, float ds) {
  float* to = p.dbias + options.bias_row0 + static_cast<int64_t>(i) * p.score.bias_cols + j;
  if (p.dbias_atomic) {
    atomicAdd(to, ds);
  } else {
    *to += ds;  // this thread alone, head after head
  }
}

// dbias of a softcapped call, where the softcap's derivative must stay out of dbias but not out of
// dk and dq. An element at a time.
template <class Traits>
__device__ __forceinline__ void AddCappedBiasGradient(const BackwardParams& p,
                                                      const BackwardPlace& at,
                                                      const HeadOptions& options,
                                                      const BackwardStep& step, int query, int key,
                                                      float raw, float row_lse, float gradient) {
  const int i = step.m0 + query, j = at.n0 + key;
  if (i >= at.s.len_q || !Visible<Traits>(p, at, step, query, key)) return;
  const float score = Score2<false>(p.score, options, raw, i, j, at.s.off, nullptr);
  AddBiasGradient(p, options, i, j, ptx::Exp2(score - row_lse) * gradient);
}

// With options: s from raw products into dropped probabilities, dp into the
// gradients of the raw products (times scale); dbias is written.
template <class Traits>
__device__ __forceinline__ void ApplyOptions(const BackwardParams& p, const BackwardPlace& at,
                                             const BackwardStep& step, const float* lse2,
                                             const float* delta, ScoreTile<Traits>& s,
                                             ScoreTile<Traits>& dp) {
  const HeadOptions options = OptionsOf(p.score, at.s, at.b, step.h, p.num_heads);
  const auto row_value = [](const float* values, int j, int e) { return values[j * 8 + (e & 1)]; };
  const auto each = [](const auto& body) {
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; ++j) {
#pragma unroll
      for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(i, j, e);
      }
    }
  };
  Keeps keeps = {};
  const bool drops = p.score.threshold < 65536;
  if (drops) {
    keeps = DrawStep<Traits>(p, at, step);
    Drop<Traits>(keeps, dp);
  }
  each([&](int i, int j, int e) { dp[i][j][e] -= row_value(delta, j, e); });
  const bool capped_bias = p.dbias != nullptr && p.score.softcap > 0.0f;
  if (capped_bias) {
    each([&](int i, int j, int e) {
      AddCappedBiasGradient<Traits>(p, at, options, step, QueryOf<Traits>(at, j, e),
                                    KeyOf<Traits>(at, i, e), s[i][j][e], row_value(lse2, j, e),
                                    dp[i][j][e]);
    });
  }
  ApplyScoreOptions<true>(
      p.score, options, at.s.len_q, at.s.len_k, at.s.off,
      [&](int, int j, int e) { return step.m0 + QueryOf<Traits>(at, j, e); },
      [&](int i, int, int e) { return at.n0 + KeyOf<Traits>(at, i, e); }, s, dp);
  each([&](int i, int j, int e) { s[i][j][e] = ptx::Exp2(s[i][j][e] - row_value(lse2, j, e)); });
  HideInvisible<Traits>(p, at, step, s);
  each([&](int i, int j, int e) { dp[i][j][e] *= s[i][j][e]; });
  if (p.dbias != nullptr && !capped_bias) {
    each([&](int i, int j, int e) {
      const int query = QueryOf<Traits>(at, j, e), key = KeyOf<Traits>(at, i, e);
      if (step.m0 + query < at.s.len_q && Visible<Traits>(p, at, step, query, key)) {
        AddBiasGradient(p, options, step.m0 + query, at.n0 + key, dp[i][j][e]);
      }
    });
  }
  if (drops) Drop<Traits>(keeps, s);
}

// Without options: dp into the gradients of the raw products (times scale).
template <class Traits>
__device__ __forceinline__ void ScoreGradients(const float* delta, const ScoreTile<Traits>& s,
                                               ScoreTile<Traits>& dp) {
#pragma unroll
  for (int j = 0; j < Traits::kSQueries; ++j) {
    const float2 d = *reinterpret_cast<const float2*>(delta + j * 8);
#pragma unroll
    for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - (e & 1 ? d.y : d.x));
    }
  }
}

// kDrop: of what `keeps` keeps.
template <class Traits, bool kDrop>
__device__ __forceinline__ void StoreTransposed(const BackwardPlace& at, uint32_t tile,
                                                const Keeps& keeps, const ScoreTile<Traits>& x) {
#pragma unroll
  for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = KeyOf<Traits>(at, i, 2 * half);
        const int chunk = (at.warp / Traits::kSWarpsN) * Traits::kSQueries + j;
        uint32_t pair =
            ptx::Element<typename Traits::T>::Pack(x[i][j][2 * half], x[i][j][2 * half + 1]);
        if constexpr (kDrop) {
          pair &= keeps.PairMask<Traits::kDraws>(j % 2, half, DrawOf<Traits>(i, j));
        }
        ptx::StoreShared(tile + TileOffset<Traits::kMChunks>(row, chunk) + (at.lane & 3) * 4, pair);
      }
    }
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_
