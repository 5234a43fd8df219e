// Rows of FP32, FP16 and BF16 to and from fp32, transposition, and dot products, with SIMD.
#ifndef ATTN_KERNELS_CPU_CONVERT_H_
#define ATTN_KERNELS_CPU_CONVERT_H_

#include <cstdint>

#include "kernels/api/dtype.h"

namespace attn {

// destination[c] = source[c], c < n. Exact. Thread-safe.
void WidenRow(const void* source, DType dtype, int64_t n, float* destination);

// destination[c] = source[c] rounded to nearest even, c < n; overflow gives infinity, NaN stays
// NaN, subnormals are kept. Equal to StoreElement() bit for bit except for NaN payloads.
// Thread-safe.
void NarrowRow(const float* source, int64_t n, DType dtype, void* destination);

// destination[c * destination_stride + r] = source[r * source_stride + c], r < rows, c < cols.
// Thread-safe.
void TransposeTile(const float* source, int64_t source_stride, int64_t rows, int64_t cols,
                   float* destination, int64_t destination_stride);

// Sum of a[c] * b[c]. Thread-safe.
float DotRow(const float* a, const float* b, int64_t n);

// y[c] += x[c] * factor. Thread-safe.
void AddScaledRow(const float* x, float factor, int64_t n, float* y);

// y[c] *= factor. Thread-safe.
void ScaleRow(float factor, int64_t n, float* y);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_CONVERT_H_
