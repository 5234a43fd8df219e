// What the tensor file formats share: element types, shapes, and sizes checked against overflow.
#ifndef ATTN_CLIENT_CLI_TENSOR_FILE_H_
#define ATTN_CLIENT_CLI_TENSOR_FILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace attn::cli {

// Element types of tensor files. kVoid2 is NumPy's two-byte void (`V2`), which is how ml_dtypes
// saves bfloat16. kOther: an element type that attn has no use for; its tensors can be listed, not
// read.
enum class FileDType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
  kVoid2,
  kOther,
};

// The name that safetensors uses: "F32", "BF16", "BOOL"; "V2" and "OTHER" for the last two.
std::string_view Name(FileDType dtype);

// Bytes per element; 0 for kOther.
int64_t SizeOf(FileDType dtype);

// Axes of a tensor file that attn accepts; more is refused.
inline constexpr size_t kMaxFileRank = 32;

// "2, 128, 8, 64", "".
std::string JoinExtents(std::span<const int64_t> shape);
// "[2, 128, 8, 64]", "[]".
std::string ShapeString(std::span<const int64_t> shape);

// Product of the shape times element_bytes. Errors: INVALID_ARGUMENT where an extent is negative,
// there are more than kMaxFileRank axes, or the product is over 2^62 (an extent of 0 does not
// excuse the others).
absl::StatusOr<int64_t> CheckedByteSize(std::span<const int64_t> shape, int64_t element_bytes);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_TENSOR_FILE_H_
