#include "kernels/cuda/standard/product.h"

#include <algorithm>

#include "kernels/cuda/runtime/device.h"

namespace attn::cuda::standard {
namespace {

constexpr int64_t kMaxFp32Terms = 128;

cudaDataType_t BlasType(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return CUDA_R_16F;
    case DType::kBf16:
      return CUDA_R_16BF;
    case DType::kFp32:
    case DType::kUint8:
      break;
  }
  return CUDA_R_32F;
}

// Rows x cols of one stored matrix: (outer, inner) with the inner axis contiguous.
bool RowsApart(int64_t outer, int64_t inner, int64_t ld) { return outer <= 1 || ld >= inner; }

const void* Moved(const void* data, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(data) + elements * SizeOf(dtype);
}

// The batch axes other than `axis`, outer first.
struct Loops {
  int first, second;
};
Loops LoopsBeside(int axis) { return {axis == 0 ? 1 : 0, axis == 2 ? 1 : 2}; }

// The axis that one call covers, the longest; the others are looped over. The summed axis cannot be
// it.
int StridedAxis(const Product& p) {
  int axis = 0;
  for (int i = 1; i < kBatchAxes; ++i) {
    if (p.sum_group && i == 2) continue;
    if (p.extents[i] > p.extents[axis]) axis = i;
  }
  return axis;
}

// Where every tensor steps along `outer` as far as along all of `inner`, the two are one axis.
bool Merges(const Product& p, int outer, int inner) {
  const int64_t n = p.extents[inner];
  return p.a.batch[outer] == n * p.a.batch[inner] && p.b.batch[outer] == n * p.b.batch[inner] &&
         p.c_batch[outer] == n * p.c_batch[inner];
}

Product Merged(Product p) {
  const auto merge = [&p](int outer, int inner) {
    if (p.extents[outer] == 1 || (p.extents[inner] != 1 && !Merges(p, outer, inner))) return;
    if (p.extents[inner] == 1) {  // the outer axis becomes the inner one
      p.a.batch[inner] = p.a.batch[outer];
      p.b.batch[inner] = p.b.batch[outer];
      p.c_batch[inner] = p.c_batch[outer];
    }
    p.extents[inner] *= p.extents[outer];
    p.extents[outer] = 1;
  };
  if (!p.sum_group) merge(1, 2);
  if (!p.sum_group && p.extents[1] == 1) merge(0, 2);
  merge(0, 1);
  return p;
}

absl::Status RunCublas(const Product& given, const CublasHandle& blas) {
  const Product p = Merged(given);
  // Row-major C = A B is column-major C^T = B^T A^T.
  BlasProduct call;
  call.m = p.n;
  call.n = p.m;
  call.k = p.k;
  call.transpose_a = p.b.transposed;
  call.transpose_b = p.a.transposed;
  call.alpha = p.alpha;
  call.type = BlasType(p.a.dtype);
  call.c_type = BlasType(p.c_dtype);
  call.lda = std::max(p.b.ld, p.b.transposed ? p.k : p.n);  // matters only for a single row
  call.ldb = std::max(p.a.ld, p.a.transposed ? p.m : p.k);
  call.ldc = std::max(p.ldc, p.n);
  const int axis = StridedAxis(p);
  call.count = p.extents[axis];
  call.stride_a = p.b.batch[axis];
  call.stride_b = p.a.batch[axis];
  call.stride_c = p.c_batch[axis];
  const auto [first, second] = LoopsBeside(axis);
  for (int64_t x = 0; x < p.extents[first]; ++x) {
    for (int64_t y = 0; y < p.extents[second]; ++y) {
      call.a = Moved(p.b.data, p.b.dtype, x * p.b.batch[first] + y * p.b.batch[second]);
      call.b = Moved(p.a.data, p.a.dtype, x * p.a.batch[first] + y * p.a.batch[second]);
      call.c =
          const_cast<void*>(Moved(p.c, p.c_dtype, x * p.c_batch[first] + y * p.c_batch[second]));
      const bool adds = p.sum_group && y > 0;  // the summed axis is the last one
      call.beta = adds ? 1.0f : p.beta;
      if (absl::Status status = blas.Run(call); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool CublasServes(const Product& p) {
  if (p.a.dtype != p.b.dtype) return false;
  if (p.a.dtype == DType::kFp32 && (!p.scores || p.k > kMaxFp32Terms)) return false;
  // A group's sum goes through c, which must hold it in fp32.
  if (p.sum_group && p.extents[2] > 1 && p.c_dtype != DType::kFp32) return false;
  return (p.a.transposed ? RowsApart(p.k, p.m, p.a.ld) : RowsApart(p.m, p.k, p.a.ld)) &&
         (p.b.transposed ? RowsApart(p.n, p.k, p.b.ld) : RowsApart(p.k, p.n, p.b.ld));
}

absl::Status Run(const Product& product, const CublasHandle* blas, cudaStream_t stream) {
  if (blas != nullptr && CublasServes(product)) return RunCublas(product, *blas);
  return ToStatus(LaunchProduct(product, stream), "standard product kernel");
}

}  // namespace attn::cuda::standard
