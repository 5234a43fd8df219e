// cuBLAS, found at run time: a host without it starts, and the library is not linked.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_CUBLAS_H_
#define ATTN_KERNELS_CUDA_RUNTIME_CUBLAS_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/mutex.h"

namespace attn::cuda {

// `count` products c = alpha * op(a) op(b) + beta * c, column-major as BLAS has it: op(a) is m x k,
// op(b) k x n, c m x n. lda, ldb, ldc: elements from one column to the next; stride_*: from one
// matrix of the batch to the next. a and b have one type; fp32 is computed in fp32 (no TF32), 16
// bits on tensor cores with fp32 sums.
struct BlasProduct {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  float alpha = 1.0f, beta = 0.0f;
  cudaDataType_t type = CUDA_R_32F;
  cudaDataType_t c_type = CUDA_R_32F;
  const void* a = nullptr;
  int64_t lda = 0, stride_a = 0;
  const void* b = nullptr;
  int64_t ldb = 0, stride_b = 0;
  void* c = nullptr;
  int64_t ldc = 0, stride_c = 0;
  int64_t count = 1;
};

class Cublas;

// A cuBLAS handle for one thread at a time; goes back to its pool on destruction, which is allowed
// while its products still run, since they use nothing of the handle.
class CublasHandle {
 public:
  CublasHandle(CublasHandle&& other) noexcept;
  CublasHandle& operator=(CublasHandle&&) = delete;
  ~CublasHandle();

  // Enqueues the products. Errors: INTERNAL (names the cuBLAS status).
  absl::Status Run(const BlasProduct& product) const;

 private:
  friend class Cublas;
  CublasHandle(const Cublas* library, int device, void* handle)
      : library_(library), device_(device), handle_(handle) {}

  const Cublas* library_;
  int device_;
  void* handle_;
};

// The library. Thread-safe.
class Cublas {
 public:
  // The library of this process, looked for once: first as the loader finds it (libcublas.so.13,
  // .so.12), then beside a CUDA toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda). Null where it is
  // not there or too old, or where ATTN_CUBLAS=off is in the environment (for diagnosis: the
  // products of standard_cuda then run on kernels of attnd's own); *why then says what was tried.
  static const Cublas* Get(std::string* why = nullptr);

  // "13.1.0"; empty where the library does not say.
  const std::string& version() const { return version_; }

  // A handle that works on `stream` of `device`, the current device of the calling thread, with
  // `workspace` (device memory, 256-byte aligned) as its only scratch memory; results are then the
  // same bits on every run. Pooled: no allocation once as many handles exist as are in use at a
  // time. Errors: INTERNAL, RESOURCE_EXHAUSTED.
  absl::StatusOr<CublasHandle> Handle(int device, cudaStream_t stream, void* workspace,
                                      int64_t workspace_bytes) const;

 private:
  friend class CublasHandle;
  struct Functions;
  Cublas() = default;
  static Cublas* Load(std::string* why);
  void Return(int device, void* handle) const;

  const Functions* functions_ = nullptr;
  std::string version_;
  mutable Mutex mutex_;
  mutable std::map<int, std::vector<void*>> idle_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_CUBLAS_H_
