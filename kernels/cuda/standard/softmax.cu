#include "kernels/cuda/standard/plan.h"
#include "kernels/cuda/standard/rows.cuh"

namespace attn::cuda::standard {
namespace {

// What the probabilities that dropout keeps are multiplied by as they are stored; the rest of
// keep_scale is in the row's factor. All of it, so that a small probability is not rounded as an
// FP16 subnormal and enlarged afterwards, but 2^16, which no FP16 holds.
__device__ __forceinline__ float StoredScale(const RowsParams& p) {
  return fminf(p.score.keep_scale, 32768.0f);
}

// Writes lse of a row and what its row of out is multiplied by, given the largest visible score and
// the sum of exp(score - top) without the sink, top the larger of max and sink.
__device__ __forceinline__ void FinishRow(const RowsParams& p, const RowPlace& at, float max,
                                          float sum, float sink) {
  float lse = sink, factor = 0.0f;  // exactly, where no key is visible; -inf without a sink
  if (max != -CUDART_INF_F) {
    const float top = fmaxf(max, sink);
    sum += expf(sink - top);
    const float stored = StoredScale(p);  // 0: dropout keeps nothing
    factor = stored > 0.0f ? p.score.keep_scale / stored / sum : 0.0f;
    // In double: an error of one place of lse is an error of every probability of backward.
    lse = static_cast<float>(top + log(static_cast<double>(sum)));
  }
  p.lse[at.lse] = lse;
  p.factors[at.score_row] = factor;
}

// x: exponentials of a unit. Those that dropout keeps go to the row of P.
template <class T, Level kLevel>
__device__ __forceinline__ void WriteUnit(const RowsParams& p, const RowPlace& at, int j0,
                                          float (&x)[kUnit], T* row) {
  const uint32_t keep = UnitKeeps<kLevel>(p, at, j0);
  const float scale = kLevel == Level::kPlain ? 1.0f : StoredScale(p);
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    x[e] = (keep >> e & 1) == 0 ? 0.0f : x[e] * scale;
  }
  Store8(row + j0, x);
  if constexpr (kLevel == Level::kAll && sizeof(T) == 2) {
    if (!p.split) return;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) x[e] -= ToFloat(FromFloat<T>(x[e]));
    Store8(row + p.ld + j0, x);
  }
}

// A row in registers: one read of S, one write of P. Grid: (rows, matrices).
template <class T, int kThreads, int kUnits, Level kLevel>
__global__ void __launch_bounds__(kBlockThreads<kThreads>)
    SoftmaxRows(const __grid_constant__ RowsParams p) {
  __shared__ float shared[32];
  const int lane = threadIdx.x % kThreads;
  const int i = blockIdx.x * (kBlockThreads<kThreads> / kThreads) + threadIdx.x / kThreads;
  if (i >= p.rows) return;
  const RowPlace at = PlaceRow<kLevel>(p, blockIdx.y, i);
  float* row = p.scores + at.score_row * p.ld;
  float x[kUnits][kUnit];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int j0 = (u * kThreads + lane) * kUnit;
    if (AnyVisible(at, j0)) {
      LoadRow8(row, DType::kFp32, j0, p.keys - j0, x[u]);
    } else {
#pragma unroll
      for (int e = 0; e < kUnit; ++e) x[u][e] = 0.0f;
    }
  }
  float max = -CUDART_INF_F;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    UnitScores<kLevel, false>(p, at, (u * kThreads + lane) * kUnit, x[u], x[u]);
#pragma unroll
    for (int e = 0; e < kUnit; ++e) max = fmaxf(max, x[u][e]);
  }
  max = RowReduce<kThreads>(max, MaxOp(), shared);
  const float sink = p.score.sinks != nullptr ? __ldg(p.score.sinks + at.head) : -CUDART_INF_F;
  const float top = fmaxf(max, sink);
  float sum = 0.0f;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      x[u][e] = max == -CUDART_INF_F ? 0.0f : expf(x[u][e] - top);
      sum += x[u][e];
    }
  }
  sum = RowReduce<kThreads>(sum, SumOp(), shared);
  if (lane == 0) FinishRow(p, at, max, sum, sink);
  RowSync<kThreads>();  // the row is read whole before P overwrites it
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int j0 = (u * kThreads + lane) * kUnit;
    if (j0 < p.keys) WriteUnit<T, kLevel>(p, at, j0, x[u], reinterpret_cast<T*>(row));
  }
}

// A row of any length, read twice: the running maximum and sum, then P. Grid: (rows, matrices).
template <class T, Level kLevel>
__global__ void __launch_bounds__(1024) SoftmaxLongRows(const __grid_constant__ RowsParams p) {
  constexpr int kThreads = 1024, kTile = kThreads * kUnit;
  __shared__ float shared[32];
  const RowPlace at = PlaceRow<kLevel>(p, blockIdx.y, blockIdx.x);
  float* row = p.scores + at.score_row * p.ld;
  float max = -CUDART_INF_F, sum = 0.0f;
  float x[kUnit];
  for (int j0 = threadIdx.x * kUnit; j0 < p.keys; j0 += kTile) {
    if (!AnyVisible(at, j0)) continue;
    LoadRow8(row, DType::kFp32, j0, p.keys - j0, x);
    UnitScores<kLevel, false>(p, at, j0, x, x);
    float unit_max = max;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) unit_max = fmaxf(unit_max, x[e]);
    if (unit_max == -CUDART_INF_F) continue;
    sum *= expf(max - unit_max);
    max = unit_max;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) sum += expf(x[e] - max);
  }
  const float row_max = RowReduce<kThreads>(max, MaxOp(), shared);
  const float sink = p.score.sinks != nullptr ? __ldg(p.score.sinks + at.head) : -CUDART_INF_F;
  const float top = fmaxf(row_max, sink);
  sum = RowReduce<kThreads>(max == -CUDART_INF_F ? 0.0f : sum * expf(max - top), SumOp(), shared);
  if (threadIdx.x == 0) FinishRow(p, at, row_max, sum, sink);
  for (int tile = 0; tile < p.keys; tile += kTile) {
    const int j0 = tile + threadIdx.x * kUnit;
    if (AnyVisible(at, j0)) LoadRow8(row, DType::kFp32, j0, p.keys - j0, x);
    __syncthreads();  // P of a tile overwrites S of this and earlier tiles only
    if (j0 < p.keys) {
      UnitScores<kLevel, false>(p, at, j0, x, x);
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        x[e] = x[e] == -CUDART_INF_F ? 0.0f : expf(x[e] - top);
      }
      WriteUnit<T, kLevel>(p, at, j0, x, reinterpret_cast<T*>(row));
    }
  }
}

template <class T, int kThreads, int kUnits, Level kLevel>
void Start(const RowsParams& p, cudaStream_t stream) {
  constexpr int kRows = kBlockThreads<kThreads> / kThreads;
  const dim3 grid((p.rows + kRows - 1) / kRows, p.batch * p.kv_heads * p.group_heads);
  SoftmaxRows<T, kThreads, kUnits, kLevel><<<grid, kBlockThreads<kThreads>, 0, stream>>>(p);
}

// 32 elements a thread keep 32 registers for the row; with the options' arithmetic 1024 threads of
// them spilled.
template <class T, Level kLevel>
cudaError_t StartFor(const RowsParams& p, cudaStream_t stream) {
  static_assert(kMaxRowInRegisters == 512 * 4 * kUnit);
  if (p.keys <= 256) {
    Start<T, 32, 1, kLevel>(p, stream);
  } else if (p.keys <= 1024) {
    Start<T, 32, 4, kLevel>(p, stream);
  } else if (p.keys <= 8192) {
    Start<T, 256, 4, kLevel>(p, stream);
  } else if (p.keys <= kMaxRowInRegisters) {
    Start<T, 512, 4, kLevel>(p, stream);
  } else {
    const dim3 grid(p.rows, p.batch * p.kv_heads * p.group_heads);
    SoftmaxLongRows<T, kLevel><<<grid, 1024, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t StartWith(const RowsParams& p, cudaStream_t stream) {
  switch (LevelOf(p.score)) {
    case Level::kPlain:
      return StartFor<T, Level::kPlain>(p, stream);
    case Level::kDropout:
      return StartFor<T, Level::kDropout>(p, stream);
    case Level::kAll:
      break;
  }
  return StartFor<T, Level::kAll>(p, stream);
}

}  // namespace

cudaError_t LaunchSoftmax(const RowsParams& p, DType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFp16:
      return StartWith<__half>(p, stream);
    case DType::kBf16:
      return StartWith<__nv_bfloat16>(p, stream);
    default:
      return StartWith<float>(p, stream);
  }
}

}  // namespace attn::cuda::standard
