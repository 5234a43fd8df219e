// Writing the rows of a work: out and lse.
#ifndef ATTN_KERNELS_CUDA_SM90_ROWS_CUH_
#define ATTN_KERNELS_CUDA_SM90_ROWS_CUH_

#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/ptx/warpgroup.cuh"
#include "kernels/cuda/sm90/softmax.cuh"

namespace attn::cuda::sm90 {

// One arrival for each consumer warp.
__device__ __forceinline__ void Release(uint32_t barrier, int lane) {
  __syncwarp();
  ptx::BarrierArriveIf(barrier, lane == 0);
}

template <class Traits>
__device__ __forceinline__ bool IsStored(const ForwardParams& p, const Work& w, int row) {
  return row >= 0 && row < RowsOf<Traits>(p, w.s.rows_q);
}

// Where an lse-shaped buffer has a row that is stored, and its part of a split.
template <class Traits>
__device__ __forceinline__ int64_t LseRow(const ForwardParams& p, const Work& w, int row) {
  return w.lse + HeadOf<Traits>(p, row) * p.lse_head + QueryOf<Traits>(p, row);
}

// Writes a row of FP32 results, this lane's columns.
template <class Traits>
__device__ __forceinline__ void WriteFp32Row(float* row, int head_dim_v, int half, float factor,
                                             const Consumer<Traits>& c) {
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
    const int column = x * 8 + (c.lane & 3) * 2;
    if (column >= head_dim_v) continue;
    *reinterpret_cast<float2*>(row + column) =
        make_float2(c.o[x][2 * half] * factor, c.o[x][2 * half + 1] * factor);
  }
}

// Writes a row of 16-bit results. Four lanes have 4 bytes each of every 16; they exchange, so that
// each has 16 of every 64.
template <class Traits>
__device__ __forceinline__ void WriteRow(typename Traits::T* row, bool stored, int head_dim_v,
                                         int half, float factor, const Consumer<Traits>& c) {
  const int quad = c.lane & 3;
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; x += 4) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      r[t] = ptx::Element<typename Traits::T>::Pack(c.o[x + t][2 * half] * factor,
                                                    c.o[x + t][2 * half + 1] * factor);
    }
    ptx::TransposeInQuad(r, quad);
    const int column = (x + quad) * 8;
    if (stored && column < head_dim_v) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(r[0], r[1], r[2], r[3]);
    }
  }
}

// Whether the warpgroup's rows of a work that had keys leave by TMA: all of them are stored, or the
// map leaves out what the tensor does not have.
template <class Traits>
__device__ __forceinline__ bool RowsAreStaged(const ForwardParams& p, const Work& w, int group) {
  const bool staged =
      p.splits == 1 && !p.out_fp32 &&
      (p.out_ends || w.q0 + PlaceOf(w, group) + kWarpgroupRows <= RowsOf<Traits>(p, w.s.rows_q));
  // By a shuffle, so that the compiler sees that the warp goes one way.
  return __shfl_sync(~0u, staged, 0);
}

// How many stores may still read when rows of panel `panel` are written to its buffer: those behind
// the last one from that buffer, which for the first panels was the work before's. Panels go to
// buffers in turn, from the first again in each work.
template <class Traits>
__device__ constexpr int StoresBehind(int panel) {
  constexpr int kBuffers = Traits::kRowPanels, kPanels = Traits::kPanelsV;
  return panel < kBuffers ? (kPanels - 1 - panel) % kBuffers + panel : kBuffers - 1;
}

// Of the warp's 16 rows, writes columns of panels [kBegin, kEnd) by TMA, through the buffer of
// their queries or kRowPanels panels. Products may be in flight meanwhile.
template <class Traits, int kBegin, int kEnd>
__device__ __forceinline__ void WriteStagedRows(const ForwardParams& p, const Work& w,
                                                uint32_t queries_at, const float (&factors)[2],
                                                const Consumer<Traits>& c) {
  using E = ptx::Element<typename Traits::T>;
  constexpr bool kInQueries = Traits::kRowsInQueries;
  constexpr int kBuffers = kInQueries ? Traits::kPanelsV : Traits::kRowPanels;
  const uint32_t rows =
      (kInQueries ? queries_at : c.shared + Traits::kRowsAt + c.group * (kBuffers * kPanelBytes)) +
      c.warp * 16 * 128;
  // Lanes name rows of 8 x 8 matrices: two of rows, two of columns. The 16-byte pieces of a row of
  // 128 bytes are where its swizzle puts them.
  const int in_matrix = c.lane % 8, row = c.lane / 8 % 2 * 8 + in_matrix, piece = c.lane / 16;
  const uint32_t at = rows + row * 128 + (piece ^ in_matrix) * 16;
  // A warp knows of its own products that they have read the queries.
  if constexpr (kInQueries) ptx::NamedSync(1 + Traits::kConsumers + c.group, 128);
#pragma unroll
  for (int panel = kBegin; panel < kEnd; ++panel) {
    const int buffer = panel % kBuffers * kPanelBytes;
    if constexpr (!kInQueries) {
      if (StoresBehind<Traits>(panel) == 0) {
        ptx::WaitStoresRead<0>();
      } else {
        ptx::WaitStoresRead<1>();
      }
      __syncwarp();
    }
#pragma unroll
    for (int x = panel * 8; x < min(panel * 8 + 8, Traits::kHeadDimV / 8); x += 2) {
      uint32_t r[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float(&o)[4] = c.o[x + t / 2];
        const int half = t % 2;
        r[t] = E::Pack(o[2 * half] * factors[half], o[2 * half + 1] * factors[half]);
      }
      ptx::StoreMatrix4((at ^ x % 8 * 16) + buffer, r);
    }
    if (kInQueries && panel != kEnd - 1) continue;
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (ptx::ElectOne()) {
#pragma unroll
      for (int stored = kInQueries ? kBegin : panel; stored <= panel; ++stored) {
        ptx::StoreBox4(&p.out_map, rows + stored % kBuffers * kPanelBytes, stored * kPanel, w.h,
                       w.token + QueryOf<Traits>(p, PlaceOf(w, c.group) + c.warp * 16),
                       static_cast<int>(w.s.batch));
      }
      ptx::CommitStores();
    }
  }
}

// Writes a work's lse and returns what its rows are multiplied by: 0 in rows without keys. Only
// c.o need not be complete.
template <class Traits>
__device__ __forceinline__ void WriteLse(const ForwardParams& p, const Work& w, bool keys,
                                         const Consumer<Traits>& c, float (&factors)[2]) {
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const bool partial = p.splits > 1;  // the sink is the merge's
  float* const to_lse = partial ? p.partial_lse : p.lse;
  float sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[half] = c.sum[half] + __shfl_xor_sync(~0u, c.sum[half], 1);
    sums[half] += __shfl_xor_sync(~0u, sums[half], 2);
    if constexpr (Traits::kOptions) sums[half] *= p.score.keep_inverse;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = RowOf(w, c) + half * 8;
    const bool valid = row < RowsOf<Traits>(p, w.s.len_q);
    const float sink = p.score.sinks != nullptr && !partial
                           ? __ldg(p.score.sinks + w.h + HeadOf<Traits>(p, row))
                           : -CUDART_INF_F;
    float lse = FinishRow(c.max[half] * scale_log2, sums[half], sink, &factors[half]);
    if (!keys || !valid || sums[half] == 0.0f) {  // a sum of NaN is no row without keys
      factors[half] = 0.0f;
      lse = valid ? sink : -CUDART_INF_F;  // without keys exactly the sink
      if (partial && !valid) lse = CUDART_INF_F;
    }
    if ((c.lane & 3) == 0 && IsStored<Traits>(p, w, row)) to_lse[LseRow<Traits>(p, w, row)] = lse;
  }
}

// A row without keys may have summed what is not a number.
template <class Traits>
__device__ __forceinline__ void ClearRowsWithoutKeys(const float (&factors)[2],
                                                     Consumer<Traits>& c) {
  if (!__any_sync(~0u, factors[0] == 0.0f || factors[1] == 0.0f)) return;
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (factors[e >> 1] == 0.0f) c.o[x][e] = 0.0f;
    }
  }
}

// Writes a work's rows, c.o times the factors, as they are.
template <class Traits>
__device__ __forceinline__ void WriteRows(const ForwardParams& p, const Work& w,
                                          const float (&factors)[2], const Consumer<Traits>& c) {
  const bool partial = p.splits > 1, by_element = partial || p.out_fp32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = RowOf(w, c) + half * 8;
    const bool stored = IsStored<Traits>(p, w, row);
    const int64_t to = w.s.batch * p.out_strides.batch +
                       (w.h + HeadOf<Traits>(p, row)) * p.out_strides.head +
                       (w.s.q_token + QueryOf<Traits>(p, row)) * p.out_strides.token;
    if (by_element) {
      if (!stored) continue;
      WriteFp32Row<Traits>(partial ? p.partial_out + LseRow<Traits>(p, w, row) * p.head_dim_v
                                   : static_cast<float*>(p.out) + to,
                           p.head_dim_v, half, factors[half], c);
    } else {
      WriteRow<Traits>(static_cast<typename Traits::T*>(p.out) + to, stored, p.head_dim_v, half,
                       factors[half], c);
    }
  }
}

// Writes a work's rows, c.o times the factors. Where kRowsInQueries and the work had keys, the
// buffer of its queries, queries_at, is this warpgroup's to use.
template <class Traits>
__device__ __forceinline__ void WriteAllRows(const ForwardParams& p, const Work& w, bool keys,
                                             uint32_t queries_at, const float (&factors)[2],
                                             Consumer<Traits>& c) {
  ClearRowsWithoutKeys(factors, c);
  if (keys && RowsAreStaged<Traits>(p, w, c.group)) {
    WriteStagedRows<Traits, 0, Traits::kPanelsV>(p, w, queries_at, factors, c);
  } else {
    WriteRows(p, w, factors, c);
  }
}

template <class Traits>
__device__ __forceinline__ void ResetRows(Consumer<Traits>& c) {
  c.max[0] = c.max[1] = -CUDART_INF_F;
  c.base[0] = c.base[1] = 0.0f;
  c.sum[0] = c.sum[1] = 0.0f;
  c.far = false;
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
    c.o[x][0] = c.o[x][1] = c.o[x][2] = c.o[x][3] = 0.0f;
  }
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_ROWS_CUH_
