// Forward for few queries: the rows of a CTA are (query, query head of the group) pairs of one kv
// head, 16 of them, so that each key is read once for the whole group; each warp takes keys of its
// own, 32 at a time through buffers of its own, and the warps' results are merged at the end. Bound
// by reading keys and values: loads of the next keys are under way while these are worked on, and
// no warp waits for another but in lockstep: there two neighbouring heads are a cluster, whose
// warps are at most a turn apart, because heads that are read together share rows of memory.
#ifndef ATTN_KERNELS_CUDA_SM80_DECODE_CUH_
#define ATTN_KERNELS_CUDA_SM80_DECODE_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/sm80/forward.cuh"
#include "kernels/cuda/sm80/kernel_params.h"
#include "kernels/cuda/sm80/tiles.h"

namespace attn::cuda::sm80 {

// Tile is a DecodeTile of tiles.h. kOptions as for the forward kernel.
template <class T_, class Tile_, bool kOptions_>
struct DecodeTraits : Tile_ {
  using T = T_;
  static constexpr bool kOptions = kOptions_;
  static constexpr int kThreads = Tile_::kWarps * 32;
  static constexpr int kRows = kDecodeRows, kKeys = Tile_::kKeys;
  static constexpr int kQkChunks = Tile_::kHeadDim / 8, kVChunks = Tile_::kHeadDimV / 8;
  static constexpr int kQueryBytes = kRows * kQkChunks * 16;
  static constexpr int kStageBytes = kKeys * (kQkChunks + kVChunks) * 16;
  // Outputs of all warps, with their maxima and sums, when the loop is over.
  static constexpr int kMergeStride = Tile_::kHeadDimV + 8;  // floats; eight rows in other banks
  static constexpr int kMergeBytes = Tile_::kWarps * kRows * (kMergeStride + 2) * 4;
  static constexpr int kLoopBytes = kQueryBytes + Tile_::kWarps * Tile_::kStages * kStageBytes;
  static constexpr int kSharedBytes = kLoopBytes > kMergeBytes ? kLoopBytes : kMergeBytes;
};

struct DecodePlace {
  DeviceSequence s;
  int b, kv_head, group, split, row0, rows;  // rows: of the kv head, stored
  int warp, lane;
  uint32_t q_lane, k_lane, v_lane;  // this lane's ldmatrix rows; of K and V in stage 0
  uint32_t stages;                  // this warp's buffers
  const char *k, *v;                // row 0 of the kv head
};

template <class Traits>
struct DecodeState {
  float o[Traits::kHeadDimV / 8][4];
  float max[2], sum[2];  // as ForwardState; sum of this lane's columns
};

// One of this lane's two rows.
struct DecodeRow {
  int i, h;        // query, query head
  int begin, end;  // keys it sees by lengths, causal and window
  HeadOptions options;
};

template <class Traits>
__device__ __forceinline__ DecodeRow RowAt(const ForwardParams& p, const DecodePlace& at, int row) {
  DecodeRow r;
  r.i = row / at.group;
  r.h = at.kv_head * at.group + row % at.group;
  const bool valid = row < at.rows && r.i < at.s.len_q;
  if (row >= at.rows) r.h = at.kv_head * at.group;
  r.end = valid ? min(at.s.len_k, r.i + at.s.off + p.score.window_right + 1) : 0;
  r.begin = max(0, r.i + at.s.off - p.score.window_left);
  r.options = OptionsOf(p.score, at.s, at.b, r.h, p.num_heads);
  return r;
}

// Keys kKeys * chunk … of this warp into `stage`.
template <class Traits>
__device__ __forceinline__ void FetchKeys(const ForwardParams& p, const DecodePlace& at, int chunk,
                                          int stage) {
  constexpr int kKeys = Traits::kKeys;
  const uint32_t k_tile = at.stages + stage * Traits::kStageBytes;
  const uint32_t v_tile = k_tile + kKeys * Traits::kQkChunks * 16;
  const int64_t k_bytes = p.k_strides.token * 2, v_bytes = p.v_strides.token * 2;
  const int first = chunk * kKeys;
#pragma unroll
  for (int n = 0; n < kKeys * Traits::kQkChunks / 32; ++n) {
    const int at_row = (n * 32 + at.lane) / Traits::kQkChunks;
    const int at_chunk = (n * 32 + at.lane) % Traits::kQkChunks;
    const bool valid = first + at_row < at.s.len_k && at_chunk < p.head_dim / 8;
    ptx::CopyAsync16(k_tile + TileOffset<Traits::kQkChunks>(at_row, at_chunk),
                     at.k + (first + at_row) * k_bytes + at_chunk * 16, valid);
  }
#pragma unroll
  for (int n = 0; n < kKeys * Traits::kVChunks / 32; ++n) {
    const int at_row = (n * 32 + at.lane) / Traits::kVChunks;
    const int at_chunk = (n * 32 + at.lane) % Traits::kVChunks;
    const bool valid = first + at_row < at.s.len_k && at_chunk < p.head_dim_v / 8;
    ptx::CopyAsync16(v_tile + TileOffset<Traits::kVChunks>(at_row, at_chunk),
                     at.v + (first + at_row) * v_bytes + at_chunk * 16, valid);
  }
}

// Raw products into log2 scores (kOptions), hidden ones into -infinity.
template <class Traits>
__device__ __forceinline__ void MaskRow(const ForwardParams& p, const DecodePlace& at,
                                        const DecodeRow& row, int n0, int half, float (&s)[2][4]) {
  bool shown = true;
  if (row.options.block_mask != nullptr && n0 < row.end) {
    shown = __ldg(row.options.block_mask +
                  static_cast<int64_t>(row.i / p.score.block_q) * p.score.mask_cols +
                  n0 / p.score.block_k) != 0;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = n0 + n * 8 + (at.lane & 3) * 2 + e;
      float& x = s[n][2 * half + e];
      if (!shown || j < row.begin || j >= row.end) {
        x = -CUDART_INF_F;
      } else if constexpr (Traits::kOptions) {
        x = Score2<false>(p.score, row.options, x, row.i, j, at.s.off, nullptr);
      }
    }
  }
}

// Drops probabilities. The four lanes of a pair of rows make one draw each: (row, eight keys).
__device__ __forceinline__ void DropProbabilities(const ForwardParams& p, const DecodePlace& at,
                                                  const DecodeRow (&rows)[2], int n0,
                                                  float (&s)[2][4]) {
  const int quad = at.lane & 3;
  const bool low = quad < 2;  // selected by value: an index would put the rows into local memory
  const uint32_t bits =
      KeepBits(p.score, low ? rows[0].options.dropout_head : rows[1].options.dropout_head,
               low ? rows[0].i : rows[1].i, n0 / 8 + (quad & 1));
#pragma unroll
  for (int draw = 0; draw < 4; ++draw) {
    const uint32_t keep = __shfl_sync(~0u, bits, (at.lane & ~3) + draw) >> (2 * quad);
    float* x = &s[draw & 1][2 * (draw >> 1)];
    x[0] = keep & 1 ? x[0] * p.score.keep_scale : 0.0f;
    x[1] = keep & 2 ? x[1] * p.score.keep_scale : 0.0f;
  }
}

// Keys n0 … n0 + kKeys - 1, all at once, because few warps hide little of an instruction's latency;
// k_lane, v_lane: this lane's ldmatrix rows of them.
template <class Traits>
__device__ __forceinline__ void DecodeKeys(const ForwardParams& p, const DecodePlace& at,
                                           const DecodeRow (&rows)[2], int n0, uint32_t k_lane,
                                           uint32_t v_lane, DecodeState<Traits>& state) {
  using E = ptx::Element<typename Traits::T>;
  constexpr int kParts = Traits::kKeys / 16;
  constexpr int kKPart = 16 * Traits::kQkChunks * 16, kVPart = 16 * Traits::kVChunks * 16;
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  float s[kParts][2][4] = {};
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    uint32_t a[4];
    ptx::LoadMatrix4(a, StepAddress<Traits::kQkChunks>(at.q_lane, step));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t b[4];
      ptx::LoadMatrix4(b, StepAddress<Traits::kQkChunks>(k_lane, step) + part * kKPart);
      E::Mma(s[part][0], a, b[0], b[1]);
      E::Mma(s[part][1], a, b[2], b[3]);
    }
  }
  float correction[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -CUDART_INF_F;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&x)[2][4] = s[part];
      MaskRow<Traits>(p, at, rows[half], n0 + part * 16, half, x);
      top = fmaxf(top, fmaxf(fmaxf(x[0][2 * half], x[0][2 * half + 1]),
                             fmaxf(x[1][2 * half], x[1][2 * half + 1])));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 2)), state.max[half]);
    const float from = top == -CUDART_INF_F ? 0.0f : top;
    correction[half] = ptx::Exp2((state.max[half] - from) * scale_log2);
    state.max[half] = top;
    float sums[kParts] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[part][n][2 * half + e];
          x = ptx::Exp2((x - from) * scale_log2);
          sums[part] += x;
        }
      }
    }
    float sum = sums[0];
#pragma unroll
    for (int part = 1; part < kParts; ++part) sum += sums[part];
    state.sum[half] = state.sum[half] * correction[half] + sum;
  }
  if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[n][e] *= correction[e >> 1];
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float(&x)[2][4] = s[part];
    if constexpr (Traits::kOptions) {
      if (p.score.threshold < 65536) DropProbabilities(p, at, rows, n0 + part * 16, x);
    }
    const uint32_t a[4] = {E::Pack(x[0][0], x[0][1]), E::Pack(x[0][2], x[0][3]),
                           E::Pack(x[1][0], x[1][1]), E::Pack(x[1][2], x[1][3])};
#pragma unroll
    for (int n = 0; n < Traits::kHeadDimV / 16; ++n) {
      uint32_t b[4];
      ptx::LoadMatrix4Transposed(b, StepAddress<Traits::kVChunks>(v_lane, n) + part * kVPart);
      E::Mma(state.o[2 * n], a, b[0], b[1]);
      E::Mma(state.o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Merges the warps' results through shared memory and writes the rows: partial or final.
template <class Traits>
__device__ __forceinline__ void MergeWarps(const ForwardParams& p, const DecodePlace& at,
                                           char* shared, DecodeState<Traits>& state) {
  using T = typename Traits::T;
  constexpr int kRows = Traits::kRows, kDv = Traits::kHeadDimV, kWarps = Traits::kWarps;
  constexpr int kStride = Traits::kMergeStride;
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  float* o = reinterpret_cast<float*>(shared);  // [warp][row][kStride]
  float* max2 = o + kWarps * kRows * kStride;   // [warp][row], log2 units
  float* sums = max2 + kWarps * kRows;
  const int rows = min(kRows, at.rows - at.row0);
  ptx::WaitCopies<0>();
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= rows) break;
    const int row = at.warp * kRows + half * 8 + at.lane / 4;
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if ((at.lane & 3) == 0) {
      max2[row] = sum != 0.0f ? state.max[half] * scale_log2 : -CUDART_INF_F;
      sums[row] = sum;
    }
#pragma unroll
    for (int n = 0; n < kDv / 8; ++n) {
      *reinterpret_cast<float2*>(o + row * kStride + n * 8 + (at.lane & 3) * 2) =
          make_float2(state.o[n][2 * half], state.o[n][2 * half + 1]);
    }
  }
  __syncthreads();
  // As many threads to a row as there are, a power of two.
  const int row_lanes = Traits::kThreads >> (32 - __clz(rows - 1));
  const int row = threadIdx.x / row_lanes, first = threadIdx.x % row_lanes * 2;
  if (row >= rows) return;
  const int i = (at.row0 + row) / at.group, h = at.kv_head * at.group + (at.row0 + row) % at.group;
  const bool valid = i<at.s.len_q, partial = p.splits> 1;
  float top = -CUDART_INF_F, sum = 0.0f, weights[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, max2[w * kRows + row]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = top == -CUDART_INF_F ? 0.0f : ptx::Exp2(max2[w * kRows + row] - top);
    sum += weights[w] * sums[w * kRows + row];
  }
  const bool has_keys = valid && sum != 0.0f;
  const float sink =
      p.score.sinks != nullptr && !partial ? __ldg(p.score.sinks + h) : -CUDART_INF_F;
  float lse = valid ? sink : -CUDART_INF_F, factor = 0.0f;
  if (has_keys) lse = FinishRow(top, sum, sink, &factor);
  const int64_t lse_row = at.s.lse + h * p.lse_head + i;
  const int64_t partial_row = at.split * p.partial_rows + lse_row;
  const int64_t out_row = at.s.batch * p.out_strides.batch + h * p.out_strides.head +
                          (at.s.q_token + i) * p.out_strides.token;
  for (int c = first; c < p.head_dim_v; c += 2 * row_lanes) {
    float x = 0.0f, y = 0.0f;
    if (has_keys) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(o + (w * kRows + row) * kStride + c);
        x += weights[w] * part.x;
        y += weights[w] * part.y;
      }
      x *= factor;
      y *= factor;
    }
    if (partial) {
      *reinterpret_cast<float2*>(p.partial_out + partial_row * p.head_dim_v + c) =
          make_float2(x, y);
    } else {
      StorePair<T>(p.out, p.out_fp32, out_row + c, x, y);
    }
  }
  if (first == 0) {
    if (partial) {
      p.partial_lse[partial_row] = valid ? lse : CUDART_INF_F;
    } else {
      p.lse[lse_row] = lse;
    }
  }
}

// Grid: splits * row tiles (p.tiles) * num_kv_heads * batch, splits fastest.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    Decode(const __grid_constant__ ForwardParams p) {
  using T = typename Traits::T;
  constexpr int kWarps = Traits::kWarps, kStages = Traits::kStages, kKeys = Traits::kKeys;
  extern __shared__ __align__(1024) char shared[];
  DecodePlace at;
  ptx::AllowDependents();  // Merge, which waits for all of this grid
  uint32_t block = blockIdx.x;
  at.split = block % p.splits;
  block /= p.splits;
  at.row0 = block % p.tiles * Traits::kRows;
  block /= p.tiles;
  at.kv_head = block % p.num_kv_heads;
  at.b = block / p.num_kv_heads;
  at.s = SequenceOf(p.sequences, at.b);
  at.group = p.num_heads / p.num_kv_heads;
  at.rows = at.s.rows_q * at.group;
  if (at.row0 >= at.rows) return;
  at.lane = threadIdx.x % 32;
  at.warp = threadIdx.x / 32;
  at.k = reinterpret_cast<const char*>(static_cast<const T*>(p.k) + at.s.batch * p.k_strides.batch +
                                       at.kv_head * p.k_strides.head +
                                       at.s.k_token * p.k_strides.token);
  at.v = reinterpret_cast<const char*>(static_cast<const T*>(p.v) + at.s.batch * p.v_strides.batch +
                                       at.kv_head * p.v_strides.head +
                                       at.s.k_token * p.v_strides.token);
  const uint32_t q_tile = ptx::SharedAddress(shared);
  at.stages = q_tile + Traits::kQueryBytes + at.warp * kStages * Traits::kStageBytes;
  const int lane = at.lane;
  at.q_lane = q_tile + TileOffset<Traits::kQkChunks>(lane & 15, lane >> 4);
  at.k_lane =
      at.stages + TileOffset<Traits::kQkChunks>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  at.v_lane = at.stages + kKeys * Traits::kQkChunks * 16 +
              TileOffset<Traits::kVChunks>(lane & 15, lane >> 4);

  // Keys that some row sees, and of those the split's.
  const int i_first = at.row0 / at.group;
  const int i_last = min((min(at.row0 + Traits::kRows, at.rows) - 1) / at.group, at.s.len_q - 1);
  const int begin = max(0, i_first + at.s.off - p.score.window_left) / kKeys;
  const int end =
      i_last < i_first
          ? 0
          : (max(0, min(at.s.len_k, i_last + at.s.off + p.score.window_right + 1)) + kKeys - 1) /
                kKeys;
  // The warps of all splits take turns: what is read at one time lies close together.
  const int first_chunk = begin + at.split * kWarps, turn = p.splits * kWarps;

  DecodeState<Traits> state;
#pragma unroll
  for (int n = 0; n < Traits::kHeadDimV / 8; ++n) {
    state.o[n][0] = state.o[n][1] = state.o[n][2] = state.o[n][3] = 0.0f;
  }
  state.max[0] = state.max[1] = -CUDART_INF_F;
  state.sum[0] = state.sum[1] = 0.0f;
  if (first_chunk < end) {
    for (int n = threadIdx.x; n < Traits::kRows * Traits::kQkChunks; n += Traits::kThreads) {
      const int row = n / Traits::kQkChunks, chunk = n % Traits::kQkChunks;
      const int i = (at.row0 + row) / at.group;
      const int h = at.kv_head * at.group + (at.row0 + row) % at.group;
      const bool valid = at.row0 + row < at.rows && i < at.s.len_q && chunk < p.head_dim / 8;
      const T* q = static_cast<const T*>(p.q) + at.s.batch * p.q_strides.batch +
                   h * p.q_strides.head + (at.s.q_token + i) * p.q_strides.token + chunk * 8;
      ptx::CopyAsync16(q_tile + TileOffset<Traits::kQkChunks>(row, chunk), q, valid);
    }
    ptx::CommitCopies();
    int chunk = first_chunk + at.warp;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (chunk + stage * turn < end) FetchKeys<Traits>(p, at, chunk + stage * turn, stage);
      ptx::CommitCopies();
    }
    const DecodeRow rows[2] = {RowAt<Traits>(p, at, at.row0 + lane / 4),
                               RowAt<Traits>(p, at, at.row0 + lane / 4 + 8)};
    ptx::WaitCopies<kStages - 1>();  // the queries
    __syncthreads();
    const int turns = (end - first_chunk + turn - 1) / turn;
    for (int n = 0, stage = 0; n < turns; ++n, chunk += turn, stage = (stage + 1) % kStages) {
      if (p.lockstep) {
        if (n > 0) ptx::ClusterWait();
        ptx::ClusterArriveRelaxed();
      }
      const int ahead = chunk + (kStages - 1) * turn;
      if (ahead < end) FetchKeys<Traits>(p, at, ahead, (stage + kStages - 1) % kStages);
      ptx::CommitCopies();
      ptx::WaitCopies<kStages - 1>();
      __syncwarp();
      if (chunk < end) {
        DecodeKeys<Traits>(p, at, rows, chunk * kKeys, at.k_lane + stage * Traits::kStageBytes,
                           at.v_lane + stage * Traits::kStageBytes, state);
      }
      __syncwarp();
    }
    if (p.lockstep) ptx::ClusterWait();
  }
  MergeWarps<Traits>(p, at, shared, state);
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_DECODE_CUH_
