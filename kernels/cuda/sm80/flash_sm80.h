// flash_sm80: portable tensor-core flash attention (mma.sync, cp.async) from compute capability 8.0
// up.
#ifndef ATTN_KERNELS_CUDA_SM80_FLASH_SM80_H_
#define ATTN_KERNELS_CUDA_SM80_FLASH_SM80_H_

#include <memory>

#include "kernels/cuda/device_path.h"

namespace attn::cuda {

// FP16 and BF16, head_dim and head_dim_v multiples of 8 up to 256, every option; block masks whose
// blocks are multiples of 64; dout of the input type. Deterministic calls are bitwise repeatable.
std::shared_ptr<const DevicePath> MakeFlashSm80Path();

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_SM80_FLASH_SM80_H_
