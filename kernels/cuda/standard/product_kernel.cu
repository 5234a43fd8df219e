#include <algorithm>

#include "kernels/cuda/standard/element.cuh"
#include "kernels/cuda/standard/product.h"

namespace attn::cuda::standard {
namespace {

// 256 threads, 4 x 4 elements each, three registers an element; 8 x 4 spilled. Per step of k a warp
// reads three 128-byte lines of shared memory for 16 multiply-adds a thread.
constexpr int kTileM = 64, kTileN = 64, kTileK = 16, kThreads = 256;
constexpr int kRows = 4, kCols = 4;
// Terms summed in plain fp32 before they are added to the total. Of 64 terms of one sign, the worst
// of a hundred thousand sums was at the exactness rule's limit.
constexpr int kSumTerms = 16;
static_assert(kSumTerms == kTileK);

// What one thread loads of one operand's tile: rows count along m (or n), depth along k.
// Neighbouring threads read neighbouring addresses, and a thread's elements lie evenly apart.
template <int kTileRows>
struct Loader {
  static constexpr int kElements = kTileRows * kTileK / kThreads;
  static_assert(kThreads % kTileRows == 0 && kThreads % kTileK == 0);
  bool rows_contiguous;
  int row, depth;            // of the first element in the tile
  int row_step, depth_step;  // to the next
  int64_t ld;
  float held[kElements];

  __device__ Loader(const Operand& from, bool rows_contiguous)
      : rows_contiguous(rows_contiguous), ld(from.ld) {
    const int t = threadIdx.x;
    row = rows_contiguous ? t % kTileRows : t / kTileK;
    depth = rows_contiguous ? t / kTileRows : t % kTileK;
    row_step = rows_contiguous ? 0 : kThreads / kTileK;
    depth_step = rows_contiguous ? kThreads / kTileRows : 0;
  }

  __device__ void Load(const void* data, DType dtype, int64_t row0, int64_t rows, int64_t depth0,
                       int64_t depths) {
    const int64_t r = row0 + row, d = depth0 + depth;
    const int64_t at = rows_contiguous ? d * ld + r : r * ld + d;
    const int64_t step = (rows_contiguous ? depth_step : row_step) * ld;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const bool inside = r + e * row_step < rows && d + e * depth_step < depths;
      held[e] = inside ? LoadFloat(data, dtype, at + e * step) : 0.0f;
    }
  }
  __device__ void Store(float (*tile)[kTileRows + 4]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) tile[depth + e * depth_step][row + e * row_step] = held[e];
  }
};

struct Sums {
  float part[kRows][kCols], total[kRows][kCols], lost[kRows][kCols];
};

// Adds the part to the total and keeps what the addition loses. Source: Kahan, "Further remarks on
// reducing truncation errors", 1965.
__device__ __forceinline__ void Carry(Sums& s) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const float x = __fsub_rn(s.part[r][c], s.lost[r][c]);
      const float sum = __fadd_rn(s.total[r][c], x);
      s.lost[r][c] = __fsub_rn(__fsub_rn(sum, s.total[r][c]), x);
      s.total[r][c] = sum;
      s.part[r][c] = 0.0f;
    }
  }
}

// Grid: (m tiles x n tiles, 1, matrices of c).
__global__ void __launch_bounds__(kThreads, 2) ProductKernel(const __grid_constant__ Product p) {
  __shared__ __align__(16) float a_tile[kTileK][kTileM + 4];
  __shared__ __align__(16) float b_tile[kTileK][kTileN + 4];
  const unsigned m_tiles = static_cast<unsigned>((p.m + kTileM - 1) / kTileM);
  const int64_t m0 = static_cast<int64_t>(blockIdx.x % m_tiles) * kTileM;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x / m_tiles) * kTileN;
  const int64_t summed = p.sum_group ? p.extents[2] : 1;
  const int64_t inner = p.sum_group ? 1 : p.extents[2];
  const int64_t z = blockIdx.z % inner;
  const int64_t y = blockIdx.z / inner % p.extents[1];
  const int64_t x = blockIdx.z / inner / p.extents[1];
  const int row0 = threadIdx.x / (kTileN / kCols) * kRows;
  const int col0 = threadIdx.x % (kTileN / kCols) * kCols;

  Sums s = {};
  Loader<kTileM> a(p.a, p.a.transposed);
  Loader<kTileN> b(p.b, !p.b.transposed);
  for (int64_t g = 0; g < summed; ++g) {
    const int64_t last = p.sum_group ? g : z;
    const void* a_data =
        ElementAt(p.a.data, p.a.dtype, x * p.a.batch[0] + y * p.a.batch[1] + last * p.a.batch[2]);
    const void* b_data =
        ElementAt(p.b.data, p.b.dtype, x * p.b.batch[0] + y * p.b.batch[1] + last * p.b.batch[2]);
    a.Load(a_data, p.a.dtype, m0, p.m, 0, p.k);
    b.Load(b_data, p.b.dtype, n0, p.n, 0, p.k);
    for (int64_t k0 = 0; k0 < p.k; k0 += kTileK) {
      __syncthreads();
      a.Store(a_tile);
      b.Store(b_tile);
      __syncthreads();
      if (k0 + kTileK < p.k) {
        a.Load(a_data, p.a.dtype, m0, p.m, k0 + kTileK, p.k);
        b.Load(b_data, p.b.dtype, n0, p.n, k0 + kTileK, p.k);
      }
#pragma unroll
      for (int k = 0; k < kTileK; ++k) {
        const float4 a4 = *reinterpret_cast<const float4*>(&a_tile[k][row0]);
        const float4 b4 = *reinterpret_cast<const float4*>(&b_tile[k][col0]);
        const float as[kRows] = {a4.x, a4.y, a4.z, a4.w};
        const float bs[kCols] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int c = 0; c < kCols; ++c) s.part[r][c] = fmaf(as[r], bs[c], s.part[r][c]);
        }
      }
      Carry(s);
    }
  }

  void* c_data = const_cast<void*>(
      ElementAt(p.c, p.c_dtype, x * p.c_batch[0] + y * p.c_batch[1] + z * p.c_batch[2]));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int64_t row = m0 + row0 + r, col = n0 + col0 + c;
      if (row >= p.m || col >= p.n) continue;
      const int64_t at = row * p.ldc + col;
      float value = p.alpha * s.total[r][c];
      if (p.beta != 0.0f) value += p.beta * LoadFloat(c_data, p.c_dtype, at);
      StoreFloat(c_data, p.c_dtype, at, value);
    }
  }
}

}  // namespace

cudaError_t LaunchProduct(const Product& p, cudaStream_t stream) {
  const int64_t matrices = p.extents[0] * p.extents[1] * (p.sum_group ? 1 : p.extents[2]);
  if (p.m == 0 || p.n == 0 || matrices == 0) return cudaSuccess;
  const int64_t tiles = (p.m + kTileM - 1) / kTileM * ((p.n + kTileN - 1) / kTileN);
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(tiles), 1, static_cast<unsigned>(matrices));
  ProductKernel<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace attn::cuda::standard
