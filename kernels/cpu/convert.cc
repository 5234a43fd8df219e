#include "kernels/cpu/convert.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace HWY_NAMESPACE {
namespace {

using D = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<D>;
using DHalf = hn::Rebind<uint16_t, D>;  // as many 16-bit lanes as D has 32-bit ones

// Bits of an fp32 from those of a BF16: the upper half.
HWY_INLINE hn::Vec<D> WidenBf16(hn::Vec<DHalf> bits) {
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
}

// By integer arithmetic, since not every target has the conversion: an FP16 shifted to fp32's place
// has its exponent too small by 112. Multiplying by 2^112 corrects that, subnormals included.
HWY_INLINE hn::Vec<D> WidenFp16(hn::Vec<DHalf> half) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::PromoteTo(D(), hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
#else
  const DU du;
  const D d;
  const auto bits = hn::PromoteTo(du, half);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFu));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const auto scaled = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)),
                              hn::BitCast(d, hn::Set(du, (127u + 112u) << 23)));
  // Infinity and NaN: exponent all ones.
  const auto special = hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du, 0x7F800000u));
  const auto is_special = hn::RebindMask(d, hn::Gt(hn::BitCast(hn::RebindToSigned<D>(), magnitude),
                                                   hn::Set(hn::RebindToSigned<D>(), 0x7BFF)));
  const auto value = hn::IfThenElse(is_special, hn::BitCast(d, special), scaled);
  return hn::Or(value, hn::BitCast(d, sign));
#endif
}

// Upper half, rounded to nearest even; a carry runs into the exponent as it should. Highway 1.0.3
// truncates, so this does not use its DemoteTo.
HWY_INLINE hn::Vec<DU> NarrowBf16(hn::Vec<D> v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// Round to nearest even in fp32's own arithmetic. Normal results: add half a unit of the last kept
// place, to even. Subnormal results: adding 1/2 puts the unit 2^-24 at fp32's last mantissa bit.
HWY_INLINE hn::Vec<DU> NarrowFp16(hn::Vec<D> v) {
  const DU du;
  const D d;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::And(bits, hn::Set(du, 0x80000000u));
  const auto magnitude = hn::Xor(bits, sign);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Sub(magnitude, hn::Set(du, 112u << 23)), hn::Add(odd, hn::Set(du, 0xFFFu))));
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
  const auto m = hn::BitCast(di, magnitude);  // the sign bit is clear, so signed order is right
  auto result =
      hn::IfThenElse(hn::RebindMask(du, hn::Lt(m, hn::Set(di, 113 << 23))), subnormal, normal);
  // 65520 and more round to infinity.
  result = hn::IfThenElse(hn::RebindMask(du, hn::Gt(m, hn::Set(di, 0x477FEFFF))),
                          hn::Set(du, 0x7C00u), result);
  const auto quiet =
      hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3FFu)), hn::Set(du, 0x7E00u));
  result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, result);
  return hn::Or(result, hn::ShiftRight<16>(sign));
}

template <DType kDType>
HWY_INLINE hn::Vec<D> LoadWide(const uint16_t* from, int64_t count) {
  const DHalf dh;
  if (count < static_cast<int64_t>(hn::MaxLanes(D()))) {
    HWY_ALIGN uint16_t lanes[hn::MaxLanes(DHalf())] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
    const auto bits = hn::Load(dh, lanes);
    return kDType == DType::kBf16 ? WidenBf16(bits) : WidenFp16(bits);
  }
  const auto bits = hn::LoadU(dh, from);
  return kDType == DType::kBf16 ? WidenBf16(bits) : WidenFp16(bits);
}

template <DType kDType>
void Widen(const uint16_t* source, int64_t n, float* destination) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(LoadWide<kDType>(source + i, kLanes), d, destination + i);
  }
  if (i < n) StoreFirst(LoadWide<kDType>(source + i, n - i), d, destination + i, n - i);
}

template <DType kDType>
void Narrow(const float* source, int64_t n, uint16_t* destination) {
  const D d;
  const DHalf dh;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = HWY_MIN(kLanes, n - i);
    const auto v = count == kLanes ? hn::LoadU(d, source + i) : LoadFirst(d, source + i, count);
    const auto wide = kDType == DType::kBf16 ? NarrowBf16(v) : NarrowFp16(v);
    // Every lane is under 2^16, so the saturating conversion from signed does not saturate.
    const auto bits = hn::DemoteTo(dh, hn::BitCast(hn::RebindToSigned<D>(), wide));
    if (count == kLanes) {
      hn::StoreU(bits, dh, destination + i);
    } else {
      HWY_ALIGN uint16_t lanes[hn::MaxLanes(DHalf())];
      hn::Store(bits, dh, lanes);
      for (int64_t c = 0; c < count; ++c) destination[i + c] = lanes[c];
    }
  }
}

}  // namespace

void WidenRowSimd(const void* source, DType dtype, int64_t n, float* destination) {
  if (dtype == DType::kFp16) {
    Widen<DType::kFp16>(static_cast<const uint16_t*>(source), n, destination);
  } else {
    Widen<DType::kBf16>(static_cast<const uint16_t*>(source), n, destination);
  }
}

void NarrowRowSimd(const float* source, int64_t n, DType dtype, void* destination) {
  if (dtype == DType::kFp16) {
    Narrow<DType::kFp16>(source, n, static_cast<uint16_t*>(destination));
  } else {
    Narrow<DType::kBf16>(source, n, static_cast<uint16_t*>(destination));
  }
}

// By 4 x 4 blocks in 128-bit registers.
void TransposeTileSimd(const float* source, int64_t source_stride, int64_t rows, int64_t cols,
                       float* destination, int64_t destination_stride) {
  int64_t rows_done = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dd;
  for (; rows_done + 4 <= rows; rows_done += 4) {
    const float* s0 = source + rows_done * source_stride;
    const float* s1 = s0 + source_stride;
    const float* s2 = s1 + source_stride;
    const float* s3 = s2 + source_stride;
    float* to = destination + rows_done;
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      const auto r0 = hn::LoadU(d, s0 + c), r1 = hn::LoadU(d, s1 + c);
      const auto r2 = hn::LoadU(d, s2 + c), r3 = hn::LoadU(d, s3 + c);
      const auto lo01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));
      const auto lo23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
      const auto hi01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));
      const auto hi23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
      float* at = to + c * destination_stride;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, lo01, lo23)), d, at);
      at += destination_stride;
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, lo01, lo23)), d, at);
      at += destination_stride;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, hi01, hi23)), d, at);
      at += destination_stride;
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, hi01, hi23)), d, at);
    }
    for (; c < cols; ++c) {
      float* at = to + c * destination_stride;
      at[0] = s0[c];
      at[1] = s1[c];
      at[2] = s2[c];
      at[3] = s3[c];
    }
  }
#endif
  for (; rows_done < rows; ++rows_done) {
    const float* row = source + rows_done * source_stride;
    for (int64_t c = 0; c < cols; ++c) destination[c * destination_stride + rows_done] = row[c];
  }
}

float DotRowSimd(const float* a, const float* b, int64_t n) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + kLanes), hn::LoadU(d, b + i + kLanes), sum1);
  }
  for (; i < n; i += kLanes) {
    const int64_t count = HWY_MIN(kLanes, n - i);
    sum0 = hn::MulAdd(LoadFirst(d, a + i, count), LoadFirst(d, b + i, count), sum0);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

void AddScaledRowSimd(const float* x, float factor, int64_t n, float* y) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), f, hn::LoadU(d, y + i)), d, y + i);
  }
  if (i < n) {
    const auto sum = hn::MulAdd(LoadFirst(d, x + i, n - i), f, LoadFirst(d, y + i, n - i));
    StoreFirst(sum, d, y + i, n - i);
  }
}

void ScaleRowSimd(float factor, int64_t n, float* y) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, y + i), f), d, y + i);
  if (i < n) StoreFirst(hn::Mul(LoadFirst(d, y + i, n - i), f), d, y + i, n - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace attn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/simd_dispatch.h"

namespace attn {
namespace {
ATTN_SIMD_TABLE(WidenRowSimd);
ATTN_SIMD_TABLE(NarrowRowSimd);
ATTN_SIMD_TABLE(TransposeTileSimd);
ATTN_SIMD_TABLE(DotRowSimd);
ATTN_SIMD_TABLE(AddScaledRowSimd);
ATTN_SIMD_TABLE(ScaleRowSimd);
}  // namespace

void WidenRow(const void* source, DType dtype, int64_t n, float* destination) {
  if (n <= 0) return;
  if (dtype == DType::kFp32) {
    std::memcpy(destination, source, static_cast<size_t>(n) * sizeof(float));
  } else {
    kWidenRowSimdTable.Get()(source, dtype, n, destination);
  }
}

void NarrowRow(const float* source, int64_t n, DType dtype, void* destination) {
  if (n <= 0) return;
  if (dtype == DType::kFp32) {
    std::memcpy(destination, source, static_cast<size_t>(n) * sizeof(float));
  } else {
    kNarrowRowSimdTable.Get()(source, n, dtype, destination);
  }
}

void TransposeTile(const float* source, int64_t source_stride, int64_t rows, int64_t cols,
                   float* destination, int64_t destination_stride) {
  kTransposeTileSimdTable.Get()(source, source_stride, rows, cols, destination, destination_stride);
}

float DotRow(const float* a, const float* b, int64_t n) { return kDotRowSimdTable.Get()(a, b, n); }

void AddScaledRow(const float* x, float factor, int64_t n, float* y) {
  kAddScaledRowSimdTable.Get()(x, factor, n, y);
}

void ScaleRow(float factor, int64_t n, float* y) { kScaleRowSimdTable.Get()(factor, n, y); }

}  // namespace attn
#endif  // HWY_ONCE
