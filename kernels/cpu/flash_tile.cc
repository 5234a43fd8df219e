#include "kernels/cpu/flash_tile.h"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/flash_tile.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace HWY_NAMESPACE {
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;
constexpr int64_t kLanes = hn::MaxLanes(D());
constexpr float kInfinity = std::numeric_limits<float>::infinity();
static_assert(kColumnStep % kLanes == 0);

// Calls body(vector offset, count) over a row of columns, kWide vectors at a time and then singly.
template <int kWide, class Body>
HWY_INLINE void ForColumns(int64_t cols, const Body& body) {
  int64_t c = 0;
  for (; c + kWide * kLanes <= cols; c += kWide * kLanes) {
    body(c, std::integral_constant<int, kWide>());
  }
  for (; c < cols; c += kLanes) body(c, std::integral_constant<int, 1>());
}

HWY_INLINE V FiniteOrZero(V m) {
  const D d;
  return hn::IfThenZeroElse(hn::Eq(m, hn::Set(d, -kInfinity)), m);
}

// Probabilities summed in one register before they join the row sum: all are positive, so that the
// roundings of a long chain add up.
constexpr int64_t kSumPiece = 32;

template <int kWide>
HWY_INLINE void SoftmaxColumns(int64_t keys, int64_t cols, float* HWY_RESTRICT s, float* m,
                               float* l, float* alpha) {
  const D d;
  V old_max[kWide], max[kWide], sum[kWide], shift[kWide];
  for (int v = 0; v < kWide; ++v) {
    old_max[v] = hn::LoadU(d, m + v * kLanes);
    max[v] = old_max[v];
    sum[v] = hn::Zero(d);
  }
  for (int64_t j = 0; j < keys; ++j) {
    const float* row = s + j * cols;
    for (int v = 0; v < kWide; ++v) max[v] = hn::Max(max[v], hn::LoadU(d, row + v * kLanes));
  }
  for (int v = 0; v < kWide; ++v) shift[v] = FiniteOrZero(max[v]);
  for (int64_t begin = 0; begin < keys; begin += kSumPiece) {
    const int64_t end = std::min(keys, begin + kSumPiece);
    V piece[kWide];
    for (int v = 0; v < kWide; ++v) piece[v] = hn::Zero(d);
    for (int64_t j = begin; j < end; ++j) {
      float* row = s + j * cols;
      for (int v = 0; v < kWide; ++v) {
        const V p = Exp2(d, hn::Sub(hn::LoadU(d, row + v * kLanes), shift[v]));
        hn::StoreU(p, d, row + v * kLanes);
        piece[v] = hn::Add(piece[v], p);
      }
    }
    for (int v = 0; v < kWide; ++v) sum[v] = hn::Add(sum[v], piece[v]);
  }
  for (int v = 0; v < kWide; ++v) {
    const V a = Exp2(d, hn::Sub(old_max[v], shift[v]));
    hn::StoreU(a, d, alpha + v * kLanes);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, l + v * kLanes), a, sum[v]), d, l + v * kLanes);
    hn::StoreU(max[v], d, m + v * kLanes);
  }
}

// Philox4x32-10 for kLanes counters at once; see kernels/api/philox.h.
HWY_INLINE void Philox(VU& c0, VU& c1, VU& c2, VU& c3, uint32_t k0, uint32_t k1) {
  const DU du;
  const auto mul0 = hn::Set(du, 0xD2511F53u), mul1 = hn::Set(du, 0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    VU high0, high1;
    const VU low0 = hn::Mul(c0, mul0), low1 = hn::Mul(c2, mul1);
#if HWY_TARGET == HWY_SCALAR
    high0 = hn::Set(
        du, static_cast<uint32_t>((uint64_t{hn::GetLane(c0)} * uint64_t{0xD2511F53u}) >> 32));
    high1 = hn::Set(
        du, static_cast<uint32_t>((uint64_t{hn::GetLane(c2)} * uint64_t{0xCD9E8D57u}) >> 32));
#else
    // The 64-bit products of the even lanes, and of the odd lanes moved to even places; their upper
    // halves are then put back in order.
    const auto high_half = [du](VU a, VU b) HWY_ATTR {
      const hn::Repartition<uint64_t, DU> dq;
      const auto even = hn::MulEven(a, b);
      const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(dq, a))), b);
      return hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
    };
    high0 = high_half(c0, mul0);
    high1 = high_half(c2, mul1);
#endif
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(du, k0));
    c1 = low1;
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(du, k1));
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace

void SoftcapTileSimd(int64_t keys, int64_t cols, float cap, float* s, float* grad) {
  const D d;
  const V cap_v = hn::Set(d, cap);
  for (int64_t i = 0; i < keys * cols; i += kLanes) {
    V g;
    hn::StoreU(hn::Mul(cap_v, TanhWithGrad(d, hn::LoadU(d, s + i), &g)), d, s + i);
    if (grad != nullptr) hn::StoreU(g, d, grad + i);
  }
}

void AlibiTileSimd(int64_t keys, int64_t cols, const float* slope, const float* position,
                   float* s) {
  const D d;
  for (int64_t c = 0; c < cols; c += kLanes) {
    const V slope_v = hn::LoadU(d, slope + c);
    const V position_v = hn::LoadU(d, position + c);
    for (int64_t j = 0; j < keys; ++j) {
      const V distance = hn::Abs(hn::Sub(position_v, hn::Set(d, static_cast<float>(j))));
      float* at = s + j * cols + c;
      hn::StoreU(hn::NegMulAdd(slope_v, distance, hn::LoadU(d, at)), d, at);
    }
  }
}

void MaskTileSimd(int64_t keys, int64_t cols, const int32_t* lo, const int32_t* hi, float* s) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V hidden = hn::Set(d, -kInfinity);
  for (int64_t c = 0; c < cols; c += kLanes) {
    const auto lo_v = hn::LoadU(di, lo + c), hi_v = hn::LoadU(di, hi + c);
    for (int64_t j = 0; j < keys; ++j) {
      const auto j_v = hn::Set(di, static_cast<int32_t>(j));
      const auto out = hn::Or(hn::Lt(j_v, lo_v), hn::Not(hn::Lt(j_v, hi_v)));
      float* at = s + j * cols + c;
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, out), hidden, hn::LoadU(d, at)), d, at);
    }
  }
}

void SoftmaxTileSimd(int64_t keys, int64_t cols, float* s, float* m, float* l, float* alpha) {
  ForColumns<4>(cols, [&](int64_t c, auto wide) HWY_ATTR {
    SoftmaxColumns<decltype(wide)::value>(keys, cols, s + c, m + c, l + c, alpha + c);
  });
}

void FinishColumnsSimd(int64_t cols, const float* m, const float* l, const float* sink,
                       float* scale, float* lse) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  for (int64_t c = 0; c < cols; c += kLanes) {
    const V m_v = hn::LoadU(d, m + c), l_v = hn::LoadU(d, l + c);
    // A maximum passes over NaN, a sum does not.
    const auto no_key = hn::And(hn::Eq(m_v, hn::Set(d, -kInfinity)), hn::Eq(l_v, hn::Zero(d)));
    V max = m_v, factor = one, denominator = l_v, lse_without_key = m_v;
    if (sink != nullptr) {
      lse_without_key = hn::LoadU(d, sink + c);
      const V sink_v = hn::Mul(lse_without_key, hn::Set(d, static_cast<float>(kLog2e)));
      max = hn::Max(m_v, sink_v);
      const V shift = FiniteOrZero(max);
      factor = Exp2(d, hn::Sub(m_v, shift));
      denominator = hn::MulAdd(denominator, factor, Exp2(d, hn::Sub(sink_v, shift)));
    }
    const V safe = hn::IfThenElse(no_key, one, denominator);
    hn::StoreU(hn::IfThenZeroElse(no_key, hn::Div(factor, safe)), d, scale + c);
    const V log = hn::MulAdd(FiniteOrZero(max), hn::Set(d, 0.693147181f), Log(d, safe));
    hn::StoreU(hn::IfThenElse(no_key, lse_without_key, log), d, lse + c);
  }
}

void MergeColumnsSimd(int64_t head_dim_v, int64_t cols, const float* o2, const float* m2,
                      const float* l2, float* o, float* m, float* l) {
  const D d;
  for (int64_t c = 0; c < cols; c += kLanes) {
    const V m1_v = hn::LoadU(d, m + c), m2_v = hn::LoadU(d, m2 + c);
    const V max = hn::Max(m1_v, m2_v);
    const V shift = FiniteOrZero(max);
    const V a1 = Exp2(d, hn::Sub(m1_v, shift)), a2 = Exp2(d, hn::Sub(m2_v, shift));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, l + c), a1, hn::Mul(hn::LoadU(d, l2 + c), a2)), d, l + c);
    hn::StoreU(max, d, m + c);
    for (int64_t e = 0; e < head_dim_v; ++e) {
      float* at = o + e * cols + c;
      const V other = hn::Mul(hn::LoadU(d, o2 + e * cols + c), a2);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, at), a1, other), d, at);
    }
  }
}

void DropoutTileSimd(const DropoutOption& dropout, int64_t j0, int64_t keys, int64_t cols,
                     const uint32_t* query, const uint32_t* head, float scale, float* keep) {
  const D d;
  const DU du;
  const hn::RebindToSigned<D> di;
  const uint32_t key0 = static_cast<uint32_t>(dropout.seed);
  const uint32_t key1 = static_cast<uint32_t>(dropout.seed >> 32);
  // Lanes are under 2^16 and the threshold at most 2^16, so signed comparison is right.
  const auto threshold = hn::Set(di, static_cast<int32_t>(dropout.threshold));
  const V scale_v = hn::Set(d, scale);
  for (int64_t c = 0; c < cols; c += kLanes) {
    for (int64_t j = 0; j < keys; j += 8) {
      VU words[4] = {hn::Set(du, static_cast<uint32_t>((j0 + j) / 8)), hn::LoadU(du, query + c),
                     hn::LoadU(du, head + c), hn::Set(du, dropout.offset)};
      Philox(words[0], words[1], words[2], words[3], key0, key1);
      for (int64_t lane = 0; lane < HWY_MIN(int64_t{8}, keys - j); ++lane) {
        const VU word = words[lane / 2];
        const VU bits =
            lane % 2 == 0 ? hn::And(word, hn::Set(du, 0xFFFFu)) : hn::ShiftRight<16>(word);
        const auto kept = hn::RebindMask(d, hn::Lt(hn::BitCast(di, bits), threshold));
        hn::StoreU(hn::IfThenElseZero(kept, scale_v), d, keep + (j + lane) * cols + c);
      }
    }
  }
}

void MultiplyTileSimd(int64_t keys, int64_t cols, const float* y, float* x) {
  const D d;
  for (int64_t i = 0; i < keys * cols; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, x + i);
  }
}

void ProbabilityTileSimd(int64_t keys, int64_t cols, const float* lse2, const float* lse2_low,
                         float* s) {
  const D d;
  // An lse that is not this path's may be too small; p is then huge but must not wrap around.
  const V limit = hn::Set(d, 127.0f);
  ForColumns<4>(cols, [&](int64_t c, auto wide) HWY_ATTR {
    constexpr int kWide = decltype(wide)::value;
    V lse[kWide], low[kWide];
    for (int v = 0; v < kWide; ++v) {
      lse[v] = hn::LoadU(d, lse2 + c + v * kLanes);
      low[v] = hn::LoadU(d, lse2_low + c + v * kLanes);
    }
    for (int64_t j = 0; j < keys; ++j) {
      float* row = s + j * cols + c;
      for (int v = 0; v < kWide; ++v) {
        // s - lse to twice the precision (Knuth's two-sum): one rounding at the magnitude of lse
        // would be an error common to all keys of the row, as large as the exactness rule allows at
        // small scores.
        const V score = hn::LoadU(d, row + v * kLanes);
        const V x = hn::Sub(score, lse[v]);
        const V taken = hn::Sub(score, x);
        const V lost = hn::Sub(hn::Sub(score, hn::Add(x, taken)), hn::Sub(lse[v], taken));
        hn::StoreU(Exp2(d, hn::Min(limit, x), hn::Sub(lost, low[v])), d, row + v * kLanes);
      }
    }
  });
}

void RowDotTileSimd(int64_t keys, int64_t cols, const float* keep, const float* p, const float* dp,
                    float* row_dot) {
  const D d;
  ForColumns<4>(cols, [&](int64_t c, auto wide) HWY_ATTR {
    constexpr int kWide = decltype(wide)::value;
    V sum[kWide];
    for (int v = 0; v < kWide; ++v) sum[v] = hn::Zero(d);
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kWide; ++v) {
        const int64_t at = j * cols + c + v * kLanes;
        V dp_v = hn::LoadU(d, dp + at);
        if (keep != nullptr) dp_v = hn::Mul(dp_v, hn::LoadU(d, keep + at));
        sum[v] = hn::MulAdd(hn::LoadU(d, p + at), dp_v, sum[v]);
      }
    }
    for (int v = 0; v < kWide; ++v) {
      float* to = row_dot + c + v * kLanes;
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum[v]), d, to);
    }
  });
}

void ScoreGradientTileSimd(int64_t keys, int64_t cols, const float* delta, const float* keep,
                           float* p, float* dp) {
  const D d;
  ForColumns<4>(cols, [&](int64_t c, auto wide) HWY_ATTR {
    constexpr int kWide = decltype(wide)::value;
    V delta_v[kWide];
    for (int v = 0; v < kWide; ++v) delta_v[v] = hn::LoadU(d, delta + c + v * kLanes);
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kWide; ++v) {
        const int64_t at = j * cols + c + v * kLanes;
        const V p_v = hn::LoadU(d, p + at);
        V dp_v = hn::LoadU(d, dp + at);
        if (keep != nullptr) {
          const V keep_v = hn::LoadU(d, keep + at);
          dp_v = hn::Mul(dp_v, keep_v);
          hn::StoreU(hn::Mul(p_v, keep_v), d, p + at);
        }
        hn::StoreU(hn::Mul(p_v, hn::Sub(dp_v, delta_v[v])), d, dp + at);
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace attn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/simd_dispatch.h"

namespace attn {
namespace {
ATTN_SIMD_TABLE(SoftcapTileSimd);
ATTN_SIMD_TABLE(AlibiTileSimd);
ATTN_SIMD_TABLE(MaskTileSimd);
ATTN_SIMD_TABLE(SoftmaxTileSimd);
ATTN_SIMD_TABLE(FinishColumnsSimd);
ATTN_SIMD_TABLE(MergeColumnsSimd);
ATTN_SIMD_TABLE(DropoutTileSimd);
ATTN_SIMD_TABLE(MultiplyTileSimd);
ATTN_SIMD_TABLE(ProbabilityTileSimd);
ATTN_SIMD_TABLE(RowDotTileSimd);
ATTN_SIMD_TABLE(ScoreGradientTileSimd);
}  // namespace

void SoftcapTile(int64_t keys, int64_t cols, float cap, float* s, float* grad) {
  kSoftcapTileSimdTable.Get()(keys, cols, cap, s, grad);
}
void AlibiTile(int64_t keys, int64_t cols, const float* slope, const float* position, float* s) {
  kAlibiTileSimdTable.Get()(keys, cols, slope, position, s);
}
void MaskTile(int64_t keys, int64_t cols, const int32_t* lo, const int32_t* hi, float* s) {
  kMaskTileSimdTable.Get()(keys, cols, lo, hi, s);
}
void SoftmaxTile(int64_t keys, int64_t cols, float* s, float* m, float* l, float* alpha) {
  kSoftmaxTileSimdTable.Get()(keys, cols, s, m, l, alpha);
}
void FinishColumns(int64_t cols, const float* m, const float* l, const float* sink, float* scale,
                   float* lse) {
  kFinishColumnsSimdTable.Get()(cols, m, l, sink, scale, lse);
}
void MergeColumns(int64_t head_dim_v, int64_t cols, const float* o2, const float* m2,
                  const float* l2, float* o, float* m, float* l) {
  kMergeColumnsSimdTable.Get()(head_dim_v, cols, o2, m2, l2, o, m, l);
}
void DropoutTile(const DropoutOption& dropout, int64_t j0, int64_t keys, int64_t cols,
                 const uint32_t* query, const uint32_t* head, float scale, float* keep) {
  kDropoutTileSimdTable.Get()(dropout, j0, keys, cols, query, head, scale, keep);
}
void MultiplyTile(int64_t keys, int64_t cols, const float* y, float* x) {
  kMultiplyTileSimdTable.Get()(keys, cols, y, x);
}
void ProbabilityTile(int64_t keys, int64_t cols, const float* lse2, const float* lse2_low,
                     float* s) {
  kProbabilityTileSimdTable.Get()(keys, cols, lse2, lse2_low, s);
}
void RowDotTile(int64_t keys, int64_t cols, const float* keep, const float* p, const float* dp,
                float* row_dot) {
  kRowDotTileSimdTable.Get()(keys, cols, keep, p, dp, row_dot);
}
void ScoreGradientTile(int64_t keys, int64_t cols, const float* delta, const float* keep, float* p,
                       float* dp) {
  kScoreGradientTileSimdTable.Get()(keys, cols, delta, keep, p, dp);
}

}  // namespace attn
#endif  // HWY_ONCE
