#include "client/cli/tensor_file.h"

#include "absl/status/status.h"
#include "client/cli/text.h"

namespace attn::cli {

std::string_view Name(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF64:
      return "F64";
    case FileDType::kF32:
      return "F32";
    case FileDType::kF16:
      return "F16";
    case FileDType::kBF16:
      return "BF16";
    case FileDType::kI64:
      return "I64";
    case FileDType::kI32:
      return "I32";
    case FileDType::kI16:
      return "I16";
    case FileDType::kI8:
      return "I8";
    case FileDType::kU64:
      return "U64";
    case FileDType::kU32:
      return "U32";
    case FileDType::kU16:
      return "U16";
    case FileDType::kU8:
      return "U8";
    case FileDType::kBool:
      return "BOOL";
    case FileDType::kVoid2:
      return "V2";
    case FileDType::kOther:
      return "OTHER";
  }
  return "?";
}

int64_t SizeOf(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF64:
    case FileDType::kI64:
    case FileDType::kU64:
      return 8;
    case FileDType::kF32:
    case FileDType::kI32:
    case FileDType::kU32:
      return 4;
    case FileDType::kF16:
    case FileDType::kBF16:
    case FileDType::kI16:
    case FileDType::kU16:
    case FileDType::kVoid2:
      return 2;
    case FileDType::kI8:
    case FileDType::kU8:
    case FileDType::kBool:
      return 1;
    case FileDType::kOther:
      return 0;
  }
  return 0;
}

std::string JoinExtents(std::span<const int64_t> shape) {
  std::string text;
  for (const int64_t extent : shape) text += Cat(text.empty() ? "" : ", ", extent);
  return text;
}

std::string ShapeString(std::span<const int64_t> shape) {
  return Cat("[", JoinExtents(shape), "]");
}

absl::StatusOr<int64_t> CheckedByteSize(std::span<const int64_t> shape, int64_t element_bytes) {
  if (shape.size() > kMaxFileRank) {
    return absl::InvalidArgumentError(
        Cat("shape has ", shape.size(), " axes; at most ", kMaxFileRank));
  }
  constexpr int64_t kLimit = int64_t{1} << 62;
  int64_t bytes = element_bytes;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) {
      return absl::InvalidArgumentError(
          Cat("shape ", ShapeString(shape), " has the negative extent ", extent));
    }
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (bytes > kLimit / extent) {
      return absl::InvalidArgumentError(Cat("shape ", ShapeString(shape), " is over 2^62 bytes"));
    }
    bytes *= extent;
  }
  return empty ? 0 : bytes;
}

}  // namespace attn::cli
