// standard_cuda: attention with its scores and probabilities in device memory, as FlashAttention
// (Dao et al. 2022) states the standard algorithm. Takes what no flash path takes, and is the
// yardstick.
#ifndef ATTN_KERNELS_CUDA_STANDARD_STANDARD_CUDA_H_
#define ATTN_KERNELS_CUDA_STANDARD_STANDARD_CUDA_H_

#include <cstdint>
#include <memory>

#include "kernels/cuda/device_path.h"

namespace attn::cuda {

// Scores of 64 heads of 4096 x 4096 in fp32.
inline constexpr int64_t kStandardWorkspaceBytes = int64_t{4} << 30;

// Everything that Validate() takes: FP32 (in fp32: no TF32), FP16 and BF16, every option, from
// compute capability 8.0 up. Products by cuBLAS where it can be loaded (and `use_cublas`), else by
// a slower kernel of our own; KernelId() ends with which. The heads of a call are computed in
// chunks whose scores fit `workspace_limit_bytes`; WORKSPACE_LIMIT where one head of one sequence
// does not. Every call is deterministic.
std::shared_ptr<const DevicePath> MakeStandardCudaPath(
    int64_t workspace_limit_bytes = kStandardWorkspaceBytes, bool use_cublas = true);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_STANDARD_STANDARD_CUDA_H_
