// Vector helpers and elementary functions, per SIMD target: include after hwy/highway.h in a source
// that foreach_target.h compiles. No include guard of the usual kind: it is read once per target.
#if defined(ATTN_KERNELS_CPU_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTN_KERNELS_CPU_VECTOR_INL_H_
#undef ATTN_KERNELS_CPU_VECTOR_INL_H_
#else
#define ATTN_KERNELS_CPU_VECTOR_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The first `count` lanes from memory, the others 0. Touches nothing beyond. 0 <= count <= lanes.
template <class D>
HWY_INLINE hn::Vec<D> LoadFirst(D d, const hn::TFromD<D>* from, int64_t count) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count)), d, from);
#else
  HWY_ALIGN hn::TFromD<D> lanes[hn::MaxLanes(D())] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return hn::Load(d, lanes);
#endif
}

// Stores the first `count` lanes and touches nothing beyond.
template <class D>
HWY_INLINE void StoreFirst(hn::Vec<D> v, D d, hn::TFromD<D>* to, int64_t count) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(count)), d, to);
#else
  HWY_ALIGN hn::TFromD<D> lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
#endif
}

// 2^(n + f) where `shifted` is n + kExp2Magic, n an integer in [-127, 128] and |f| <= 1/2: 2^n
// (1 + f g(f)), g of degree 5 (Chebyshev interpolation, truncation error 5e-9). n = -127 gives 0.
inline constexpr float kExp2Magic = 12582912.0f + 127.0f;
template <class D>
HWY_INLINE hn::Vec<D> Exp2OfParts(D d, hn::Vec<D> shifted, hn::Vec<D> f) {
  const hn::RebindToUnsigned<D> du;
  const hn::Vec<D> power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
  hn::Vec<D> g = hn::MulAdd(hn::Set(d, 0.00015461447502f), f, hn::Set(d, 0.0013390867352f));
  g = hn::MulAdd(g, f, hn::Set(d, 0.0096180566698f));
  g = hn::MulAdd(g, f, hn::Set(d, 0.055503571043f));
  g = hn::MulAdd(g, f, hn::Set(d, 0.24022650922f));
  g = hn::MulAdd(g, f, hn::Set(d, 0.69314718803f));
  return hn::Mul(hn::MulAdd(g, f, hn::Set(d, 1.0f)), power);
}

// 2^x for x <= 127; 0 under -126.5; exactly 1 at 0; NaN where x is NaN (x86). Relative error under
// 1.5e-7.
template <class D>
HWY_INLINE hn::Vec<D> Exp2(D d, hn::Vec<D> x) {
  // In this order x86 keeps a NaN.
  x = hn::Max(hn::Set(d, -127.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low mantissa bits; with the
  // 127 it is already biased as an exponent is.
  const hn::Vec<D> magic = hn::Set(d, kExp2Magic);
  const hn::Vec<D> shifted = hn::Add(x, magic);
  return Exp2OfParts(d, shifted, hn::Sub(x, hn::Sub(shifted, magic)));
}

// 2^(x + low) for |low| far under 1, with x as above; low is ignored where it is not finite.
template <class D>
HWY_INLINE hn::Vec<D> Exp2(D d, hn::Vec<D> x, hn::Vec<D> low) {
  x = hn::Max(hn::Set(d, -127.0f), x);
  const hn::Vec<D> magic = hn::Set(d, kExp2Magic);
  const hn::Vec<D> shifted = hn::Add(x, magic);
  const hn::Vec<D> f = hn::Sub(x, hn::Sub(shifted, magic));
  const hn::Vec<D> safe_low = hn::IfThenElseZero(hn::Lt(hn::Abs(low), hn::Set(d, 0.25f)), low);
  return Exp2OfParts(d, shifted, hn::Add(f, safe_low));
}

// e^x for x <= 88; 0 under -87.7; exactly 1 at 0. Relative error under 1.5e-7 (with fused
// multiply-adds; elsewhere 1e-7 |x| more).
template <class D>
HWY_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x) {
  x = hn::Max(hn::Set(d, -88.029690f), x);  // -127 log 2
  const hn::Vec<D> log2e = hn::Set(d, 1.442695041f);
  const hn::Vec<D> magic = hn::Set(d, kExp2Magic);
  const hn::Vec<D> shifted = hn::MulAdd(x, log2e, magic);
  const hn::Vec<D> f = hn::MulSub(x, log2e, hn::Sub(shifted, magic));
  // The part of log2(e) that fp32 does not hold.
  return Exp2OfParts(d, shifted, hn::MulAdd(x, hn::Set(d, 1.925963033e-8f), f));
}

// Natural logarithm of a positive normal number; NaN of a NaN. Relative error under 3e-7 away from
// 1, absolute error under 1e-7 near it: log x = n log 2 + log m, m in [sqrt(1/2), sqrt(2)), by the
// series of 2 artanh((m - 1) / (m + 1)), truncated at 1e-9.
template <class D>
HWY_INLINE hn::Vec<D> Log(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  // Subtracting the bits of sqrt(1/2) makes the exponent field change at sqrt(1/2) * 2^n.
  const auto n = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3F3504F3)));
  const hn::Vec<D> m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(n)));
  const hn::Vec<D> s = hn::Div(hn::Sub(m, hn::Set(d, 1.0f)), hn::Add(m, hn::Set(d, 1.0f)));
  const hn::Vec<D> s2 = hn::Mul(s, s);
  hn::Vec<D> series = hn::MulAdd(hn::Set(d, 2.0f / 9), s2, hn::Set(d, 2.0f / 7));
  series = hn::MulAdd(series, s2, hn::Set(d, 2.0f / 5));
  series = hn::MulAdd(series, s2, hn::Set(d, 2.0f / 3));
  const hn::Vec<D> log_m = hn::MulAdd(hn::Mul(series, s2), s, hn::Add(s, s));
  const hn::Vec<D> log = hn::MulAdd(hn::ConvertTo(d, n), hn::Set(d, 0.693147181f), log_m);
  return hn::IfThenElse(hn::IsNaN(x), x, log);
}

// tanh(x); *grad = 1 - tanh²(x), with a small relative error also where tanh is near 1. Relative
// errors under 4e-7: an odd polynomial (truncation error 2e-8) under 0.625, elsewhere
// (1 - e) / (1 + e), and 4 e / (1 + e)² for the gradient, with e = exp(-2 |x|).
template <class D>
HWY_INLINE hn::Vec<D> TanhWithGrad(D d, hn::Vec<D> x, hn::Vec<D>* grad) {
  const hn::Vec<D> one = hn::Set(d, 1.0f);
  const hn::Vec<D> ax = hn::Abs(x);
  const hn::Vec<D> e = Exp2(d, hn::Mul(ax, hn::Set(d, -2.885390082f)));
  const hn::Vec<D> inv = hn::Div(one, hn::Add(one, e));
  *grad = hn::Mul(hn::Mul(hn::Set(d, 4.0f), e), hn::Mul(inv, inv));
  const hn::Vec<D> large = hn::CopySign(hn::Mul(hn::Sub(one, e), inv), x);
  const hn::Vec<D> z = hn::Mul(x, x);
  hn::Vec<D> h = hn::MulAdd(hn::Set(d, -0.00610494801f), z, hn::Set(d, 0.0210036412f));
  h = hn::MulAdd(h, z, hn::Set(d, -0.0538524975f));
  h = hn::MulAdd(h, z, hn::Set(d, 0.133327823f));
  h = hn::MulAdd(h, z, hn::Set(d, -0.333333291f));
  const hn::Vec<D> small = hn::MulAdd(hn::Mul(h, z), x, x);
  return hn::IfThenElse(hn::Lt(ax, hn::Set(d, 0.625f)), small, large);
}

}  // namespace HWY_NAMESPACE
}  // namespace attn
HWY_AFTER_NAMESPACE();

#endif
