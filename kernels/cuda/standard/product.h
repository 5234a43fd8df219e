// The matrix products of the standard CUDA path: by cuBLAS where it serves, else by a kernel of our
// own.
#ifndef ATTN_KERNELS_CUDA_STANDARD_PRODUCT_H_
#define ATTN_KERNELS_CUDA_STANDARD_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/dtype.h"
#include "kernels/cuda/runtime/cublas.h"

namespace attn::cuda::standard {

// Axes of a batch of matrices: sequence, kv head, query head of its group.
inline constexpr int kBatchAxes = 3;

// A batch of matrices, row-major, or transposed: element (r, c) of matrix (x, y, z) is at
// x * batch[0] + y * batch[1] + z * batch[2] + r * ld + c (transposed: c * ld + r).
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  bool transposed = false;
  int64_t ld = 0;
  int64_t batch[kBatchAxes] = {};
};

// c = alpha * a b + beta * c for every matrix of the batch: a [m, k], b [k, n], c [m, n] row-major.
// sum_group: c is the same for the whole last batch axis, and the products along it are summed.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  int64_t extents[kBatchAxes] = {1, 1, 1};
  Operand a, b;
  void* c = nullptr;
  DType c_dtype = DType::kFp32;
  int64_t ldc = 0;
  int64_t c_batch[kBatchAxes] = {};
  bool sum_group = false;
  bool scores = false;  // c is S or dP
  float alpha = 1.0f, beta = 0.0f;
};

// Whether cuBLAS takes the product: operands of one type, rows that do not overlap, and for fp32
// only scores up to k = 128. cuBLAS adds the k terms of an element one after another in fp32. For
// 16-bit inputs that is far below their rounding. The exactness rule grants a score 2^-20 of its
// terms, but an fp32 output 2^-21: of 70 terms of one sign the worst of a hundred thousand sums was
// beyond it.
bool CublasServes(const Product& product);

// Enqueues the product. `blas`: null where there is no cuBLAS. Errors: INTERNAL.
absl::Status Run(const Product& product, const CublasHandle* blas, cudaStream_t stream);

// Our own kernel: fp32 multiply-add over operands of any of the types, sums of 16 terms each added
// to the total with compensation, so that an element's error does not grow with k. `sum_group` is
// one sum. At most 65535 matrices.
cudaError_t LaunchProduct(const Product& product, cudaStream_t stream);

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_PRODUCT_H_
