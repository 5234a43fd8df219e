// dQ alone, without atomic additions: one CTA computes one tile of queries, walking over the key
// tiles that it sees in order: S = Q K^T, P, dP = dO V^T, dQ += dS K. For deterministic calls,
// where the key tiles of Backward would add to dQ in any order.
#ifndef ATTN_KERNELS_CUDA_SM80_QUERY_GRADIENT_CUH_
#define ATTN_KERNELS_CUDA_SM80_QUERY_GRADIENT_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/kernel_params.h"
#include "kernels/cuda/sm80/multiply.cuh"

namespace attn::cuda::sm80 {

// Tile is a ForwardTile of tiles.h with 16 rows per warp. kRowDot: row_dot, into delta; else dQ.
template <class T_, class Tile_, bool kRowDot_>
struct QueryGradientTraits : Tile_ {
  using T = T_;
  static constexpr bool kRowDot = kRowDot_;
  static constexpr int kThreads = Tile_::kWarps * 32;
  static constexpr int kQkChunks = Tile_::kHeadDim / 8, kVChunks = Tile_::kHeadDimV / 8;
  static constexpr int kColumns = Tile_::kBlockN / 8;  // n8 tiles of scores
  static constexpr int kSharedBytes =
      (Tile_::kBlockM + Tile_::kBlockN) * (Tile_::kHeadDim + Tile_::kHeadDimV) * 2;
  static constexpr uint32_t kSquares =
      (uint32_t{1} << (Tile_::kBlockM / kMaskStep) * (Tile_::kBlockN / kMaskStep)) - 1;
  static_assert(Tile_::kBlockM == 16 * Tile_::kWarps);
};

struct QueryGradientPlace {
  DeviceSequence s;
  int b, h, q0, warp, lane;
  HeadOptions options;
};

// Of one warp's 16 rows; s holds raw products. kRowDot: row_dot += sum of P dP over this lane's
// columns. Else dp into gradients of the raw products (times scale).
template <class Traits>
__device__ __forceinline__ void RowGradients(const BackwardParams& p, const QueryGradientPlace& at,
                                             int n0, uint32_t shown,
                                             float (&s)[1][Traits::kColumns][4],
                                             float (&dp)[1][Traits::kColumns][4],
                                             float (&row_dot)[2]) {
  constexpr int kSquareColumns = Traits::kBlockN / kMaskStep;
  const int quad = at.lane & 3, in_tile = at.warp * 16 + at.lane / 4;
  if (p.score.threshold < 65536) {
    constexpr int kGroups = Traits::kColumns / 4;
    static_assert(Traits::kColumns % 4 == 0);
    const Keeps keeps =
        DrawRows<2, kGroups>(p.score, at.options.dropout_head, at.q0 + in_tile, n0 / 8, at.lane);
#pragma unroll
    for (int n = 0; n < Traits::kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t mask =
            keeps.Mask<2 * kGroups>(n % 4 / 2, n % 2 * 2 + e % 2, e / 2 * kGroups + n / 4);
        dp[0][n][e] = __uint_as_float(__float_as_uint(dp[0][n][e]) & mask);
      }
    }
  }
  float lse2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.h * p.padded_rows + at.s.padded + at.q0 + in_tile + half * 8;
    lse2[half] = p.lse2[row];
    delta[half] = Traits::kRowDot ? 0.0f : p.delta[row];
  }
#pragma unroll
  for (int n = 0; n < Traits::kColumns; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[0][n][e] -= delta[e >> 1];
  }
  ApplyScoreOptions<!Traits::kRowDot>(
      p.score, at.options, at.s.len_q, at.s.len_k, at.s.off,
      [&](int, int, int e) { return at.q0 + in_tile + (e >> 1) * 8; },
      [&](int, int n, int e) { return n0 + n * 8 + quad * 2 + (e & 1); }, s, dp);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.q0 + in_tile + half * 8;
    const int end = i < at.s.len_q ? min(at.s.len_k, i + at.s.off + p.score.window_right + 1) : 0;
    const int begin = i + at.s.off - p.score.window_left;
#pragma unroll
    for (int n = 0; n < Traits::kColumns; ++n) {
      const int square = (in_tile + half * 8) / kMaskStep * kSquareColumns + n * 8 / kMaskStep;
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const int j = n0 + n * 8 + quad * 2 + (e & 1);
        const bool visible = j < end && j >= begin && (shown >> square & 1) != 0;
        const float prob = visible ? ptx::Exp2(s[0][n][e] - lse2[half]) : 0.0f;
        if constexpr (Traits::kRowDot) {
          if (visible) row_dot[half] = fmaf(prob, dp[0][n][e], row_dot[half]);
        } else {
          dp[0][n][e] = visible ? prob * dp[0][n][e] : 0.0f;
        }
      }
    }
  }
}

// dq += dS K of a key tile. `k_columns`: this lane's ldmatrix row of K.
template <class Traits>
__device__ __forceinline__ void AddKeyTile(uint32_t k_columns,
                                           const float (&ds)[1][Traits::kColumns][4],
                                           float (&dq)[1][Traits::kHeadDim / 8][4]) {
  using E = ptx::Element<typename Traits::T>;
#pragma unroll
  for (int k = 0; k < Traits::kBlockN / 16; ++k) {
    const uint32_t a[4] = {E::Pack(ds[0][2 * k][0], ds[0][2 * k][1]),
                           E::Pack(ds[0][2 * k][2], ds[0][2 * k][3]),
                           E::Pack(ds[0][2 * k + 1][0], ds[0][2 * k + 1][1]),
                           E::Pack(ds[0][2 * k + 1][2], ds[0][2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < Traits::kHeadDim / 16; ++j) {
      uint32_t b[4];
      ptx::LoadMatrix4Transposed(
          b, StepAddress<Traits::kQkChunks>(k_columns, j) + k * 16 * Traits::kQkChunks * 16);
      E::Mma(dq[0][2 * j], a, b[0], b[1]);
      E::Mma(dq[0][2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Grid: query_tiles * num_heads * batch, query tiles (of this kernel) fastest.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    QueryGradient(const __grid_constant__ BackwardParams p) {
  using T = typename Traits::T;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kQkChunks = Traits::kQkChunks, kVChunks = Traits::kVChunks;
  extern __shared__ __align__(1024) char shared[];
  QueryGradientPlace at;
  at.h = blockIdx.x / p.query_tiles % p.num_heads;
  at.b = blockIdx.x / p.query_tiles / p.num_heads;
  at.s = SequenceOf(p.sequences, at.b);
  at.q0 = static_cast<int>(blockIdx.x % p.query_tiles) * kBlockM;
  if (at.q0 >= at.s.rows_q) return;
  at.lane = threadIdx.x % 32;
  at.warp = threadIdx.x / 32;
  at.options = OptionsOf(p.score, at.s, at.b, at.h, p.num_heads);
  const int kv_head = at.h / (p.num_heads / p.num_kv_heads), lane = at.lane;
  const uint32_t q_tile = ptx::SharedAddress(shared), dout_tile = q_tile + kBlockM * kQkChunks * 16;
  const uint32_t k_tile = dout_tile + kBlockM * kVChunks * 16,
                 v_tile = k_tile + kBlockN * kQkChunks * 16;
  const auto row_of = [&](const void* data, const TensorStrides& strides, int head, int64_t token) {
    return reinterpret_cast<const char*>(static_cast<const T*>(data) + at.s.batch * strides.batch +
                                         head * strides.head + token * strides.token);
  };

  const int q_last = min(at.q0 + kBlockM, at.s.len_q) - 1;
  const int key_end = min(at.s.len_k, q_last + at.s.off + p.score.window_right + 1);
  const int n_end = q_last < at.q0 || key_end <= 0 ? 0 : (key_end + kBlockN - 1) / kBlockN;
  float dq[1][Traits::kHeadDim / 8][4];
  float row_dot[2] = {0.0f, 0.0f};
  Clear(dq);
  if (n_end > 0) {
    LoadTile<kBlockM, kQkChunks, Traits::kThreads, true>(
        q_tile, row_of(p.q, p.q_strides, at.h, at.s.q_token + at.q0), p.q_strides.token * 2,
        at.s.len_q - at.q0, p.head_dim / 8);
    LoadTile<kBlockM, kVChunks, Traits::kThreads, true>(
        dout_tile, row_of(p.dout, p.dout_strides, at.h, at.s.q_token + at.q0),
        p.dout_strides.token * 2, at.s.len_q - at.q0, p.head_dim_v / 8);
  }
  const int left = at.warp * 16 + (lane & 15), left_chunk = lane >> 4;
  const int right_row = (lane & 7) + ((lane >> 4) << 3), right_chunk = (lane >> 3) & 1;
  const uint32_t k_columns = k_tile + TileOffset<kQkChunks>(lane & 15, lane >> 4);
  for (int n = max(0, at.q0 + at.s.off - p.score.window_left) / kBlockN; n < n_end; ++n) {
    const int n0 = n * kBlockN;
    uint32_t shown = Traits::kSquares;
    if (at.options.block_mask != nullptr) {
      shown = MaskBits<kBlockM, kBlockN>(p.score, at.options.block_mask, at.s.len_q, at.s.len_k,
                                         at.q0, n0);
      if (shown == 0) continue;  // the same in every thread
    }
    __syncthreads();  // the tiles of the step before have been read
    LoadTile<kBlockN, kQkChunks, Traits::kThreads, true>(
        k_tile, row_of(p.k, p.k_strides, kv_head, at.s.k_token + n0), p.k_strides.token * 2,
        at.s.len_k - n0, p.head_dim / 8);
    LoadTile<kBlockN, kVChunks, Traits::kThreads, true>(
        v_tile, row_of(p.v, p.v_strides, kv_head, at.s.k_token + n0), p.v_strides.token * 2,
        at.s.len_k - n0, p.head_dim_v / 8);
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    __syncthreads();
    float s[1][Traits::kColumns][4], dp[1][Traits::kColumns][4];
    Clear(s);
    Clear(dp);
    MultiplyRows<T, kQkChunks, Traits::kHeadDim / 16>(
        q_tile + TileOffset<kQkChunks>(left, left_chunk),
        k_tile + TileOffset<kQkChunks>(right_row, right_chunk), s);
    MultiplyRows<T, kVChunks, Traits::kHeadDimV / 16>(
        dout_tile + TileOffset<kVChunks>(left, left_chunk),
        v_tile + TileOffset<kVChunks>(right_row, right_chunk), dp);
    RowGradients<Traits>(p, at, n0, shown, s, dp, row_dot);
    if constexpr (!Traits::kRowDot) AddKeyTile<Traits>(k_columns, dp, dq);
  }
  ptx::CommitCopies();
  ptx::WaitCopies<0>();

  if constexpr (Traits::kRowDot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_dot[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int i = at.q0 + at.warp * 16 + half * 8 + lane / 4;
      if ((lane & 3) != 0 || i >= at.s.len_q) continue;
      const int64_t row = at.h * p.padded_rows + at.s.padded + i;
      const float dlse = p.dlse != nullptr ? p.dlse[at.s.lse + at.h * p.lse_head + i] : 0.0f;
      // Rows without weight keep the 0 that Prepare wrote.
      if (p.lse2[row] != CUDART_INF_F) p.delta[row] = (sum - dlse) * p.score.keep_inverse;
    }
    return;
  }
  const int64_t row0 = at.s.batch * p.dq_strides.batch + at.h * p.dq_strides.head +
                       at.s.q_token * p.dq_strides.token;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.q0 + at.warp * 16 + half * 8 + lane / 4;
    if (i >= at.s.rows_q) continue;
#pragma unroll
    for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
      const int c = j * 8 + (lane & 3) * 2;
      if (c < p.head_dim) {
        StorePair<T>(p.dq, p.grads_fp32, row0 + i * p.dq_strides.token + c,
                     dq[0][j][2 * half] * p.score.scale, dq[0][j][2 * half + 1] * p.score.scale);
      }
    }
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_QUERY_GRADIENT_CUH_
