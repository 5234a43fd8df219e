// safetensors files: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON
// header, then the tensors' bytes).
#ifndef ATTN_CLIENT_CLI_SAFETENSORS_H_
#define ATTN_CLIENT_CLI_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/tensor_file.h"

namespace attn::cli {

// One tensor of a file. `data` views the parsed bytes and may have any alignment.
struct SafetensorsEntry {
  std::string name;
  FileDType dtype = FileDType::kOther;
  std::string dtype_name;  // as the file spells it; says what kOther is
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Longest header accepted; the reference implementation stops at 100 MB.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 16 * 1024 * 1024;

// The tensors of a file, in the order of their data. Errors: INVALID_ARGUMENT: a header that is too
// long, truncated, not JSON, or not of the format; a name twice; a shape that overflows or does not
// agree with the offsets; offsets that run backwards, overlap, leave a hole or end past the file.
// Elements of an unknown type are allowed (kOther), so that a file may hold more than attn reads.
// Thread-safe.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensors(std::span<const std::byte> bytes);

// Everything before the data of a file that holds `entries`; their data follow in the order of
// `entries`, which is first sorted by element size, largest first, so that every tensor is aligned.
// Names must be unique; no dtype may be kOther. `data` gives sizes. `metadata` becomes
// `__metadata__`.
std::string SafetensorsPrefix(std::vector<SafetensorsEntry>* entries,
                              const std::map<std::string, std::string>& metadata);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_SAFETENSORS_H_
