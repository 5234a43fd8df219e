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
#include "kernels/cuda/sm80/backward_scores.cuh"
#include "kernels/cuda/sm80/backward_traits.cuh"
#include "kernels/cuda/sm80/multiply.cuh"

namespace attn::cuda::sm80 {

// What the block mask shows of kMaskSteps steps from `first` on, into shared memory: a bit for each
// square of a step.
template <class Traits>
__device__ __forceinline__ void FillShown(const BackwardParams& p, const BackwardPlace& at,
                                          int count, int first) {
  const uint8_t* mask = p.score.block_mask + at.b * p.score.mask_batch;
#pragma unroll 1
  for (int word = at.warp; word < Traits::kMaskSteps / 32; word += Traits::kWarps) {
    const int it = first + word * 32 + at.lane;
    uint32_t bits = 0;
    if (it < count) {
      const int h = at.kv_head * at.group + it / at.m_count;
      bits = MaskBits<Traits::kBlockM, Traits::kBlockN>(
          p.score, mask + h * p.score.mask_head, at.s.len_q, at.s.len_k,
          (at.m_begin + it % at.m_count) * Traits::kBlockM, at.n0);
    }
#pragma unroll
    for (int square = 0; square < Traits::kSquareCount; ++square) {
      const uint32_t shown = __ballot_sync(~0u, bits >> square & 1);
      if (at.lane == 0) {
        ptx::StoreShared(at.shown + (word * Traits::kSquareCount + square) * 4, shown);
      }
    }
  }
}

// The first of the steps [it, end) of which the block mask shows something; `end`: none. Where
// kMasked they are among those of FillShown(); where kSearches they are looked at one by one.
template <class Traits>
__device__ __forceinline__ BackwardStep NextStep(const BackwardParams& p, const BackwardPlace& at,
                                                 int it, int end) {
  BackwardStep step{.it = it, .h = 0, .m0 = 0, .shown = Traits::kSquares};
  if constexpr (Traits::kMasked) {
    step.shown = 0;
#pragma unroll 1
    while (step.it < end && step.shown == 0) {
      const int bit = step.it % 32;
      const uint32_t word =
          at.shown + step.it % Traits::kMaskSteps / 32 * (Traits::kSquareCount * 4);
      uint32_t squares[Traits::kSquareCount], any = 0;
#pragma unroll
      for (int square = 0; square < Traits::kSquareCount; ++square) {
        squares[square] = ptx::LoadShared(word + square * 4) >> bit;
        any |= squares[square];
      }
      const int ahead = __ffs(any) - 1;
      step.it += any != 0 ? ahead : 32 - bit;
#pragma unroll
      for (int square = 0; any != 0 && square < Traits::kSquareCount; ++square) {
        step.shown |= (squares[square] >> ahead & 1) << square;
      }
    }
    step.it = min(step.it, end);
  } else if (Traits::kSearches && p.score.block_mask != nullptr) {
    const uint8_t* mask = p.score.block_mask + at.b * p.score.mask_batch;
    step.it += FindShown(
        end - it,
        [&](int ahead) {
          const int h = at.kv_head * at.group + (it + ahead) / at.m_count;
          return MaskBits<Traits::kBlockM, Traits::kBlockN>(
              p.score, mask + h * p.score.mask_head, at.s.len_q, at.s.len_k,
              (at.m_begin + (it + ahead) % at.m_count) * Traits::kBlockM, at.n0);
        },
        &step.shown);
  }
  if (step.it < end) {
    step.h = at.kv_head * at.group + step.it / at.m_count;
    step.m0 = (at.m_begin + step.it % at.m_count) * Traits::kBlockM;
  }
  return step;
}

// The one after `step`. Where no block mask is looked at, that is the next query tile, or the first
// of another head: no division, whose registers spilled others.
template <class Traits>
__device__ __forceinline__ BackwardStep StepAfter(const BackwardParams& p, const BackwardPlace& at,
                                                  const BackwardStep& step, int end) {
  if constexpr (Traits::kMasked || Traits::kSearches) {
    return NextStep<Traits>(p, at, step.it + 1, end);
  }
  BackwardStep next = step;
  ++next.it;
  next.m0 += Traits::kBlockM;
  if (next.m0 == (at.m_begin + at.m_count) * Traits::kBlockM) {
    next.m0 = at.m_begin * Traits::kBlockM;
    ++next.h;
  }
  return next;
}

// Q, dO, lse2 and delta of a step into buffer `stage`.
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
  constexpr int kCopies = kBlockM / 4;  // of each; the padded rows are all there
  if (threadIdx.x < 2 * kCopies) {
    const int which = threadIdx.x / kCopies, first = threadIdx.x % kCopies * 4;
    const float* rows = which == 0 ? p.lse2 : p.delta;
    ptx::CopyAsync16(at.rows + stage * Traits::kRowBytes + (which * kBlockM + first) * 4,
                     rows + step.h * p.padded_rows + at.s.padded + step.m0 + first, true);
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

// A warp's part of dK or dV into `tile`, 16-bit.
template <class Traits, int kChunks, int kDims>
__device__ __forceinline__ void StageKeyRows(const BackwardPlace& at, uint32_t tile, float scale,
                                             const float (&x)[Traits::kDkvKeys][kDims][4]) {
  const int warp_n = at.warp % Traits::kDkvWarpsN, warp_d = at.warp / Traits::kDkvWarpsN;
#pragma unroll
  for (int i = 0; i < Traits::kDkvKeys; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (warp_n * Traits::kDkvKeys + i) * 16 + half * 8 + at.lane / 4;
#pragma unroll
      for (int j = 0; j < kDims; ++j) {
        ptx::StoreShared(tile + TileOffset<kChunks>(row, warp_d * kDims + j) + (at.lane & 3) * 4,
                         ptx::Element<typename Traits::T>::Pack(x[i][j][2 * half] * scale,
                                                                x[i][j][2 * half + 1] * scale));
      }
    }
  }
}

// `tile` into dK or dV, 16 bytes at a time.
template <class Traits, int kChunks>
__device__ __forceinline__ void CopyKeyRows(const BackwardPlace& at, uint32_t tile, void* data,
                                            const TensorStrides& strides, int head_dim) {
  using T = typename Traits::T;
  T* to = static_cast<T*>(data) + at.s.batch * strides.batch + at.kv_head * strides.head +
          (at.s.k_token + at.n0) * strides.token;
#pragma unroll 4
  for (int n = threadIdx.x; n < Traits::kBlockN * kChunks; n += Traits::kThreads) {
    const int row = n / kChunks, chunk = n % kChunks;
    if (at.n0 + row < at.s.rows_k && chunk * 8 < head_dim) {
      *reinterpret_cast<uint4*>(to + row * strides.token + chunk * 8) =
          ptx::LoadShared16(tile + TileOffset<kChunks>(row, chunk));
    }
  }
}

// A warp's part of dK or dV, straight from registers; `data` and `strides` are the whole tensor's.
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
  at.rows = at.ds_tile + kBlockN * kMChunks * 16;
  at.shown = at.rows + Traits::kStages * Traits::kRowBytes;

  // Queries that see some key of the tile.
  const int n_last = min(at.n0 + kBlockN, at.s.len_k) - 1;
  const int begin = max(0, at.n0 - at.s.off - p.score.window_right);
  const int end = min(at.s.len_q, n_last - at.s.off + p.score.window_left + 1);
  at.m_begin = begin / kBlockM;
  at.m_count = begin < end && n_last >= at.n0 ? (end + kBlockM - 1) / kBlockM - at.m_begin : 0;

  float dk[Traits::kDkvKeys][Traits::kDkDims][4], dv[Traits::kDkvKeys][Traits::kDvDims][4];
  Clear(dk);
  Clear(dv);
  const auto walk = [&](int begin, int end) {
    BackwardStep step = NextStep<Traits>(p, at, begin, end);
    if (step.it >= end) return;
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

    // Drawing keeps the integer units busy and the matrix products the tensor cores. So the draws
    // for a step are made among the products of the step before: half the warps, one of the two
    // that share a scheduler, make them first, the other half last.
    const bool draws_first = at.warp < Traits::kWarps / 2;
    Keeps keeps = {};
    if constexpr (Traits::kDropout) keeps = DrawStep<Traits>(p, at, step);
    for (int round = 0; step.it < end; ++round) {
      const int stage = round % Traits::kStages;
      const uint32_t q_tile = at.q_tiles + stage * kBlockM * kQkChunks * 16;
      const uint32_t dout_tile = at.dout_tiles + stage * kBlockM * kVChunks * 16;
      ptx::WaitCopies<0>();
      __syncthreads();
      const BackwardStep next = StepAfter<Traits>(p, at, step, end);
      if (Traits::kStages > 1 && next.it < end) {
        FetchQueries<Traits>(p, at, next, (round + 1) % Traits::kStages);
        ptx::CommitCopies();
      }
      const float* lse2 = reinterpret_cast<const float*>(shared + Traits::kTileBytes) +
                          stage * (Traits::kRowBytes / 4) + s_column + (lane & 3) * 2;
      const float* delta = lse2 + kBlockM;
      ScoreTile<Traits> s, dp;
      Clear(s);
      Clear(dp);
      MultiplyRows<T, kQkChunks, Traits::kHeadDim / 16>(
          k_lane, q_tile + TileOffset<kQkChunks>(s_column + right_row, right_chunk), s);
      if constexpr (!Traits::kOptions) {
        Probabilities<Traits>(p, at, step, lse2, s);
        StoreTransposed<Traits, Traits::kDropout>(at, at.p_tile, keeps, s);
      }
      MultiplyRows<T, kVChunks, Traits::kHeadDimV / 16>(
          v_lane, dout_tile + TileOffset<kVChunks>(s_column + right_row, right_chunk), dp);
      if constexpr (Traits::kOptions) {
        ApplyOptions<Traits>(p, at, step, lse2, delta, s, dp);
        StoreTransposed<Traits, false>(at, at.p_tile, keeps, s);
      } else {
        if constexpr (Traits::kDropout) Drop<Traits>(keeps, dp);
        ScoreGradients<Traits>(delta, s, dp);
      }
      StoreTransposed<Traits, false>(at, at.ds_tile, keeps, dp);
      __syncthreads();
      if constexpr (Traits::kDropout) {
        if (draws_first && next.it < end) keeps = DrawStep<Traits>(p, at, next);
      }
      MultiplyColumns<T, kMChunks, kVChunks, kBlockM / 16>(
          p_lane, dout_tile + TileOffset<kVChunks>(left_row, left_chunk),
          d_warp_d * (Traits::kDvDims / 2), dv);
      if (p.dq_accumulator != nullptr) AddQueryGradient<Traits>(p, at, step);
      MultiplyColumns<T, kMChunks, kQkChunks, kBlockM / 16>(
          ds_lane, q_tile + TileOffset<kQkChunks>(left_row, left_chunk),
          d_warp_d * (Traits::kDkDims / 2), dk);
      if constexpr (Traits::kDropout) {
        if (!draws_first && next.it < end) keeps = DrawStep<Traits>(p, at, next);
      }
      if (Traits::kStages == 1) {
        __syncthreads();
        if (next.it < end) {
          FetchQueries<Traits>(p, at, next, 0);
          ptx::CommitCopies();
        }
      }
      step = next;
    }
  };
  const int count = at.m_count * at.group;
  if constexpr (Traits::kMasked) {
    for (int begin = 0; begin < count; begin += Traits::kMaskSteps) {
      __syncthreads();  // the steps before are done
      FillShown<Traits>(p, at, count, begin);
      __syncthreads();
      walk(begin, min(begin + Traits::kMaskSteps, count));
    }
  } else {
    walk(0, count);
  }
  if (p.grads_fp32) {
    WriteKeyRows<Traits>(p, at, p.dk, p.dk_strides, p.head_dim, p.score.scale, dk);
    WriteKeyRows<Traits>(p, at, p.dv, p.dv_strides, p.head_dim_v, 1.0f, dv);
    return;
  }
  __syncthreads();  // K and V have been read
  StageKeyRows<Traits, kQkChunks>(at, at.k_tile, p.score.scale, dk);
  StageKeyRows<Traits, kVChunks>(at, at.v_tile, 1.0f, dv);
  __syncthreads();
  CopyKeyRows<Traits, kQkChunks>(at, at.k_tile, p.dk, p.dk_strides, p.head_dim);
  CopyKeyRows<Traits, kVChunks>(at, at.v_tile, p.dv, p.dv_strides, p.head_dim_v);
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_BACKWARD_CUH_
