// NumPy's .npy files: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
//
// Convention for bfloat16, which .npy cannot name: attn writes the bits as uint16 (`<u2`), and
// reads
// `<u2`, `|V2` and `<V2` (as ml_dtypes writes it) as bfloat16 where the caller says so (--dtype
// bf16).
#ifndef ATTN_CLIENT_CLI_NPY_H_
#define ATTN_CLIENT_CLI_NPY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/tensor_file.h"

namespace attn::cli {

// An array in a .npy file. `data` views the parsed bytes and may have any alignment.
struct NpyView {
  FileDType dtype = FileDType::kOther;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Longest header accepted. numpy.load() itself stops at 10,000 bytes.
inline constexpr uint64_t kMaxNpyHeaderBytes = 64 * 1024;

// Errors: INVALID_ARGUMENT: not a .npy file; a version other than 1.0, 2.0, 3.0; a header that is
// too long, truncated or not the dictionary the format asks for; Fortran order, big-endian
// elements, structured or other element types (each by name); a shape over 2^62 bytes; bytes
// missing or left over. Thread-safe.
absl::StatusOr<NpyView> ParseNpy(std::span<const std::byte> bytes);

// Everything before the data of a version 1.0 file (2.0 where the header is long), so that the data
// starts at a multiple of 64 bytes. kBF16 is written as `<u2`. dtype must not be kOther.
std::string NpyPrefix(FileDType dtype, std::span<const int64_t> shape);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_NPY_H_
