// flash_sm80 forward: one CTA computes one tile of queries of one head, walking over the key tiles
// it can see from the last to the first; S = Q K^T, the softmax and O += P V stay in registers. K
// and V have one buffer each: the copy of V runs under Q K^T, the copy of the next K under P V.
#ifndef ATTN_KERNELS_CUDA_SM80_FORWARD_CUH_
#define ATTN_KERNELS_CUDA_SM80_FORWARD_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/kernel_params.h"

namespace attn::cuda::sm80 {

// Tile is a ForwardTile of tiles.h.
template <class T_, class Tile_, Mode kMode>
struct ForwardTraits : Tile_ {
  using T = T_;
  static constexpr bool kOptions = kMode == Mode::kOptions, kDropout = kMode == Mode::kDropout;
  static constexpr bool kMayDrop = kOptions || kDropout;
  static constexpr int kThreads = Tile_::kWarps * 32;
  static constexpr int kRowTiles = Tile_::kBlockM / (16 * Tile_::kWarps);  // m16 tiles per warp
  static constexpr int kQkChunks = Tile_::kHeadDim / 8;
  static constexpr int kVChunks = Tile_::kHeadDimV / 8;
  static constexpr int kSharedBytes =
      ((Tile_::kBlockM + Tile_::kBlockN) * Tile_::kHeadDim + Tile_::kBlockN * Tile_::kHeadDimV) * 2;
  static constexpr uint32_t kSquares =
      (uint32_t{1} << (Tile_::kBlockM / kMaskStep) * (Tile_::kBlockN / kMaskStep)) - 1;
  // Dropout's draws, for 64 keys at a time: two groups of 32 for each of a lane's rows.
  static constexpr int kDrawGroups = 2, kDraws = 2 * kRowTiles * kDrawGroups;
  static constexpr int kKeeps = Tile_::kBlockN / 64;
  static_assert(Tile_::kBlockM % (16 * Tile_::kWarps) == 0 && Tile_::kBlockN % 16 == 0);
};

template <class Traits>
struct ForwardState {
  float o[Traits::kRowTiles][Traits::kHeadDimV / 8][4];
  float max[Traits::kRowTiles]
           [2];  // running maximum; of raw products without options, else of log2 scores
  float sum[Traits::kRowTiles][2];  // of this lane's columns
};

// Where a CTA works, and what its lane addresses.
struct ForwardPlace {
  DeviceSequence s;
  int b, h, split, q0, warp, lane;
  uint32_t q_tile, k_tile, v_tile;  // shared memory
  uint32_t q_lane, k_lane, v_lane;  // this lane's ldmatrix rows
  const char *k, *v;                // row 0 of the head
  HeadOptions options;
};

template <class Traits>
__device__ __forceinline__ int RowOf(const ForwardPlace& at, int row_tile, int half) {
  return at.q0 + (at.warp * Traits::kRowTiles + row_tile) * 16 + half * 8 + at.lane / 4;
}

// s := Q K^T of the warp's rows and all keys of the tile.
template <class Traits>
__device__ __forceinline__ void Scores(const ForwardPlace& at,
                                       float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
  using E = ptx::Element<typename Traits::T>;
  constexpr int kChunks = Traits::kQkChunks;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 8; ++n)
      s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    uint32_t a[Traits::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      ptx::LoadMatrix4(a[m], StepAddress<kChunks>(at.q_lane, step) + m * 16 * kChunks * 16);
    }
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 16; ++n) {
      uint32_t b[4];
      ptx::LoadMatrix4(b, StepAddress<kChunks>(at.k_lane, step) + n * 16 * kChunks * 16);
#pragma unroll
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        E::Mma(s[m][2 * n], a[m], b[0], b[1]);
        E::Mma(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Turns raw products into log2 scores.
template <class Traits>
__device__ __forceinline__ void OptionScores(
    const ForwardParams& p, const ForwardPlace& at, int n0,
    float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
  ApplyScoreOptions<false>(
      p.score, at.options, at.s.len_q, at.s.len_k, at.s.off,
      [&](int m, int, int e) { return RowOf<Traits>(at, m, e >> 1); },
      [&](int, int n, int e) { return n0 + n * 8 + (at.lane & 3) * 2 + (e & 1); }, s, s);
}

// Hides what a row must not see. `shown`: bits of the tile's squares (MaskBits). Small causal calls
// spend most of their time here: for them one comparison with a constant of the unrolled loop per
// element; the rarer left limits and block masks have passes of their own.
template <class Traits>
__device__ __forceinline__ void MaskScores(const ForwardParams& p, const ForwardPlace& at, int n0,
                                           uint32_t shown,
                                           float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
  const int first = n0 + (at.lane & 3) * 2;  // of this lane's columns
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = RowOf<Traits>(at, m, half);
      const int right = min(at.s.len_k, i + at.s.off + p.score.window_right + 1);
      const int end = (i < at.s.len_q ? right : 0) - first;
#pragma unroll
      for (int n = 0; n < Traits::kBlockN / 8; ++n) {
        if (n * 8 >= end) s[m][n][2 * half] = -CUDART_INF_F;
        if (n * 8 + 1 >= end) s[m][n][2 * half + 1] = -CUDART_INF_F;
      }
    }
  }
  const bool left = at.q0 + Traits::kBlockM - 1 + at.s.off - p.score.window_left > n0;
  if (!left && shown == Traits::kSquares) return;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = RowOf<Traits>(at, m, e >> 1);
        const int square =
            (i - at.q0) / kMaskStep * (Traits::kBlockN / kMaskStep) + n * 8 / kMaskStep;
        if (first + n * 8 + (e & 1) < i + at.s.off - p.score.window_left ||
            (shown >> square & 1) == 0) {
          s[m][n][e] = -CUDART_INF_F;
        }
      }
    }
  }
}

// s := probabilities relative to state.max, which follows the running maximum; o and sum are
// rescaled to it. Masked rows may have no key yet. With dropout they, and the sum, are 2^keep_log2
// times as large.
template <class Traits, bool kMasked>
__device__ __forceinline__ void OnlineSoftmax(
    float scale_log2, float keep_log2, ForwardState<Traits>& state,
    float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
  constexpr int kColumns = Traits::kBlockN / 8;
  float from[Traits::kRowTiles][2], correction[Traits::kRowTiles][2];
  const float limit = Traits::kMayDrop ? fmaxf(kLazyRise - keep_log2, 0.0f) : kLazyRise;
  bool far = false, rises = false;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = state.max[m][half];
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // Without a key so far state.max is -infinity, and every score a rise.
      const bool rise = (top - state.max[m][half]) * scale_log2 > limit;
      if (!rise) top = state.max[m][half];
      from[m][half] = kMasked && top == -CUDART_INF_F ? 0.0f : top;
      correction[m][half] = ptx::Exp2((state.max[m][half] - from[m][half]) * scale_log2);
      state.max[m][half] = top;
      rises |= rise;
      far |= fabsf(from[m][half] * scale_log2) > kExactBase;
    }
  }
  if (__any_sync(~0u, rises)) {  // mostly in a row's first tiles
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < Traits::kHeadDimV / 8; ++n) {
          state.o[m][n][2 * half] *= correction[m][half];
          state.o[m][n][2 * half + 1] *= correction[m][half];
        }
        state.sum[m][half] *= correction[m][half];
      }
    }
  }
  if (__any_sync(~0u, far)) {  // rare
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          s[m][n][2 * half] -= from[m][half];
          s[m][n][2 * half + 1] -= from[m][half];
        }
        from[m][half] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float base = from[m][half] * scale_log2;
      if constexpr (Traits::kMayDrop) base -= keep_log2;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        s[m][n][2 * half] = ptx::Exp2(fmaf(s[m][n][2 * half], scale_log2, -base));
        s[m][n][2 * half + 1] = ptx::Exp2(fmaf(s[m][n][2 * half + 1], scale_log2, -base));
        state.sum[m][half] += s[m][n][2 * half] + s[m][n][2 * half + 1];
      }
    }
  }
}

// What dropout keeps of a tile: [64 keys].
template <class Traits>
struct TileKeeps {
  Keeps parts[Traits::kKeeps];
  // Masks of row `half` of row tile m: n8 tile n, one of its elements e, or both.
  __device__ __forceinline__ uint32_t Mask(int m, int half, int n, int e) const {
    return parts[n / 8].template Mask<Traits::kDraws>(n % 4 / 2, n % 2 * 2 + e, Draw(m, half, n));
  }
  __device__ __forceinline__ uint32_t PairMask(int m, int half, int n) const {
    return parts[n / 8].template PairMask<Traits::kDraws>(n % 4 / 2, n % 2, Draw(m, half, n));
  }
  static __device__ __forceinline__ int Draw(int m, int half, int n) {
    return (2 * m + half) * Traits::kDrawGroups + n % 8 / 4;
  }
};

template <class Traits>
__device__ __forceinline__ TileKeeps<Traits> DrawTile(const ForwardParams& p,
                                                      const ForwardPlace& at, int n) {
  TileKeeps<Traits> keeps;
#pragma unroll
  for (int part = 0; part < Traits::kKeeps; ++part) {
    keeps.parts[part] = DrawRows<2 * Traits::kRowTiles, Traits::kDrawGroups>(
        p.score, at.options.dropout_head, RowOf<Traits>(at, 0, 0),
        n * (Traits::kBlockN / 8) + part * 8, at.lane);
  }
  return keeps;
}

template <class Traits>
__device__ __forceinline__ void DropProbabilities(
    const TileKeeps<Traits>& keeps, float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t mask = keeps.Mask(m, e / 2, n, e % 2);
        s[m][n][e] = __uint_as_float(__float_as_uint(s[m][n][e]) & mask);
      }
    }
  }
}

// o += P V. kDropout: of the probabilities that `keeps` keeps.
template <class Traits>
__device__ __forceinline__ void Accumulate(
    const ForwardPlace& at, const TileKeeps<Traits>& keeps, ForwardState<Traits>& state,
    const float (&s)[Traits::kRowTiles][Traits::kBlockN / 8][4]) {
  using E = ptx::Element<typename Traits::T>;
  constexpr int kChunks = Traits::kVChunks;
#pragma unroll
  for (int step = 0; step < Traits::kBlockN / 16; ++step) {
    uint32_t a[Traits::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      a[m][0] = E::Pack(s[m][2 * step][0], s[m][2 * step][1]);
      a[m][1] = E::Pack(s[m][2 * step][2], s[m][2 * step][3]);
      a[m][2] = E::Pack(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
      a[m][3] = E::Pack(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
      if constexpr (Traits::kDropout) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          a[m][x] &= keeps.PairMask(m, x % 2, 2 * step + x / 2);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Traits::kHeadDimV / 16; ++n) {
      uint32_t b[4];
      ptx::LoadMatrix4Transposed(b, StepAddress<kChunks>(at.v_lane, n) + step * 16 * kChunks * 16);
#pragma unroll
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        E::Mma(state.o[m][2 * n], a[m], b[0], b[1]);
        E::Mma(state.o[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// One key tile. `shown`: bits of its squares (MaskBits). `next`: the tile to fetch meanwhile;
// negative: none.
template <class Traits, bool kMasked>
__device__ __forceinline__ void KeyTile(const ForwardParams& p, const ForwardPlace& at, int n,
                                        uint32_t shown, int next, ForwardState<Traits>& state) {
  constexpr int kBlockN = Traits::kBlockN;
  const int64_t k_row = p.k_strides.token * 2, v_row = p.v_strides.token * 2;
  float s[Traits::kRowTiles][kBlockN / 8][4];
  TileKeeps<Traits> keeps = {};
  if constexpr (Traits::kDropout) keeps = DrawTile<Traits>(p, at, n);  // while K arrives
  ptx::WaitCopies<0>();
  __syncthreads();
  LoadTile<kBlockN, Traits::kVChunks, Traits::kThreads, kMasked>(
      at.v_tile, at.v + static_cast<int64_t>(n) * kBlockN * v_row, v_row, at.s.len_k - n * kBlockN,
      p.head_dim_v / 8);
  ptx::CommitCopies();
  Scores<Traits>(at, s);
  if constexpr (Traits::kOptions) OptionScores<Traits>(p, at, n * kBlockN, s);
  if constexpr (kMasked) MaskScores<Traits>(p, at, n * kBlockN, shown, s);
  ptx::WaitCopies<0>();
  __syncthreads();
  if (next >= 0) {  // every tile before the first one taken is full
    LoadTile<kBlockN, Traits::kQkChunks, Traits::kThreads, false>(
        at.k_tile, at.k + static_cast<int64_t>(next) * kBlockN * k_row, k_row, kBlockN,
        p.head_dim / 8);
    ptx::CommitCopies();
  }
  OnlineSoftmax<Traits, kMasked || Traits::kOptions>(Traits::kOptions ? 1.0f : p.score.scale_log2,
                                                     p.score.keep_log2, state, s);
  if constexpr (Traits::kOptions) {
    if (p.score.threshold < 65536) DropProbabilities<Traits>(DrawTile<Traits>(p, at, n), s);
  }
  Accumulate<Traits>(at, keeps, state, s);
}

// The largest tile <= n and >= n_min of which the block mask shows something, and its bits; below
// n_min: none.
template <class Traits>
__device__ __forceinline__ int NextShownTile(const ForwardParams& p, const ForwardPlace& at, int n,
                                             int n_min, uint32_t* shown) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  return n - FindShown(
                 n - n_min + 1,
                 [&](int back) {
                   return MaskBits<kBlockM, kBlockN>(p.score, at.options.block_mask, at.s.len_q,
                                                     at.s.len_k, at.q0, (n - back) * kBlockN);
                 },
                 shown);
}

// Row `row` of an FP32 result, this lane's columns: whole sectors.
template <class Traits>
__device__ __forceinline__ void WriteRow(float* row, int head_dim_v, int lane, int half,
                                         float factor, const float (&o)[Traits::kHeadDimV / 8][4]) {
#pragma unroll
  for (int n = 0; n < Traits::kHeadDimV / 8; ++n) {
    const int c = n * 8 + (lane & 3) * 2;
    if (c >= head_dim_v) continue;
    *reinterpret_cast<float2*>(row + c) =
        make_float2(o[n][2 * half] * factor, o[n][2 * half + 1] * factor);
  }
}

// A warp's rows of a 16-bit out: through its rows of the query tile, which it alone has read, so
// that global memory is written 16 bytes at a time. `factors` are 0 in rows without keys.
template <class Traits>
__device__ __forceinline__ void WriteWarpRows(const ForwardParams& p, const ForwardPlace& at,
                                              const float (&factors)[Traits::kRowTiles][2],
                                              const ForwardState<Traits>& state) {
  using T = typename Traits::T;
  constexpr int kChunks = Traits::kVChunks, kRows = Traits::kRowTiles * 16;
  static_assert(Traits::kHeadDimV <= Traits::kHeadDim);
  const uint32_t tile = at.q_tile + at.warp * kRows * Traits::kQkChunks * 16;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        ptx::StoreShared(
            tile + TileOffset<kChunks>(m * 16 + half * 8 + at.lane / 4, n) + (at.lane & 3) * 4,
            ptx::Element<T>::Pack(state.o[m][n][2 * half] * factors[m][half],
                                  state.o[m][n][2 * half + 1] * factors[m][half]));
      }
    }
  }
  __syncwarp();
  const int first = at.q0 + at.warp * kRows;
  const int64_t out0 = at.s.batch * p.out_strides.batch + at.h * p.out_strides.head +
                       (at.s.q_token + first) * p.out_strides.token;
#pragma unroll 4
  for (int n = at.lane; n < kRows * kChunks; n += 32) {
    const int row = n / kChunks, chunk = n % kChunks;
    if (first + row < at.s.rows_q && chunk * 8 < p.head_dim_v) {
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + out0 + row * p.out_strides.token +
                                chunk * 8) =
          ptx::LoadShared16(tile + TileOffset<kChunks>(row, chunk));
    }
  }
}

template <class Traits>
__device__ __forceinline__ void WriteRows(const ForwardParams& p, const ForwardPlace& at,
                                          ForwardState<Traits>& state) {
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const bool partial = p.splits > 1;  // the sink is the merge's
  const float sink =
      p.score.sinks != nullptr && !partial ? __ldg(p.score.sinks + at.h) : -CUDART_INF_F;
  const int64_t lse_row0 = at.s.lse + at.h * p.lse_head;
  float factors[Traits::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if constexpr (Traits::kMayDrop) sum *= p.score.keep_inverse;
      const int i = RowOf<Traits>(at, m, half);
      const bool valid = i < at.s.len_q, has_keys = valid && sum != 0.0f;
      float lse = valid ? sink : -CUDART_INF_F;  // without keys exactly the sink
      factors[m][half] = 0.0f;                   // and o is 0 there
      if (has_keys) {
        lse = FinishRow(state.max[m][half] * scale_log2, sum, sink, &factors[m][half]);
      }
      if (i >= at.s.rows_q) continue;
      if (partial) {
        const int64_t row = at.split * p.partial_rows + lse_row0 + i;
        WriteRow<Traits>(p.partial_out + row * p.head_dim_v, p.head_dim_v, at.lane, half,
                         factors[m][half], state.o[m]);
        if ((at.lane & 3) == 0) p.partial_lse[row] = valid ? lse : CUDART_INF_F;
        continue;
      }
      if (p.out_fp32) {
        const int64_t row = at.s.batch * p.out_strides.batch + at.h * p.out_strides.head +
                            (at.s.q_token + i) * p.out_strides.token;
        WriteRow<Traits>(static_cast<float*>(p.out) + row, p.head_dim_v, at.lane, half,
                         factors[m][half], state.o[m]);
      }
      if ((at.lane & 3) == 0) p.lse[lse_row0 + i] = lse;
    }
  }
  if (!partial && !p.out_fp32) WriteWarpRows<Traits>(p, at, factors, state);
}

// Grid: tiles * splits * num_heads * batch, tiles fastest.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    Forward(const __grid_constant__ ForwardParams p) {
  using T = typename Traits::T;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  extern __shared__ __align__(1024) char shared[];
  ForwardPlace at;
  ptx::AllowDependents();  // Merge, which waits for all of this grid
  uint32_t block = blockIdx.x;
  const int tile = block % p.tiles;
  block /= p.tiles;
  at.split = block % p.splits;
  block /= p.splits;
  at.h = block % p.num_heads;
  at.b = block / p.num_heads;
  at.s = SequenceOf(p.sequences, at.b);
  at.q0 = (p.causal_order ? p.tiles - 1 - tile : tile) * kBlockM;
  if (at.q0 >= at.s.rows_q) return;
  at.lane = threadIdx.x % 32;
  at.warp = threadIdx.x / 32;
  at.q_tile = ptx::SharedAddress(shared);
  at.k_tile = at.q_tile + kBlockM * Traits::kQkChunks * 16;
  at.v_tile = at.k_tile + kBlockN * Traits::kQkChunks * 16;
  const int kv_head = at.h / (p.num_heads / p.num_kv_heads);
  const T* q = static_cast<const T*>(p.q) + at.s.batch * p.q_strides.batch +
               at.h * p.q_strides.head + (at.s.q_token + at.q0) * p.q_strides.token;
  at.k =
      reinterpret_cast<const char*>(static_cast<const T*>(p.k) + at.s.batch * p.k_strides.batch +
                                    kv_head * p.k_strides.head + at.s.k_token * p.k_strides.token);
  at.v =
      reinterpret_cast<const char*>(static_cast<const T*>(p.v) + at.s.batch * p.v_strides.batch +
                                    kv_head * p.v_strides.head + at.s.k_token * p.v_strides.token);
  at.options = OptionsOf(p.score, at.s, at.b, at.h, p.num_heads);

  ForwardState<Traits> state;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDimV / 8; ++n) {
      state.o[m][n][0] = state.o[m][n][1] = state.o[m][n][2] = state.o[m][n][3] = 0.0f;
    }
    state.max[m][0] = state.max[m][1] = -CUDART_INF_F;
    state.sum[m][0] = state.sum[m][1] = 0.0f;
  }

  // Key tiles that some row sees: [n_min, n]; those that every row sees whole: [full_begin,
  // full_end).
  const int q_last = min(at.q0 + kBlockM, at.s.len_q) - 1;
  const int key_end = min(at.s.len_k, q_last + at.s.off + p.score.window_right + 1);
  int n_min = max(0, at.q0 + at.s.off - p.score.window_left) / kBlockN;
  int n = q_last < at.q0 || key_end <= 0 ? -1 : (key_end + kBlockN - 1) / kBlockN - 1;
  if (p.splits > 1) {
    n_min = max(n_min, at.split * p.split_tiles);
    n = min(n, (at.split + 1) * p.split_tiles - 1);
  }
  // A tile with rows beyond len_q is never full: those rows see nothing.
  const int full_end =
      at.q0 + kBlockM > at.s.len_q
          ? 0
          : max(0, min(at.s.len_k, at.q0 + at.s.off + p.score.window_right + 1)) / kBlockN;
  const int full_begin = (max(0, q_last + at.s.off - p.score.window_left) + kBlockN - 1) / kBlockN;
  constexpr uint32_t kSquares = Traits::kSquares;
  const bool has_mask = at.options.block_mask != nullptr;
  uint32_t shown = kSquares;
  if (has_mask) n = NextShownTile<Traits>(p, at, n, n_min, &shown);

  if (n >= n_min) {
    LoadTile<kBlockM, Traits::kQkChunks, Traits::kThreads, true>(
        at.q_tile, reinterpret_cast<const char*>(q), p.q_strides.token * 2, at.s.len_q - at.q0,
        p.head_dim / 8);
    LoadTile<kBlockN, Traits::kQkChunks, Traits::kThreads, true>(
        at.k_tile, at.k + static_cast<int64_t>(n) * kBlockN * p.k_strides.token * 2,
        p.k_strides.token * 2, at.s.len_k - n * kBlockN, p.head_dim / 8);
    ptx::CommitCopies();
    const int lane = at.lane;
    at.q_lane = at.q_tile + TileOffset<Traits::kQkChunks>(
                                at.warp * 16 * Traits::kRowTiles + (lane & 15), lane >> 4);
    at.k_lane =
        at.k_tile + TileOffset<Traits::kQkChunks>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    at.v_lane = at.v_tile + TileOffset<Traits::kVChunks>(lane & 15, lane >> 4);
    while (n >= n_min) {
      uint32_t next_shown = kSquares;
      int next = n - 1;
      if (has_mask) next = NextShownTile<Traits>(p, at, n - 1, n_min, &next_shown);
      const int fetch = next >= n_min ? next : -1;
      if (n < full_end && n >= full_begin && shown == kSquares) {
        KeyTile<Traits, false>(p, at, n, shown, fetch, state);
      } else {
        KeyTile<Traits, true>(p, at, n, shown, fetch, state);
      }
      n = next;
      shown = next_shown;
    }
  }
  WriteRows<Traits>(p, at, state);
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_FORWARD_CUH_
