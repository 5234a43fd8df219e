// Tensors between files and the client library: opening .npy and .safetensors files, converting
// elements, writing results.
#ifndef ATTN_CLIENT_CLI_TENSOR_IO_H_
#define ATTN_CLIENT_CLI_TENSOR_IO_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/tensor_file.h"
#include "client/lib/client.h"

namespace attn::cli {

// A tensor of an opened file. Copying copies no data.
struct FileTensor {
  std::string source;  // for messages: "q.npy", "x.safetensors: q"
  FileDType dtype = FileDType::kOther;
  std::string dtype_name;  // as the file spells it
  std::vector<int64_t> shape;
  std::shared_ptr<const void> owner;
  std::span<const std::byte> data;  // any alignment

  int64_t NumElements() const;
};

// The tensors of one file by name. A .npy file holds one, named "".
using TensorMap = std::map<std::string, FileTensor>;

// Tells the format from the first bytes, not from the name. Errors: those of ReadFile(), ParseNpy()
// and ParseSafetensors(), with the path.
absl::StatusOr<TensorMap> OpenTensors(const std::string& path);

// `argument` is "file.npy", "file.safetensors" (the tensor called `name`) or
// "file.safetensors:other_name". Errors: as OpenTensors(); NOT_FOUND where the file has no such
// tensor (lists what it has).
absl::StatusOr<FileTensor> OpenTensor(const std::string& argument, const std::string& name);

// Element `index` of any numeric tensor, widened to double.
double ElementAsDouble(const FileTensor& tensor, int64_t index);

// As a tensor to send. `target`: the dtype wanted; unset: as the file has it. F32, F16 and BF16 are
// converted between each other (rounded once, to nearest even) and F64 is converted only where
// `target` is set; U16 and V2 are taken as the bits of bfloat16 where target is BF16; U8 and BOOL
// give UINT8. No copy where nothing is converted. `name` is for messages. Errors: INVALID_ARGUMENT.
absl::StatusOr<client::HostTensor> ToHostTensor(const FileTensor& tensor, std::string_view name,
                                                std::optional<client::v1::DType> target);

// The entries of a one-axis integer tensor. Errors: INVALID_ARGUMENT (not one axis, not integers,
// an entry over 2^63).
absl::StatusOr<std::vector<int64_t>> ToIntegers(const FileTensor& tensor, std::string_view name);

FileDType ToFileDType(client::v1::DType dtype);
// "fp32", "bf16", …
std::string_view LowerName(client::v1::DType dtype);
// "fp32", "fp16", "bf16", in any case.
std::optional<client::v1::DType> DTypeFromFlag(std::string_view text);

// A result to write.
struct NamedTensor {
  std::string name;
  client::HostTensor tensor;
};

// Where results go: a .safetensors file (all tensors), a .npy file (one tensor), or a directory
// (NAME.npy each; made where its parent exists).
class OutputTarget {
 public:
  // Checks what can be checked before the work: the parent exists and can be written. `tensors` is
  // how many there will be. Errors: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED.
  static absl::StatusOr<OutputTarget> Create(const std::string& path, size_t tensors);

  // Returns the path that each tensor was written to. A .npy target takes the first tensor.
  absl::StatusOr<std::vector<std::string>> Write(
      const std::vector<NamedTensor>& tensors,
      const std::map<std::string, std::string>& metadata) const;

 private:
  enum class Kind { kSafetensors, kNpy, kDirectory };
  std::string path_;
  Kind kind_ = Kind::kDirectory;
};

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_TENSOR_IO_H_
