// Strided tensors made loadable: rows that do not start on 16 bytes are copied, on the device, to
// rows that do.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_PACK_H_
#define ATTN_KERNELS_CUDA_RUNTIME_PACK_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/api/problem.h"

namespace attn::cuda {

// Rows and tensors start at multiples of this many bytes where a path reads them: the width of one
// vector load, cp.async or TMA element. Source: PTX ISA 8.5, "cp.async".
inline constexpr int64_t kRowAlignment = 16;

// A tensor [batch, tokens, heads, dim] with a contiguous last axis; THD: batch 1.
struct StridedTensor {
  int64_t element_bytes = 0;
  int64_t batch = 0, tokens = 0, heads = 0, dim = 0;
  Strides strides;

  bool empty() const { return batch == 0 || tokens == 0 || heads == 0 || dim == 0; }
  // Bytes from the first element to one past the last; 0 where empty; at most 2^62, which means
  // "more than memory holds".
  int64_t SpanBytes() const;
  // Whether every row starts at a multiple of kRowAlignment, given that the tensor does. An axis of
  // one element has no stride to speak of.
  bool RowsAligned() const;
};

// The same tensor with contiguous, aligned rows: each row padded to kRowAlignment bytes.
StridedTensor Packed(const StridedTensor& tensor);
// The same strides where an axis has more than one element, and multiples of kRowAlignment bytes
// everywhere. RowsAligned() must hold.
Strides NormalStrides(const StridedTensor& tensor);

// One copy: `from` at `source` becomes Packed(from) at `destination`. Padding is written as zeros.
struct PackJob {
  const void* source = nullptr;
  void* destination = nullptr;
  StridedTensor from;
};

// Enqueues the copy. element_bytes is 2 or 4. `from` is not empty.
cudaError_t LaunchPack(const PackJob& job, cudaStream_t stream);

// The same on the host, for tests: what LaunchPack() must write.
void PackOnHost(const PackJob& job);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_PACK_H_
