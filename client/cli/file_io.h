// Whole files in and out.
#ifndef ATTN_CLIENT_CLI_FILE_IO_H_
#define ATTN_CLIENT_CLI_FILE_IO_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attn::cli {

// Bytes of a file, in memory (not mapped, so that a file which shrinks meanwhile cannot fault).
struct FileBytes {
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;
};

// Reads a file or a pipe to its end. The bytes are 64-byte aligned. Errors: NOT_FOUND,
// PERMISSION_DENIED, INVALID_ARGUMENT (a directory; names the path), RESOURCE_EXHAUSTED (no
// memory), INTERNAL (reading failed).
absl::StatusOr<FileBytes> ReadFile(const std::string& path);

// Writes the pieces in order to a new file beside `path`, then renames it, so that `path` is either
// the old file or the whole new one. Errors: as ReadFile, with the path.
absl::Status WriteFile(const std::string& path, std::span<const std::span<const std::byte>> pieces);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_FILE_IO_H_
