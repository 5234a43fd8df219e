// Single-precision matrix products on tiles that lie in cache.
#ifndef ATTN_KERNELS_CPU_GEMM_H_
#define ATTN_KERNELS_CPU_GEMM_H_

#include <cstdint>

namespace attn {

// What happens to C.
enum class GemmOutput {
  kStore,     // C = A B
  kAdd,       // C = C + A B
  kScaleAdd,  // C = C diag(column_scale) + A B
};

// The left operand, with any strides: A(i, k) = data[i * row_stride + k * k_stride].
struct GemmLeft {
  const float* data;
  int64_t row_stride;
  int64_t k_stride;
};

// C [m, n] from A [m, k] and B [k, n], fp32. b and c are row-major with row strides ldb, ldc in
// elements. Each entry is summed in k order by fused multiply-adds in a register, 32 terms at a
// time, and then stored or added to C, so that a long sum is a sum of short sums. Nothing outside
// the m x n entries is written, nothing outside the k x n entries of B is read. No alignment is
// needed; rows aligned to 64 bytes are faster. k = 0 gives A B = 0. Extents may be 0. C must not
// overlap A or B. column_scale [n]: kScaleAdd only. Runs on the calling thread. Thread-safe.
void Gemm(int64_t m, int64_t n, int64_t k, const GemmLeft& a, const float* b, int64_t ldb, float* c,
          int64_t ldc, GemmOutput output, const float* column_scale = nullptr);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_GEMM_H_
