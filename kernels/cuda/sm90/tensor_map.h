// Tensor maps: what TMA knows of a tensor. Source: CUDA Driver API, "Tensor Map Object Management".
#ifndef ATTN_KERNELS_CUDA_SM90_TENSOR_MAP_H_
#define ATTN_KERNELS_CUDA_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/api/dtype.h"
#include "kernels/cuda/runtime/pack.h"

namespace attn::cuda::sm90 {

// Why no map can hold the tensor: "k stride of tokens 12 bytes, not a multiple of 16"; empty: one
// can. The stride of an axis of one element does not matter. Pure.
std::string MapObstacle(std::string_view name, const StridedTensor& tensor);

// What is copied at a time: the heads of a token lie side by side. At most 256 of each.
struct MapBox {
  int heads = 1, tokens = 1;
};

// Makes the map (element, head, token, batch) of a tensor that has no obstacle: boxes of kPanel
// elements of each head and token of `box`, with a 128-byte swizzle; what lies outside the tensor
// reads as zeros. `data`: device memory, aligned to 16 bytes. dtype: FP16 or BF16. The encoder is
// looked up in the driver at the first call, so that a host without a driver starts. Errors:
// INTERNAL: there is none, or it refuses. Thread-safe.
absl::Status EncodeTensorMap(const StridedTensor& tensor, const void* data, DType dtype, MapBox box,
                             CUtensorMap* map);

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_TENSOR_MAP_H_
