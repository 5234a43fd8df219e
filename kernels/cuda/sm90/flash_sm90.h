// flash_sm90: flash attention for compute capability 9.0 (wgmma, TMA).
#ifndef ATTN_KERNELS_CUDA_SM90_FLASH_SM90_H_
#define ATTN_KERNELS_CUDA_SM90_FLASH_SM90_H_

#include <memory>

#include "kernels/cuda/device_path.h"

namespace attn::cuda {

// Forward. FP16 and BF16, head_dim and head_dim_v multiples of 8 up to 256, more than 16 queries,
// every option; block masks whose blocks are multiples of 64; strides that a tensor map holds.
// Every call is bitwise repeatable.
std::shared_ptr<const DevicePath> MakeFlashSm90Path();

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_SM90_FLASH_SM90_H_
