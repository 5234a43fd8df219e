#include "kernels/cpu/score_row.h"

#include <limits>

#include "kernels/api/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/score_row.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace HWY_NAMESPACE {

using D = hn::ScalableTag<float>;
constexpr int64_t kLanes = hn::MaxLanes(D());

void ScoreRowSimd(const ScoreRowParams& params, int64_t n, float* scores, float* softcap_grad) {
  const D d;
  const auto scale =
      hn::Set(d, params.softcap > 0 ? params.softmax_scale / params.softcap : params.softmax_scale);
  const auto one = hn::Set(d, 1.0f);
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t count = HWY_MIN(kLanes, n - j);
    auto s = hn::Mul(LoadFirst(d, scores + j, count), scale);
    auto grad = one;
    if (params.softcap > 0) {
      s = hn::Mul(TanhWithGrad(d, s, &grad), hn::Set(d, params.softcap));
    }
    if (params.bias != nullptr) s = hn::Add(s, LoadFirst(d, params.bias + j, count));
    if (params.alibi_slope != 0) {
      // Distances are taken before rounding to fp32, so that they are exact up to 2^24.
      const auto first = hn::Set(d, static_cast<float>(params.position - j));
      const auto distance = hn::Abs(hn::Sub(first, hn::Iota(d, 0.0f)));
      s = hn::NegMulAdd(hn::Set(d, params.alibi_slope), distance, s);
    }
    StoreFirst(s, d, scores + j, count);
    if (softcap_grad != nullptr) StoreFirst(grad, d, softcap_grad + j, count);
  }
}

float MaxRowSimd(const float* x, int64_t n) {
  const D d;
  auto max = hn::Set(d, -std::numeric_limits<float>::infinity());
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) max = hn::Max(max, hn::LoadU(d, x + j));
  float result = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; j < n; ++j) result = HWY_MAX(result, x[j]);
  return result;
}

float ExpRowSimd(float shift, int64_t n, float* x) {
  const D d;
  const auto minus_shift = hn::Set(d, -shift);
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t count = HWY_MIN(kLanes, n - j);
    const auto p = Exp(d, hn::Add(LoadFirst(d, x + j, count), minus_shift));
    StoreFirst(p, d, x + j, count);
    sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count)), p));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace HWY_NAMESPACE
}  // namespace attn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/simd_dispatch.h"

namespace attn {
namespace {
ATTN_SIMD_TABLE(ScoreRowSimd);
ATTN_SIMD_TABLE(MaxRowSimd);
ATTN_SIMD_TABLE(ExpRowSimd);
}  // namespace

void ScoreRow(const ScoreRowParams& params, int64_t n, float* scores, float* softcap_grad) {
  kScoreRowSimdTable.Get()(params, n, scores, softcap_grad);
}

float MaxRow(const float* x, int64_t n) { return kMaxRowSimdTable.Get()(x, n); }

float ExpRow(float shift, int64_t n, float* x) { return kExpRowSimdTable.Get()(shift, n, x); }

void DropoutRow(const DropoutOption& dropout, uint32_t head, uint32_t i, int64_t j0, int64_t n,
                float* keep) {
  const float scale = 65536.0f / static_cast<float>(dropout.threshold);
  for (int64_t j = 0; j < n; j += 8) {
    const auto words =
        DropoutWords(dropout.seed, dropout.offset, head, i, static_cast<uint32_t>((j0 + j) / 8));
    for (int64_t lane = 0; lane < HWY_MIN(8, n - j); ++lane) {
      const bool kept = DropoutKeeps(words, static_cast<uint32_t>(lane), dropout.threshold);
      keep[j + lane] = kept ? scale : 0.0f;
    }
  }
}

}  // namespace attn
#endif  // HWY_ONCE
