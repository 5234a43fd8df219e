#include "kernels/cuda/standard/rows.cuh"

namespace attn::cuda::standard {
namespace {

// exp(score - lse). In fp32 with what the subtraction loses: lse is the same for the whole row, and
// so would be the error.
template <class T>
__device__ __forceinline__ float Probability(float score, float lse) {
  const float x = __fsub_rn(score, lse);
  const float p = expf(x);
  if constexpr (sizeof(T) == 2) return p;
  // Source: Knuth, TAOCP 2, 4.2.2, theorem B.
  const float z = __fsub_rn(x, score);
  const float lost = __fsub_rn(__fsub_rn(score, __fsub_rn(x, z)), __fadd_rn(lse, z));
  return fmaf(p, lost, p);
}

// Raw products become P with dropout applied, dP becomes dS.
template <class T, Level kLevel>
__device__ __forceinline__ void UnitGradients(const RowsParams& p, const RowPlace& at, int j0,
                                              float lse, float delta, float (&s)[kUnit],
                                              float (&dp)[kUnit]) {
  float slope[kUnit];
  UnitScores<kLevel, true>(p, at, j0, s, slope);
  const uint32_t keep = UnitKeeps<kLevel>(p, at, j0);
  float score_gradient[kUnit];
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    const float kept = (keep >> e & 1) != 0 ? p.score.keep_scale : 0.0f;
    // Hidden pairs are exactly 0, whatever their dP.
    const float probability = s[e] == -CUDART_INF_F ? 0.0f : Probability<T>(s[e], lse);
    const float ds = probability == 0.0f ? 0.0f : probability * fmaf(kept, dp[e], delta);
    s[e] = probability * kept;
    dp[e] = score_gradient[e] = ds;
  }
  if constexpr (kLevel == Level::kAll) {
    if (p.dbias != nullptr) {
      float* to = p.dbias + at.options.bias_row0 + at.i * p.score.bias_cols + j0;
      if (j0 + kUnit <= p.keys && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        Store8(to, score_gradient);
      } else {
#pragma unroll
        for (int e = 0; e < kUnit; ++e) {
          if (j0 + e < p.keys) to[e] = score_gradient[e];
        }
      }
    }
    if (p.kept != nullptr) Store8(p.kept + at.score_row * p.ld + j0, score_gradient);
    if (p.score.softcap > 0.0f) {
#pragma unroll
      for (int e = 0; e < kUnit; ++e) dp[e] = dp[e] == 0.0f ? 0.0f : dp[e] * slope[e];
    }
  }
}

// Sum over the row of P dP, dropout applied. In double: rows may be long, and their terms of one
// sign.
template <class T, int kThreads>
__device__ __forceinline__ float RowDot(const RowsParams& p, const RowPlace& at, float lse,
                                        const float* s_row, const float* d_row, float* shared) {
  double sum = 0.0;
  for (int j0 = threadIdx.x % kThreads * kUnit; j0 < p.keys; j0 += kThreads * kUnit) {
    if (!AnyVisible(at, j0)) continue;
    float s[kUnit], dp[kUnit];
    LoadRow8(s_row, DType::kFp32, j0, p.keys - j0, s);
    LoadRow8(d_row, DType::kFp32, j0, p.keys - j0, dp);
    UnitScores<Level::kAll, false>(p, at, j0, s, s);
    const uint32_t keep = UnitKeeps<Level::kAll>(p, at, j0);
    float unit = 0.0f;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      if (s[e] == -CUDART_INF_F || (keep >> e & 1) == 0) continue;
      unit = fmaf(Probability<T>(s[e], lse) * p.score.keep_scale, dp[e], unit);
    }
    sum += unit;
  }
  return RowReduce<kThreads>(static_cast<float>(sum), SumOp(), shared);
}

// Grid: (rows, matrices).
template <class T, int kThreads, Level kLevel>
__global__ void __launch_bounds__(kBlockThreads<kThreads>)
    SoftmaxGradientRows(const __grid_constant__ RowsParams p) {
  constexpr int kUnits = 2;  // units in flight: 128 bytes a thread
  const int lane = threadIdx.x % kThreads;
  const int i = blockIdx.x * (kBlockThreads<kThreads> / kThreads) + threadIdx.x / kThreads;
  if (i >= p.rows) return;
  RowPlace at = PlaceRow<kLevel>(p, blockIdx.y, i);
  const float lse = p.lse[at.lse];
  float delta = p.delta[at.lse];
  if (lse == -CUDART_INF_F) at.end = 0;  // no visible key: exp(s - lse) must not be evaluated
  float* s_row = p.scores + at.score_row * p.ld;
  float* d_row = p.gradients + at.score_row * p.ld;
  if constexpr (kLevel == Level::kAll) {
    __shared__ float shared[32];
    if (p.own_row_dot) {
      const float dlse = p.dlse != nullptr ? p.dlse[at.lse] : 0.0f;
      delta = dlse - RowDot<T, kThreads>(p, at, lse, s_row, d_row, shared);
    }
  }
  for (int tile = 0; tile < p.keys; tile += kThreads * kUnit * kUnits) {
    float s[kUnits][kUnit], dp[kUnits][kUnit];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int j0 = tile + (u * kThreads + lane) * kUnit;
      if (AnyVisible(at, j0)) {
        LoadRow8(s_row, DType::kFp32, j0, p.keys - j0, s[u]);
        LoadRow8(d_row, DType::kFp32, j0, p.keys - j0, dp[u]);
      } else {
#pragma unroll
        for (int e = 0; e < kUnit; ++e) s[u][e] = dp[u][e] = 0.0f;
      }
    }
    RowSync<kThreads>();  // what a tile writes lies over this and earlier tiles only
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int j0 = tile + (u * kThreads + lane) * kUnit;
      if (j0 >= p.keys) continue;
      UnitGradients<T, kLevel>(p, at, j0, lse, delta, s[u], dp[u]);
      Store8(reinterpret_cast<T*>(s_row) + j0, s[u]);
      Store8(reinterpret_cast<T*>(d_row) + j0, dp[u]);
    }
  }
}

template <class T, int kThreads, Level kLevel>
void Start(const RowsParams& p, cudaStream_t stream) {
  constexpr int kRows = kBlockThreads<kThreads> / kThreads;
  const dim3 grid((p.rows + kRows - 1) / kRows, p.batch * p.kv_heads * p.group_heads);
  SoftmaxGradientRows<T, kThreads, kLevel><<<grid, kBlockThreads<kThreads>, 0, stream>>>(p);
}

// Long rows, of which there may be few, take a block each.
template <class T, Level kLevel>
cudaError_t StartFor(const RowsParams& p, cudaStream_t stream) {
  p.keys <= 2048 ? Start<T, 32, kLevel>(p, stream) : Start<T, 256, kLevel>(p, stream);
  return cudaGetLastError();
}

template <class T>
cudaError_t StartWith(const RowsParams& p, cudaStream_t stream) {
  switch (p.own_row_dot ? Level::kAll : LevelOf(p.score)) {
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

cudaError_t LaunchSoftmaxGradient(const RowsParams& p, DType dtype, cudaStream_t stream) {
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
