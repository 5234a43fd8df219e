// From raw products to probabilities: options, masks, and the online softmax of a consumer
// warpgroup.
#ifndef ATTN_KERNELS_CUDA_SM90_SOFTMAX_CUH_
#define ATTN_KERNELS_CUDA_SM90_SOFTMAX_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm90/work.cuh"

namespace attn::cuda::sm90 {

template <class Traits>
struct Consumer {
  float o[Traits::kHeadDimV / 8][4];
  // What probabilities are relative to: a maximum of raw products, with options of log2 scores; and
  // the same as the exponents' summand, or 0 where it is subtracted before (`far`).
  float max[2], base[2];
  float sum[2];                       // of this lane's columns
  bool far;                           // some row of the warp
  float s[Traits::kKeys / 8][4];      // scores of the latest tile
  uint32_t p[Traits::kKeys / 16][4];  // its probabilities, as A of O += P V
  uint32_t tiles;                     // key tiles so far: the next one's use of the rings
  uint32_t p_tile;                    // that p belongs to
  uint32_t queries;                   // use of the queries' buffers by the latest work
  uint32_t queries_at;                // that buffer
  uint32_t shared;
  uint32_t releases;      // in a cluster: `shared` of the CTA that this lane tells of stages
  int group, warp, lane;  // consumer warpgroup; warp of it
  int row;  // the first of this lane's two of the warpgroup's 64; the other is 8 further
};

// The first of this lane's two rows.
template <class Traits>
__device__ __forceinline__ int RowOf(const Work& w, const Consumer<Traits>& c) {
  return w.q0 + PlaceOf(w, c.group) + c.row;
}

template <class Traits>
__device__ __forceinline__ void MaskScores(const ForwardParams& p, const Work& w,
                                           const uint8_t* mask, const Consumer<Traits>& c, int n,
                                           float (&s)[Traits::kKeys / 8][4]) {
  const int n0 = n * Traits::kKeys;
  const int first = n0 + (c.lane & 3) * 2;  // of this lane's columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = QueryOf<Traits>(p, RowOf(w, c) + half * 8);
    int right = w.s.len_k;
    if constexpr (Traits::kLimits) right = min(right, i + w.s.off + p.score.window_right + 1);
    const int end = (i < w.s.len_q ? right : 0) - first;
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
      if (x * 8 >= end) s[x][2 * half] = -CUDART_INF_F;
      if (x * 8 + 1 >= end) s[x][2 * half + 1] = -CUDART_INF_F;
    }
  }
  if constexpr (Traits::kLimits) {
    const int q0 = w.q0 + PlaceOf(w, c.group);
    uint32_t shown = ~0u;
    if (Traits::kBlockMask && mask != nullptr) {
      shown = ShownSquares<Traits>(p, w, mask, q0, kWarpgroupRows, n);
    }
    if (QueryOf<Traits>(p, q0 + kWarpgroupRows - 1) + w.s.off - p.score.window_left <= n0 &&
        (shown & Traits::kSquares) == Traits::kSquares) {
      return;
    }
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = QueryOf<Traits>(p, RowOf(w, c) + (e >> 1) * 8);
        if (first + x * 8 + (e & 1) < i + w.s.off - p.score.window_left ||
            (shown >> (x * 8 / kMaskStep) & 1) == 0) {
          s[x][e] = -CUDART_INF_F;
        }
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void DropProbabilities(const ForwardParams& p, const Work& w,
                                                  const HeadOptions& options, int n,
                                                  const Consumer<Traits>& c,
                                                  float (&s)[Traits::kKeys / 8][4]) {
#pragma unroll
  for (int part = 0; part < Traits::kKeys / 64; ++part) {
    const Keeps keeps = DrawRows<2, 2>(p.score, options.dropout_head, RowOf(w, c),
                                       n * (Traits::kKeys / 8) + part * 8, c.lane);
#pragma unroll
    for (int x = 0; x < 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t mask =
            keeps.template Mask<4>(x % 4 / 2, x % 2 * 2 + e % 2, e / 2 * 2 + x / 4);
        float& value = s[part * 8 + x][e];
        value = __uint_as_float(__float_as_uint(value) & mask);
      }
    }
  }
}

// Base of a row that has seen no key, -FLT_MAX: with it any key makes the sum infinite, and what is
// masked adds 0.
inline constexpr float kNoKeyBase = -3.402823466e38f;

// This lane's largest scores of its two rows.
template <class Traits>
__device__ __forceinline__ void LargestScores(const Consumer<Traits>& c, float (&tops)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float chains[4];  // the latency of one would show
#pragma unroll
    for (int x = 0; x < 4; ++x) chains[x] = fmaxf(c.s[x][2 * half], c.s[x][2 * half + 1]);
#pragma unroll
    for (int x = 4; x < Traits::kKeys / 8; ++x) {
      chains[x % 4] = fmaxf(chains[x % 4], fmaxf(c.s[x][2 * half], c.s[x][2 * half + 1]));
    }
    tops[half] = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
  }
}

// What is subtracted from scores: their maximum; 0 where no key was seen yet.
__device__ __forceinline__ float Subtrahend(float max) { return max == -CUDART_INF_F ? 0.0f : max; }

// Raises c.max where a row's largest score passes it by more than `limit` (log2), and rescales
// c.sum and c.o.
template <class Traits, bool kFirst>
__device__ __forceinline__ void RaiseMaximum(float scale_log2, float keep_log2, float limit,
                                             const float (&tops)[2], Consumer<Traits>& c) {
  float from[2], correction[2];
  bool far = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = fmaxf(c.max[half], tops[half]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (!((top - c.max[half]) * scale_log2 > limit)) top = c.max[half];
    from[half] = Subtrahend(top);
    correction[half] = ptx::Exp2((c.max[half] - from[half]) * scale_log2);
    c.max[half] = top;
    c.sum[half] *= correction[half];
    far |= fabsf(from[half] * scale_log2) > kExactBase;
  }
  c.far = __any_sync(~0u, far);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    c.base[half] = c.far ? 0.0f : from[half] * scale_log2;
    if (!c.far && c.max[half] == -CUDART_INF_F) c.base[half] = kNoKeyBase;
    if constexpr (Traits::kOptions) c.base[half] -= keep_log2;
  }
  if constexpr (!kFirst) {
#pragma unroll
    for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c.o[x][e] *= correction[e >> 1];
    }
  }
}

// Where the maximum is subtracted before the scores are scaled: does so.
template <class Traits>
__device__ __forceinline__ void SubtractMaximum(Consumer<Traits>& c) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float from = Subtrahend(c.max[half]);
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
      c.s[x][2 * half] -= from;
      c.s[x][2 * half + 1] -= from;
    }
  }
}

// c.p := probabilities of c.s relative to c.base, as A of the next O += P V; with options they are
// left in c.s. Their sums: of this lane's columns.
template <class Traits>
__device__ __forceinline__ void Exponentials(float scale_log2, Consumer<Traits>& c,
                                             float (&sums)[2]) {
  using E = ptx::Element<typename Traits::T>;
  float chains[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
  for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = ptx::Exp2(fmaf(c.s[x][2 * half], scale_log2, -c.base[half]));
      const float b = ptx::Exp2(fmaf(c.s[x][2 * half + 1], scale_log2, -c.base[half]));
      chains[half][x % 2] += a + b;
      if constexpr (Traits::kOptions) {
        c.s[x][2 * half] = a;
        c.s[x][2 * half + 1] = b;
      } else {
        c.p[x / 2][x % 2 * 2 + half] = E::Pack(a, b);
      }
    }
  }
  sums[0] = chains[0][0] + chains[0][1];
  sums[1] = chains[1][0] + chains[1][1];
}

// The first tile of a work; `tops`: this lane's largest scores. c.o is zero.
template <class Traits>
__device__ __forceinline__ void FirstSoftmax(const ForwardParams& p, const float (&tops)[2],
                                             Consumer<Traits>& c, float (&sums)[2]) {
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  RaiseMaximum<Traits, true>(scale_log2, p.score.keep_log2, 0.0f, tops, c);
  if (c.far) SubtractMaximum(c);
  Exponentials(scale_log2, c, sums);
}

// A later tile. Probabilities are relative to what they were before, and no maximum is looked for,
// as long as their sum shows that none is much larger than 1.
template <class Traits>
__device__ __forceinline__ void NextSoftmax(const ForwardParams& p, Consumer<Traits>& c,
                                            float (&sums)[2]) {
  // A lane has at most 32 keys of a row: where its sum passes the limit, a score is above kRise.
  constexpr float kRise = Traits::kOptions ? kLazyRise : kLazyRise - 5.0f;
  static_assert(Traits::kKeys / 4 <= 32);
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const float keep_log2 = Traits::kOptions ? p.score.keep_log2 : 0.0f;
  const float limit = ptx::Exp2(fmaxf(kLazyRise, keep_log2));
  bool passes = c.far || Traits::kOptions;
  if (!passes) {
    Exponentials(scale_log2, c, sums);
    passes = __any_sync(~0u, sums[0] > limit || sums[1] > limit);
  }
  if (passes) {
    float tops[2];
    LargestScores<Traits>(c, tops);
    const float rise = fmaxf(kRise - keep_log2, 0.0f);
    if (__any_sync(~0u, (tops[0] - c.max[0]) * scale_log2 > rise ||
                            (tops[1] - c.max[1]) * scale_log2 > rise)) {
      RaiseMaximum<Traits, false>(scale_log2, keep_log2, rise, tops, c);
    }
    if (c.far) SubtractMaximum(c);
    Exponentials(scale_log2, c, sums);
  }
}

// What the softmaxes leave: sums, and with options dropout and packing.
template <class Traits>
__device__ __forceinline__ void FinishSoftmax(const ForwardParams& p, const Work& w,
                                              const HeadOptions& options, int n,
                                              const float (&sums)[2], Consumer<Traits>& c) {
  using E = ptx::Element<typename Traits::T>;
  c.sum[0] += sums[0];
  c.sum[1] += sums[1];
  if constexpr (Traits::kOptions) {
    if (p.score.threshold < 65536) DropProbabilities<Traits>(p, w, options, n, c, c.s);
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        c.p[x / 2][x % 2 * 2 + half] = E::Pack(c.s[x][2 * half], c.s[x][2 * half + 1]);
      }
    }
  }
  c.p_tile = c.tiles - 1;
}

// What the warpgroup sees of a work: key tiles, and those that all its rows see whole.
struct Range {
  int first, last;           // first is the largest; last > first: none
  int full_begin, full_end;  // [full_begin, full_end)
};

template <class Traits>
__device__ __forceinline__ Range RangeOf(const ForwardParams& p, const Work& w, int group) {
  constexpr int kKeys = Traits::kKeys;
  const int row0 = w.q0 + PlaceOf(w, group);
  const int end_row = min(row0 + kWarpgroupRows, RowsOf<Traits>(p, w.s.len_q));
  const int q0 = QueryOf<Traits>(p, row0), q_last = QueryOf<Traits>(p, end_row - 1);
  Range r;
  int key_end = w.s.len_k, full_end = w.s.len_k;
  r.last = w.begin;
  r.full_begin = 0;
  if constexpr (Traits::kLimits) {
    key_end = max(0, min(key_end, q_last + w.s.off + p.score.window_right + 1));
    full_end = max(0, min(full_end, q0 + w.s.off + p.score.window_right + 1));
    r.last = max(r.last, max(0, q0 + w.s.off - p.score.window_left) / kKeys);
    r.full_begin = (max(0, q_last + w.s.off - p.score.window_left) + kKeys - 1) / kKeys;
    if constexpr (Traits::kBlockMask) {
      if (p.score.block_mask != nullptr) r.full_begin = w.end;  // none is known to be
    }
  }
  r.first = row0 < 0 || end_row <= row0 ? -1 : min(w.end, (key_end + kKeys - 1) / kKeys) - 1;
  // Rows beyond len_q see nothing.
  r.full_end = end_row < row0 + kWarpgroupRows ? 0 : full_end / kKeys;
  return r;
}

// From raw products of tile n to scores; with options log2 scores.
template <class Traits>
__device__ __forceinline__ void FinishScores(const ForwardParams& p, const Work& w,
                                             const HeadOptions& options, const Range& r, int n,
                                             Consumer<Traits>& c) {
  if constexpr (Traits::kOptions) {
    float(&one)[1][Traits::kKeys / 8][4] = reinterpret_cast<float(&)[1][Traits::kKeys / 8][4]>(c.s);
    ApplyScoreOptions<false>(
        p.score, options, w.s.len_q, w.s.len_k, w.s.off,
        [&](int, int, int e) { return RowOf(w, c) + (e >> 1) * 8; },
        [&](int, int x, int e) { return n * Traits::kKeys + x * 8 + (c.lane & 3) * 2 + (e & 1); },
        one, one);
  }
  if (n >= r.full_end || n < r.full_begin) {
    MaskScores<Traits>(p, w, options.block_mask, c, n, c.s);
  }
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_SOFTMAX_CUH_
