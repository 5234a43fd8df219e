// flash_sm80 backward by recomputation. One CTA owns one tile of keys of one kv head and walks over
// the query tiles that see it, for every query head of the group: S^T = K Q^T, P^T, dP^T = V dO^T,
// dV += P^T dO, dQ = dS K (added to an fp32 accumulator in global memory), dK += dS^T Q. Prepare
// runs before, Finish after it; a deterministic call has dQ computed by QueryGradient
// (query_gradient.cuh) instead.
#ifndef ATTN_KERNELS_CUDA_SM80_BACKWARD_CUH_
#define ATTN_KERNELS_CUDA_SM80_BACKWARD_CUH_

#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

// Tile is a BackwardTile of tiles.h. kOptions as for the forward kernel.
template <class T_, class Tile_, bool kOptions_>
struct BackwardTraits : Tile_ {
  using T = T_;
  static constexpr bool kOptions = kOptions_;
  static constexpr int kThreads = Tile_::kWarps * 32;
  static constexpr int kQkChunks = Tile_::kHeadDim / 8, kVChunks = Tile_::kHeadDimV / 8;
  static constexpr int kMChunks = Tile_::kBlockM / 8;
  // Per warp, in m16 (rows) and n8 (columns) tiles. S^T, dP^T: keys x queries. dK, dV: keys x
  // head_dim. dQ: queries x head_dim.
  static constexpr int kSWarpsM = Tile_::kWarps / Tile_::kSWarpsN;
  static constexpr int kSKeys = Tile_::kBlockN / Tile_::kSWarpsN / 16;
  static constexpr int kSQueries = Tile_::kBlockM / kSWarpsM / 8;
  static constexpr int kDkvWarpsD = Tile_::kWarps / Tile_::kDkvWarpsN;
  static constexpr int kDkvKeys = Tile_::kBlockN / Tile_::kDkvWarpsN / 16;
  static constexpr int kDkDims = Tile_::kHeadDim / kDkvWarpsD / 8;
  static constexpr int kDvDims = Tile_::kHeadDimV / kDkvWarpsD / 8;
  static constexpr int kDqWarpsD = Tile_::kWarps / Tile_::kDqWarpsM;
  static constexpr int kDqQueries = Tile_::kBlockM / Tile_::kDqWarpsM / 16;
  static constexpr int kDqDims = Tile_::kHeadDim / kDqWarpsD / 8;
  static constexpr int kSharedBytes =
      ((Tile_::kBlockN + Tile_::kStages * Tile_::kBlockM) * (Tile_::kHeadDim + Tile_::kHeadDimV) +
       2 * Tile_::kBlockN * Tile_::kBlockM) *
      2;
  static constexpr uint32_t kSquares =
      (uint32_t{1} << (Tile_::kBlockM / kMaskStep) * (Tile_::kBlockN / kMaskStep)) - 1;
  static_assert(kSQueries % 2 == 0 && kDkDims % 2 == 0 && kDvDims % 2 == 0 && kDqDims % 2 == 0);
  static_assert(kSQueries <= 8);  // the keep bits of a key tile's row are one word
};

template <class T>
__device__ __forceinline__ float4 Load4(const void* data, bool fp32, int64_t index) {
  if (fp32) return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + index);
  const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const T*>(data) + index);
  const float2 a = ptx::Element<T>::Unpack(x.x), b = ptx::Element<T>::Unpack(x.y);
  return make_float4(a.x, a.y, b.x, b.y);
}

inline constexpr int kPrepareRows = kPrepareRowsPerBlock;  // 8 lanes each

// lse2, delta and a zeroed dQ accumulator. Grid: padded rows of the longest sequence / kPrepareRows
// * num_heads * batch.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kPrepareRows * 8)
    Prepare(const __grid_constant__ BackwardParams p) {
  const int blocks = p.prepare_blocks;
  const int h = blockIdx.x / blocks % p.num_heads, b = blockIdx.x / blocks / p.num_heads;
  const DeviceSequence s = SequenceOf(p.sequences, b);
  const int i = blockIdx.x % blocks * kPrepareRows + threadIdx.x / 8, lane = threadIdx.x % 8;
  if (i >= (s.rows_q + kRowPadding - 1) / kRowPadding * kRowPadding) return;
  const int64_t row = h * p.padded_rows + s.padded + i;
  float dot = 0.0f;
  const bool valid = i < s.len_q;
  if (valid) {
    const int64_t out = s.batch * p.out_strides.batch + h * p.out_strides.head +
                        (s.q_token + i) * p.out_strides.token;
    const int64_t dout = s.batch * p.dout_strides.batch + h * p.dout_strides.head +
                         (s.q_token + i) * p.dout_strides.token;
    for (int c = lane * 4; c < p.head_dim_v; c += 32) {
      const float4 x = Load4<T>(p.out, p.out_fp32, out + c);
      const float4 y = Load4<T>(p.dout, false, dout + c);
      dot += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
  }
#pragma unroll
  for (int o = 4; o > 0; o /= 2) dot += __shfl_xor_sync(~0u, dot, o);
  if (lane == 0) {
    float lse2 = CUDART_INF_F, delta = 0.0f;
    if (valid) {
      const int64_t at = s.lse + h * p.lse_head + i;
      const float lse = p.lse[at];
      if (lse != -CUDART_INF_F) {
        lse2 = lse * kLog2E;
        delta = dot - (p.dlse != nullptr ? p.dlse[at] : 0.0f);
      }
    }
    p.lse2[row] = lse2;
    p.delta[row] = delta;
  }
  if (p.dq_accumulator == nullptr) return;
  float4* accumulator = reinterpret_cast<float4*>(p.dq_accumulator + row * kHeadDim);
  for (int c = lane; c < kHeadDim / 4; c += 8) accumulator[c] = make_float4(0, 0, 0, 0);
}

// Where a CTA works.
struct BackwardPlace {
  DeviceSequence s;
  int b, kv_head, group, n0, warp, lane;
  int m_begin, m_count;  // query tiles that see a key of this tile
  uint32_t k_tile, v_tile, q_tiles, dout_tiles, p_tile, ds_tile;  // shared memory
};

// A step: one query tile of one head.
struct BackwardStep {
  int it;  // number among group * m_count; that many: none left
  int h, m0;
  uint32_t shown;  // bits of its squares (MaskBits)
};

template <int kRows, int kCols>
__device__ __forceinline__ void Clear(float (&x)[kRows][kCols][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) x[i][j][0] = x[i][j][1] = x[i][j][2] = x[i][j][3] = 0.0f;
  }
}

// c += A B^T: A's rows (kRows m16 tiles from lane address `a`) and B's rows (kCols n8 tiles from
// `b`) both hold kSteps * 16 elements of the summed axis.
template <class T, int kChunks, int kSteps, int kRows, int kCols>
__device__ __forceinline__ void MultiplyRows(uint32_t a, uint32_t b, float (&c)[kRows][kCols][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      ptx::LoadMatrix4(x[i], StepAddress<kChunks>(a, step) + i * 16 * kChunks * 16);
#pragma unroll
    for (int j = 0; j < kCols / 2; ++j) {
      uint32_t y[4];
      ptx::LoadMatrix4(y, StepAddress<kChunks>(b, step) + j * 16 * kChunks * 16);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::Element<T>::Mma(c[i][2 * j], x[i], y[0], y[1]);
        ptx::Element<T>::Mma(c[i][2 * j + 1], x[i], y[2], y[3]);
      }
    }
  }
}

// c += A B with B stored [summed axis][columns]: kCols n8 tiles from column step `first` on.
template <class T, int kAChunks, int kBChunks, int kSteps, int kRows, int kCols>
__device__ __forceinline__ void MultiplyColumns(uint32_t a, uint32_t b, int first,
                                                float (&c)[kRows][kCols][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      ptx::LoadMatrix4(x[i], StepAddress<kAChunks>(a, step) + i * 16 * kAChunks * 16);
#pragma unroll
    for (int j = 0; j < kCols / 2; ++j) {
      uint32_t y[4];
      ptx::LoadMatrix4Transposed(y,
                                 StepAddress<kBChunks>(b, first + j) + step * 16 * kBChunks * 16);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::Element<T>::Mma(c[i][2 * j], x[i], y[0], y[1]);
        ptx::Element<T>::Mma(c[i][2 * j + 1], x[i], y[2], y[3]);
      }
    }
  }
}

// The first step from `it` on of which the block mask shows something.
template <class Traits>
__device__ __forceinline__ BackwardStep NextStep(const BackwardParams& p, const BackwardPlace& at,
                                                 int it) {
  const int count = at.group * at.m_count;
  BackwardStep step{.it = it, .h = 0, .m0 = 0, .shown = Traits::kSquares};
  if (p.score.block_mask != nullptr) {
    const uint8_t* mask = p.score.block_mask + at.b * p.score.mask_batch;
    step.it += FindShown(
        count - it,
        [&](int ahead) {
          const int h = at.kv_head * at.group + (it + ahead) / at.m_count;
          return MaskBits<Traits::kBlockM, Traits::kBlockN>(
              p.score, mask + h * p.score.mask_head, at.s,
              (at.m_begin + (it + ahead) % at.m_count) * Traits::kBlockM, at.n0);
        },
        &step.shown);
  }
  if (step.it < count) {
    step.h = at.kv_head * at.group + step.it / at.m_count;
    step.m0 = (at.m_begin + step.it % at.m_count) * Traits::kBlockM;
  }
  return step;
}

// Q and dO of a step into buffer `stage`.
template <class Traits>
__device__ __forceinline__ void FetchQueries(const BackwardParams& p, const BackwardPlace& at,
                                             const BackwardStep& step, int stage) {
  using T = typename Traits::T;
  constexpr int kBlockM = Traits::kBlockM;
  const T* q = static_cast<const T*>(p.q) + at.s.batch * p.q_strides.batch +
               step.h * p.q_strides.head + (at.s.q_token + step.m0) * p.q_strides.token;
  LoadTile<kBlockM, Traits::kQkChunks, Traits::kThreads, true>(
      at.q_tiles + stage * kBlockM * Traits::kQkChunks * 16, reinterpret_cast<const char*>(q),
      p.q_strides.token * 2, at.s.len_q - step.m0, p.head_dim / 8);
  const T* dout = static_cast<const T*>(p.dout) + at.s.batch * p.dout_strides.batch +
                  step.h * p.dout_strides.head + (at.s.q_token + step.m0) * p.dout_strides.token;
  LoadTile<kBlockM, Traits::kVChunks, Traits::kThreads, true>(
      at.dout_tiles + stage * kBlockM * Traits::kVChunks * 16, reinterpret_cast<const char*>(dout),
      p.dout_strides.token * 2, at.s.len_q - step.m0, p.head_dim_v / 8);
}

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

// Without options: raw products into probabilities.
template <class Traits>
__device__ __forceinline__ void Probabilities(const BackwardParams& p, const BackwardPlace& at,
                                              const BackwardStep& step, const float* lse2,
                                              ScoreTile<Traits>& s) {
#pragma unroll
  for (int j = 0; j < Traits::kSQueries; ++j) {
    const float2 l = __ldg(reinterpret_cast<const float2*>(lse2 + j * 8));
#pragma unroll
    for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][j][e] = ptx::Exp2(fmaf(s[i][j][e], p.score.scale_log2, e & 1 ? -l.y : -l.x));
      }
    }
  }
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

// Keep bits of every element, four per query tile. The eight lanes of a pair of queries share the
// work: of the eight draws of (query, eight keys) each lane makes one.
template <class Traits>
__device__ __forceinline__ void DrawKeeps(const ScoreParams& p, const BackwardPlace& at,
                                          const HeadOptions& options, const BackwardStep& step,
                                          uint32_t (&keep)[Traits::kSKeys]) {
  const int mine = at.lane / 4;
#pragma unroll
  for (int i = 0; i < Traits::kSKeys; ++i) {
    keep[i] = 0;
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; j += 2) {
      // Draw d: query tile j + d / 4, query d & 1, keys (d >> 1) & 1.
      const int query = step.m0 + QueryOf<Traits>(at, j + (mine >> 2), mine & 1);
      const int key_block = (at.n0 + KeyOf<Traits>(at, i, mine & 2) - at.lane / 4) / 8;
      const uint32_t bits = KeepBits(p, options.dropout_head, query, key_block);
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        const uint32_t theirs = __shfl_sync(~0u, bits, d * 4 + (at.lane & 3));
        keep[i] |= ((theirs >> mine) & 1u) << ((j + (d >> 2)) * 4 + (d & 3));
      }
    }
  }
}

// With options: s from raw products into dropped probabilities, dp into the gradients of the raw
// products (times scale); dbias is written.
template <class Traits>
__device__ __forceinline__ void ApplyOptions(const BackwardParams& p, const BackwardPlace& at,
                                             const BackwardStep& step, const float* lse2,
                                             const float* delta, ScoreTile<Traits>& s,
                                             ScoreTile<Traits>& dp) {
  const HeadOptions options = OptionsOf(p.score, at.s, at.b, step.h, p.num_heads);
  uint32_t keep[Traits::kSKeys];
  const bool drops = p.score.threshold < 65536;
  if (drops) DrawKeeps<Traits>(p.score, at, options, step, keep);
#pragma unroll
  for (int j = 0; j < Traits::kSQueries; ++j) {
    const float2 l = __ldg(reinterpret_cast<const float2*>(lse2 + j * 8));
    const float2 d = __ldg(reinterpret_cast<const float2*>(delta + j * 8));
#pragma unroll
    for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = QueryOf<Traits>(at, j, e), key = KeyOf<Traits>(at, i, e);
        const int row = step.m0 + query, col = at.n0 + key;
        const bool visible = row < at.s.len_q && Visible<Traits>(p, at, step, query, key);
        float prob = 0.0f, cap_slope = 0.0f;
        if (visible) {
          const float score =
              Score2<true>(p.score, options, s[i][j][e], row, col, at.s.off, &cap_slope);
          prob = ptx::Exp2(score - (e & 1 ? l.y : l.x));
        }
        float factor = 1.0f;
        if (drops) factor = keep[i] >> (j * 4 + e) & 1 ? p.score.keep_scale : 0.0f;
        const float ds = prob * (dp[i][j][e] * factor - (e & 1 ? d.y : d.x));
        if (p.dbias != nullptr && visible) {
          float* to =
              p.dbias + options.bias_row0 + static_cast<int64_t>(row) * p.score.bias_cols + col;
          if (p.dbias_atomic) {
            atomicAdd(to, ds);
          } else {
            *to += ds;  // this thread alone, head after head
          }
        }
        s[i][j][e] = prob * factor;
        dp[i][j][e] = ds * cap_slope;
      }
    }
  }
}

// Without options: dp into the gradients of the raw products (times scale).
template <class Traits>
__device__ __forceinline__ void ScoreGradients(const float* delta, const ScoreTile<Traits>& s,
                                               ScoreTile<Traits>& dp) {
#pragma unroll
  for (int j = 0; j < Traits::kSQueries; ++j) {
    const float2 d = __ldg(reinterpret_cast<const float2*>(delta + j * 8));
#pragma unroll
    for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - (e & 1 ? d.y : d.x));
    }
  }
}

template <class Traits>
__device__ __forceinline__ void StoreTransposed(const BackwardPlace& at, uint32_t tile,
                                                const ScoreTile<Traits>& x) {
#pragma unroll
  for (int i = 0; i < Traits::kSKeys; ++i) {
#pragma unroll
    for (int j = 0; j < Traits::kSQueries; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = KeyOf<Traits>(at, i, 2 * half);
        const int chunk = (at.warp / Traits::kSWarpsN) * Traits::kSQueries + j;
        ptx::StoreShared(
            tile + TileOffset<Traits::kMChunks>(row, chunk) + (at.lane & 3) * 4,
            ptx::Element<typename Traits::T>::Pack(x[i][j][2 * half], x[i][j][2 * half + 1]));
      }
    }
  }
}

// dQ of the step, added to the accumulator in fragment order: a warp's addition is contiguous.
template <class Traits>
__device__ __forceinline__ void AddQueryGradient(const BackwardParams& p, const BackwardPlace& at,
                                                 const BackwardStep& step) {
  using E = ptx::Element<typename Traits::T>;
  constexpr int kChunks = Traits::kQkChunks;
  const int lane = at.lane, warp_m = at.warp % Traits::kDqWarpsM,
            warp_d = at.warp / Traits::kDqWarpsM;
  float dq[Traits::kDqQueries][Traits::kDqDims][4];
  Clear(dq);
  const uint32_t k_lane = at.k_tile + TileOffset<kChunks>(lane & 15, lane >> 4);
  // dS as the left operand, from dS^T: matrices of keys low and high by queries low and high.
  const int row = (lane & 7) + ((lane >> 4) << 3), chunk = (lane >> 3) & 1;
#pragma unroll
  for (int k = 0; k < Traits::kBlockN / 16; ++k) {
    uint32_t a[Traits::kDqQueries][4];
#pragma unroll
    for (int i = 0; i < Traits::kDqQueries; ++i) {
      ptx::LoadMatrix4Transposed(
          a[i], at.ds_tile + TileOffset<Traits::kMChunks>(
                                 k * 16 + row, (warp_m * Traits::kDqQueries + i) * 2 + chunk));
    }
#pragma unroll
    for (int j = 0; j < Traits::kDqDims / 2; ++j) {
      uint32_t b[4];
      ptx::LoadMatrix4Transposed(
          b,
          StepAddress<kChunks>(k_lane, warp_d * (Traits::kDqDims / 2) + j) + k * 16 * kChunks * 16);
#pragma unroll
      for (int i = 0; i < Traits::kDqQueries; ++i) {
        E::Mma(dq[i][2 * j], a[i], b[0], b[1]);
        E::Mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
  }
  float* to = p.dq_accumulator +
              (step.h * p.padded_rows + at.s.padded + step.m0) * Traits::kHeadDim +
              (at.warp * Traits::kDqQueries * Traits::kDqDims * 32 + lane) * 4;
#pragma unroll
  for (int i = 0; i < Traits::kDqQueries; ++i) {
#pragma unroll
    for (int j = 0; j < Traits::kDqDims; ++j) {
      ptx::ReduceAdd4(to + (i * Traits::kDqDims + j) * 128, dq[i][j][0], dq[i][j][1], dq[i][j][2],
                      dq[i][j][3]);
    }
  }
}

// A warp's part of dK or dV; `data` and `strides` are the whole tensor's.
template <class Traits, int kDims>
__device__ __forceinline__ void WriteKeyRows(const BackwardParams& p, const BackwardPlace& at,
                                             void* data, const TensorStrides& strides, int head_dim,
                                             float scale,
                                             const float (&x)[Traits::kDkvKeys][kDims][4]) {
  const int warp_n = at.warp % Traits::kDkvWarpsN, warp_d = at.warp / Traits::kDkvWarpsN;
#pragma unroll
  for (int i = 0; i < Traits::kDkvKeys; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = at.n0 + (warp_n * Traits::kDkvKeys + i) * 16 + half * 8 + at.lane / 4;
      if (key >= at.s.rows_k) continue;
      const int64_t row = at.s.batch * strides.batch + at.kv_head * strides.head +
                          (at.s.k_token + key) * strides.token;
#pragma unroll
      for (int j = 0; j < kDims; ++j) {
        const int c = (warp_d * kDims + j) * 8 + (at.lane & 3) * 2;
        if (c < head_dim) {
          StorePair<typename Traits::T>(data, p.grads_fp32, row + c, x[i][j][2 * half] * scale,
                                        x[i][j][2 * half + 1] * scale);
        }
      }
    }
  }
}

// Grid: key_tiles * kv_count * batch_count, key tiles fastest.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    Backward(const __grid_constant__ BackwardParams p) {
  using T = typename Traits::T;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kQkChunks = Traits::kQkChunks, kVChunks = Traits::kVChunks;
  constexpr int kMChunks = Traits::kMChunks;
  extern __shared__ __align__(1024) char shared[];
  BackwardPlace at;
  at.n0 = static_cast<int>(blockIdx.x % p.key_tiles) * kBlockN;
  at.kv_head = p.kv_begin + blockIdx.x / p.key_tiles % p.kv_count;
  at.b = p.batch_begin + blockIdx.x / p.key_tiles / p.kv_count;
  at.s = SequenceOf(p.sequences, at.b);
  if (at.n0 >= at.s.rows_k) return;
  at.group = p.num_heads / p.num_kv_heads;
  at.lane = threadIdx.x % 32;
  at.warp = threadIdx.x / 32;
  at.k_tile = ptx::SharedAddress(shared);
  at.v_tile = at.k_tile + kBlockN * kQkChunks * 16;
  at.q_tiles = at.v_tile + kBlockN * kVChunks * 16;
  at.dout_tiles = at.q_tiles + Traits::kStages * kBlockM * kQkChunks * 16;
  at.p_tile = at.dout_tiles + Traits::kStages * kBlockM * kVChunks * 16;
  at.ds_tile = at.p_tile + kBlockN * kMChunks * 16;

  // Queries that see some key of the tile.
  const int n_last = min(at.n0 + kBlockN, at.s.len_k) - 1;
  const int begin = max(0, at.n0 - at.s.off - p.score.window_right);
  const int end = min(at.s.len_q, n_last - at.s.off + p.score.window_left + 1);
  at.m_begin = begin / kBlockM;
  at.m_count = begin < end && n_last >= at.n0 ? (end + kBlockM - 1) / kBlockM - at.m_begin : 0;

  float dk[Traits::kDkvKeys][Traits::kDkDims][4], dv[Traits::kDkvKeys][Traits::kDvDims][4];
  Clear(dk);
  Clear(dv);
  const int count = at.m_count * at.group;
  BackwardStep step = NextStep<Traits>(p, at, 0);
  if (step.it < count) {
    const T* k = static_cast<const T*>(p.k) + at.s.batch * p.k_strides.batch +
                 at.kv_head * p.k_strides.head + (at.s.k_token + at.n0) * p.k_strides.token;
    const T* v = static_cast<const T*>(p.v) + at.s.batch * p.v_strides.batch +
                 at.kv_head * p.v_strides.head + (at.s.k_token + at.n0) * p.v_strides.token;
    LoadTile<kBlockN, kQkChunks, Traits::kThreads, true>(
        at.k_tile, reinterpret_cast<const char*>(k), p.k_strides.token * 2, at.s.len_k - at.n0,
        p.head_dim / 8);
    LoadTile<kBlockN, kVChunks, Traits::kThreads, true>(at.v_tile, reinterpret_cast<const char*>(v),
                                                        p.v_strides.token * 2, at.s.len_k - at.n0,
                                                        p.head_dim_v / 8);
    FetchQueries<Traits>(p, at, step, 0);
    ptx::CommitCopies();

    // This lane's ldmatrix rows. Left operands: 16 rows by two chunks; right operands stored by
    // rows of the result: 8 columns by two chunks, twice.
    const int lane = at.lane, left_row = lane & 15, left_chunk = lane >> 4;
    const int right_row = (lane & 7) + ((lane >> 4) << 3), right_chunk = (lane >> 3) & 1;
    const int s_warp_n = at.warp % Traits::kSWarpsN, s_warp_m = at.warp / Traits::kSWarpsN;
    const int d_warp_n = at.warp % Traits::kDkvWarpsN, d_warp_d = at.warp / Traits::kDkvWarpsN;
    const int s_row = s_warp_n * Traits::kSKeys * 16 + left_row;
    const int d_row = d_warp_n * Traits::kDkvKeys * 16 + left_row;
    const int s_column = s_warp_m * Traits::kSQueries * 8;
    const uint32_t k_lane = at.k_tile + TileOffset<kQkChunks>(s_row, left_chunk);
    const uint32_t v_lane = at.v_tile + TileOffset<kVChunks>(s_row, left_chunk);
    const uint32_t p_lane = at.p_tile + TileOffset<kMChunks>(d_row, left_chunk);
    const uint32_t ds_lane = at.ds_tile + TileOffset<kMChunks>(d_row, left_chunk);

    for (int round = 0; step.it < count; ++round) {
      const int stage = round % Traits::kStages;
      const uint32_t q_tile = at.q_tiles + stage * kBlockM * kQkChunks * 16;
      const uint32_t dout_tile = at.dout_tiles + stage * kBlockM * kVChunks * 16;
      ptx::WaitCopies<0>();
      __syncthreads();
      const BackwardStep next = NextStep<Traits>(p, at, step.it + 1);
      if (Traits::kStages > 1 && next.it < count) {
        FetchQueries<Traits>(p, at, next, (round + 1) % Traits::kStages);
        ptx::CommitCopies();
      }
      const int64_t row =
          step.h * p.padded_rows + at.s.padded + step.m0 + s_column + (lane & 3) * 2;
      ScoreTile<Traits> s, dp;
      Clear(s);
      Clear(dp);
      MultiplyRows<T, kQkChunks, Traits::kHeadDim / 16>(
          k_lane, q_tile + TileOffset<kQkChunks>(s_column + right_row, right_chunk), s);
      if constexpr (!Traits::kOptions) {
        Probabilities<Traits>(p, at, step, p.lse2 + row, s);
        StoreTransposed<Traits>(at, at.p_tile, s);
      }
      MultiplyRows<T, kVChunks, Traits::kHeadDimV / 16>(
          v_lane, dout_tile + TileOffset<kVChunks>(s_column + right_row, right_chunk), dp);
      if constexpr (Traits::kOptions) {
        ApplyOptions<Traits>(p, at, step, p.lse2 + row, p.delta + row, s, dp);
        StoreTransposed<Traits>(at, at.p_tile, s);
      } else {
        ScoreGradients<Traits>(p.delta + row, s, dp);
      }
      StoreTransposed<Traits>(at, at.ds_tile, dp);
      __syncthreads();
      MultiplyColumns<T, kMChunks, kVChunks, kBlockM / 16>(
          p_lane, dout_tile + TileOffset<kVChunks>(left_row, left_chunk),
          d_warp_d * (Traits::kDvDims / 2), dv);
      if (p.dq_accumulator != nullptr) AddQueryGradient<Traits>(p, at, step);
      MultiplyColumns<T, kMChunks, kQkChunks, kBlockM / 16>(
          ds_lane, q_tile + TileOffset<kQkChunks>(left_row, left_chunk),
          d_warp_d * (Traits::kDkDims / 2), dk);
      if (Traits::kStages == 1) {
        __syncthreads();
        if (next.it < count) {
          FetchQueries<Traits>(p, at, next, 0);
          ptx::CommitCopies();
        }
      }
      step = next;
    }
  }
  WriteKeyRows<Traits>(p, at, p.dk, p.dk_strides, p.head_dim, p.score.scale, dk);
  WriteKeyRows<Traits>(p, at, p.dv, p.dv_strides, p.head_dim_v, 1.0f, dv);
}

// dq from the accumulator. Grid: query_tiles * num_heads * batch; threads as Backward.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    Finish(const __grid_constant__ BackwardParams p) {
  const int h = blockIdx.x / p.query_tiles % p.num_heads;
  const DeviceSequence s = SequenceOf(p.sequences, blockIdx.x / p.query_tiles / p.num_heads);
  const int m0 = static_cast<int>(blockIdx.x % p.query_tiles) * Traits::kBlockM;
  if (m0 >= s.rows_q) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % Traits::kDqWarpsM, warp_d = warp / Traits::kDqWarpsM;
  const float4* from =
      reinterpret_cast<const float4*>(p.dq_accumulator +
                                      (h * p.padded_rows + s.padded + m0) * Traits::kHeadDim) +
      warp * Traits::kDqQueries * Traits::kDqDims * 32 + lane;
  const int64_t row0 =
      s.batch * p.dq_strides.batch + h * p.dq_strides.head + s.q_token * p.dq_strides.token;
#pragma unroll
  for (int i = 0; i < Traits::kDqQueries; ++i) {
    const int row = m0 + (warp_m * Traits::kDqQueries + i) * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < Traits::kDqDims; ++j) {
      const int c = (warp_d * Traits::kDqDims + j) * 8 + (lane & 3) * 2;
      if (c >= p.head_dim) continue;
      const float4 x = from[(i * Traits::kDqDims + j) * 32];
      if (row < s.rows_q) {
        StorePair<typename Traits::T>(p.dq, p.grads_fp32, row0 + row * p.dq_strides.token + c,
                                      x.x * p.score.scale, x.y * p.score.scale);
      }
      if (row + 8 < s.rows_q) {
        StorePair<typename Traits::T>(p.dq, p.grads_fp32, row0 + (row + 8) * p.dq_strides.token + c,
                                      x.z * p.score.scale, x.w * p.score.scale);
      }
    }
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_BACKWARD_CUH_
