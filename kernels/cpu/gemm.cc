#include "kernels/cpu/gemm.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attn {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// Register tiles: kRows x kVectors accumulators, plus kVectors of B and one broadcast of A, within
// 32 registers (AVX-512) or 16. The accumulators also have to cover the latency of an FMA (4
// cycles, two per cycle: 8). Measured by tests/bench/cpu_bench gemm.
#if HWY_TARGET == HWY_AVX3
constexpr int kMaxVectors = 4;
constexpr int RowsFor(int vectors) { return vectors == 4 ? 6 : 8; }
#else
constexpr int kMaxVectors = 2;
constexpr int RowsFor(int vectors) { return vectors == 2 ? 6 : 8; }
#endif

struct Tile {
  int64_t k;
  const float* a;
  int64_t a_row, a_k;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  GemmOutput output;
  const float* scale;
  int64_t tail;  // columns in the last vector where kTail
};

template <int kRows, int kVectors, bool kTail>
HWY_INLINE void MicroKernel(const Tile& t) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  V acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT b = t.b;
  const float* HWY_RESTRICT a = t.a;
  const int64_t a_row = t.a_row, a_k = t.a_k, ldb = t.ldb;
#pragma GCC unroll 2
  for (int64_t k = 0; k < t.k; ++k) {
    V bv[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      bv[v] = kTail && v == kVectors - 1 ? LoadFirst(d, b + v * kLanes, t.tail)
                                         : hn::LoadU(d, b + v * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V av = hn::Set(d, a[r * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
    }
    a += a_k;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT c = t.c + r * t.ldc;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + v * kLanes;
      const bool partial = kTail && v == kVectors - 1;
      V value = acc[r][v];
      if (t.output != GemmOutput::kStore) {
        V old = partial ? LoadFirst(d, to, t.tail) : hn::LoadU(d, to);
        if (t.output == GemmOutput::kScaleAdd) {
          const float* scale = t.scale + v * kLanes;
          value =
              hn::MulAdd(old, partial ? LoadFirst(d, scale, t.tail) : hn::LoadU(d, scale), value);
        } else {
          value = hn::Add(old, value);
        }
      }
      if (partial) {
        StoreFirst(value, d, to, t.tail);
      } else {
        hn::StoreU(value, d, to);
      }
    }
  }
}

// The last rows of a panel: fewer than RowsFor(kVectors).
template <int kRows, int kVectors, bool kTail>
HWY_NOINLINE void RowRemainder(int64_t rows, const Tile& t) {
  if (rows == kRows) {
    MicroKernel<kRows, kVectors, kTail>(t);
  } else if constexpr (kRows > 1) {
    RowRemainder<kRows - 1, kVectors, kTail>(rows, t);
  }
}

template <int kVectors, bool kTail>
HWY_NOINLINE void Panel(int64_t m, Tile t) {
  constexpr int kRows = RowsFor(kVectors);
  for (; m >= kRows; m -= kRows) {
    MicroKernel<kRows, kVectors, kTail>(t);
    t.a += kRows * t.a_row;
    t.c += kRows * t.ldc;
  }
  if (m > 0) RowRemainder<kRows - 1, kVectors, kTail>(m, t);
}

template <int kVectors>
void PanelsUpTo(int vectors, bool tail, int64_t m, const Tile& t) {
  if (vectors == kVectors) {
    if (tail) {
      Panel<kVectors, true>(m, t);
    } else {
      Panel<kVectors, false>(m, t);
    }
  } else if constexpr (kVectors > 1) {
    PanelsUpTo<kVectors - 1>(vectors, tail, m, t);
  }
}

}  // namespace

void GemmSimd(int64_t m, int64_t n, int64_t k, const GemmLeft& a, const float* b, int64_t ldb,
              float* c, int64_t ldc, GemmOutput output, const float* column_scale) {
  constexpr int64_t kLanes = hn::MaxLanes(D());
  // Where k is 0, A and B have no entries and may be null: nothing is added to them.
  const int64_t a_row = k > 0 ? a.row_stride : 0;
  Tile t{k, a.data, a_row, a.k_stride, b, ldb, c, ldc, output, column_scale, 0};
  int64_t vectors = (n + kLanes - 1) / kLanes;
  const int64_t tail = n % kLanes;
  while (vectors > 0) {
    // Panels of nearly equal width: 5 vectors go as 3 + 2 rather than 4 + 1.
    const int64_t panels = (vectors + kMaxVectors - 1) / kMaxVectors;
    const int64_t width = (vectors + panels - 1) / panels;
    vectors -= width;
    t.tail = vectors == 0 ? tail : 0;
    PanelsUpTo<kMaxVectors>(static_cast<int>(width), t.tail != 0, m, t);
    if (k > 0) t.b += width * kLanes;
    t.c += width * kLanes;
    if (t.scale != nullptr) t.scale += width * kLanes;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/simd_dispatch.h"

namespace attn {
namespace {
ATTN_SIMD_TABLE(GemmSimd);

// Terms summed in one register before they are added to C. A chain of n terms of one sign loses up
// to n / 2 roundings: at 64 the tail of long sums passed the exactness rule's fp32 bound (1.08), at
// 32 it does not.
constexpr int64_t kGemmPiece = 32;
}  // namespace

void Gemm(int64_t m, int64_t n, int64_t k, const GemmLeft& a, const float* b, int64_t ldb, float* c,
          int64_t ldc, GemmOutput output, const float* column_scale) {
  if (m <= 0 || n <= 0) return;
  GemmLeft left = a;
  do {
    const int64_t piece = std::min(k, kGemmPiece);
    kGemmSimdTable.Get()(m, n, piece, left, b, ldb, c, ldc, output, column_scale);
    left.data += piece * a.k_stride;
    b += piece * ldb;
    k -= piece;
    output = GemmOutput::kAdd;
  } while (k > 0);
}

}  // namespace attn
#endif  // HWY_ONCE
