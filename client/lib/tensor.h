// Memory of host tensors.
#ifndef ATTN_CLIENT_LIB_TENSOR_H_
#define ATTN_CLIENT_LIB_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/lib/client.h"

namespace attn::client {

// What every buffer of ours is aligned to: a cache line, and the widest SIMD register. Unit: bytes.
inline constexpr size_t kAlignment = 64;

// Uninitialised, aligned to kAlignment; null where there is no memory for it.
std::shared_ptr<std::byte> AllocateAligned(uint64_t size_bytes);

// NumElements() * SizeOf(dtype) of a dense tensor; -1 where the shape is not valid or dtype is
// unknown.
int64_t DenseBytes(v1::DType dtype, const std::vector<int64_t>& shape);

// "FP16 [2, 128, 8, 64]".
std::string Describe(v1::DType dtype, const std::vector<int64_t>& shape);

// Errors: INVALID_ARGUMENT where the bytes are not those of the dtype and shape; names `field`.
absl::Status CheckTensor(const char* field, const HostTensor& tensor);

}  // namespace attn::client

#endif  // ATTN_CLIENT_LIB_TENSOR_H_
