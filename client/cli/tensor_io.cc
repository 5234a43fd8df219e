#include "client/cli/tensor_io.h"

#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "client/cli/file_io.h"
#include "client/cli/npy.h"
#include "client/cli/safetensors.h"
#include "client/cli/text.h"
#include "kernels/api/dtype.h"

namespace attn::cli {
namespace {

using client::HostTensor;
namespace v1 = client::v1;

template <typename T>
T LoadAs(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// To float such that rounding the result once more, to fp16 or bf16, gives what rounding the double
// once would: where the double is no float, the neighbour with the odd last bit.
float RoundToOdd(double value) {
  float rounded = static_cast<float>(value);
  if (static_cast<double>(rounded) == value || std::isnan(value)) return rounded;
  if (std::abs(static_cast<double>(rounded)) > std::abs(value)) {
    rounded = std::nextafter(rounded, 0.0f);
  }
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) | 1u);
}

bool IsFloat(FileDType dtype) {
  return dtype == FileDType::kF64 || dtype == FileDType::kF32 || dtype == FileDType::kF16 ||
         dtype == FileDType::kBF16;
}

std::optional<v1::DType> WireDType(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF32:
      return v1::DTYPE_FP32;
    case FileDType::kF16:
      return v1::DTYPE_FP16;
    case FileDType::kBF16:
      return v1::DTYPE_BF16;
    case FileDType::kU8:
    case FileDType::kBool:
      return v1::DTYPE_UINT8;
    default:
      return std::nullopt;
  }
}

HostTensor Share(const FileTensor& tensor, v1::DType dtype) {
  return {.dtype = dtype, .shape = tensor.shape, .owner = tensor.owner, .bytes = tensor.data};
}

HostTensor Convert(const FileTensor& tensor, v1::DType target) {
  HostTensor converted = HostTensor::Allocate(target, tensor.shape);
  const std::span<std::byte> bytes = converted.mutable_bytes();
  const int64_t count = tensor.NumElements();
  for (int64_t i = 0; i < count; ++i) {
    const double value = ElementAsDouble(tensor, i);
    if (target == v1::DTYPE_FP32) {
      const float narrow = static_cast<float>(value);
      std::memcpy(&bytes[i * 4], &narrow, 4);
    } else {
      const float narrow = RoundToOdd(value);
      const uint16_t bits = target == v1::DTYPE_BF16 ? FloatToBf16(narrow) : FloatToFp16(narrow);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return converted;
}

std::string Directory(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool IsDirectory(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

absl::Status WriteNpy(const std::string& path, const HostTensor& tensor) {
  const std::string prefix = NpyPrefix(ToFileDType(tensor.dtype), tensor.shape);
  const std::span<const std::byte> pieces[] = {std::as_bytes(std::span(prefix)), tensor.bytes};
  return WriteFile(path, pieces);
}

}  // namespace

int64_t FileTensor::NumElements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

absl::StatusOr<TensorMap> OpenTensors(const std::string& path) {
  absl::StatusOr<FileBytes> file = ReadFile(path);
  if (!file.ok()) return file.status();
  TensorMap tensors;
  // No safetensors file starts so: its first bytes are the length of a header of at most 16 MiB.
  if (!file->bytes.empty() && file->bytes[0] == std::byte{0x93} && file->bytes.size() > 5 &&
      std::memcmp(file->bytes.data() + 1, "NUMPY", 5) == 0) {
    absl::StatusOr<NpyView> view = ParseNpy(file->bytes);
    if (!view.ok()) {
      return Within(path, view.status());
    }
    tensors[""] = {path,        view->dtype, std::string(Name(view->dtype)), std::move(view->shape),
                   file->owner, view->data};
    return tensors;
  }
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(file->bytes);
  if (!entries.ok()) {
    if (!EndsWith(path, ".npy")) return Within(path, entries.status());
    return absl::InvalidArgumentError(
        Cat(path, ": not a usable .npy file: it does not start with the .npy magic"));
  }
  for (SafetensorsEntry& entry : *entries) {
    tensors[entry.name] = {Cat(path, ": ", entry.name), entry.dtype, std::move(entry.dtype_name),
                           std::move(entry.shape),      file->owner, entry.data};
  }
  return tensors;
}

absl::StatusOr<FileTensor> OpenTensor(const std::string& argument, const std::string& name) {
  static constexpr std::string_view kExtension = ".safetensors:";
  std::string path = argument;
  std::string wanted = name;
  if (const size_t at = argument.find(kExtension); at != std::string::npos) {
    path = argument.substr(0, at + kExtension.size() - 1);
    wanted = argument.substr(at + kExtension.size());
  }
  absl::StatusOr<TensorMap> tensors = OpenTensors(path);
  if (!tensors.ok()) return tensors.status();
  if (auto only = tensors->find(""); only != tensors->end() && tensors->size() == 1) {
    return std::move(only->second);
  }
  auto found = tensors->find(wanted);
  if (found != tensors->end()) return std::move(found->second);
  std::string names;
  for (const auto& [known, tensor] : *tensors) {
    if (names.size() > 200) {
      names += ", ...";
      break;
    }
    names += Cat(names.empty() ? "" : ", ", known);
  }
  return absl::NotFoundError(
      Cat(path, ": has no tensor '", wanted, "'; it has ", names.empty() ? "none" : names));
}

double ElementAsDouble(const FileTensor& tensor, int64_t index) {
  const std::byte* at = tensor.data.data() + index * SizeOf(tensor.dtype);
  switch (tensor.dtype) {
    case FileDType::kF64:
      return LoadAs<double>(at);
    case FileDType::kF32:
      return LoadAs<float>(at);
    case FileDType::kF16:
      return Fp16ToFloat(LoadAs<uint16_t>(at));
    case FileDType::kBF16:
    case FileDType::kVoid2:
      return Bf16ToFloat(LoadAs<uint16_t>(at));
    case FileDType::kI64:
      return static_cast<double>(LoadAs<int64_t>(at));
    case FileDType::kU64:
      return static_cast<double>(LoadAs<uint64_t>(at));
    case FileDType::kI32:
      return LoadAs<int32_t>(at);
    case FileDType::kU32:
      return LoadAs<uint32_t>(at);
    case FileDType::kI16:
      return LoadAs<int16_t>(at);
    case FileDType::kU16:
      return LoadAs<uint16_t>(at);
    case FileDType::kI8:
      return LoadAs<int8_t>(at);
    case FileDType::kU8:
    case FileDType::kBool:
      return LoadAs<uint8_t>(at);
    case FileDType::kOther:
      break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

absl::StatusOr<HostTensor> ToHostTensor(const FileTensor& tensor, std::string_view name,
                                        std::optional<v1::DType> target) {
  const std::string where = Cat(tensor.source, ": ", name, " is ", tensor.dtype_name);
  if (target == v1::DTYPE_UINT8) {
    if (WireDType(tensor.dtype) == v1::DTYPE_UINT8) return Share(tensor, v1::DTYPE_UINT8);
    return absl::InvalidArgumentError(Cat(where, "; it must be U8 or BOOL"));
  }
  if (target == v1::DTYPE_BF16 &&
      (tensor.dtype == FileDType::kU16 || tensor.dtype == FileDType::kVoid2)) {
    return Share(tensor, v1::DTYPE_BF16);
  }
  if (tensor.dtype == FileDType::kU16 || tensor.dtype == FileDType::kVoid2) {
    return absl::InvalidArgumentError(
        Cat(where, ": where these are bfloat16 bits, say so with --dtype bf16"));
  }
  if (tensor.dtype == FileDType::kF64 && !target) {
    return absl::InvalidArgumentError(Cat(
        where, ", which attention is not computed in; convert it with --dtype fp32, fp16 or bf16"));
  }
  if (!IsFloat(tensor.dtype)) {
    return absl::InvalidArgumentError(Cat(where, "; it must be F32, F16 or BF16"));
  }
  const std::optional<v1::DType> own = WireDType(tensor.dtype);
  if (own && (!target || *target == *own)) return Share(tensor, *own);
  return Convert(tensor, *target);
}

absl::StatusOr<std::vector<int64_t>> ToIntegers(const FileTensor& tensor, std::string_view name) {
  const std::string where = Cat(tensor.source, ": ", name);
  if (tensor.shape.size() != 1) {
    return absl::InvalidArgumentError(
        Cat(where, " has shape ", ShapeString(tensor.shape), "; it must have one axis"));
  }
  std::vector<int64_t> values(tensor.shape[0]);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* at = tensor.data.data() + i * SizeOf(tensor.dtype);
    if (tensor.dtype == FileDType::kI64) {
      values[i] = LoadAs<int64_t>(at);
    } else if (tensor.dtype == FileDType::kU64) {
      const uint64_t value = LoadAs<uint64_t>(at);
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return absl::InvalidArgumentError(Cat(where, "[", i, "] = ", value, " is over 2^63"));
      }
      values[i] = static_cast<int64_t>(value);
    } else if (tensor.dtype == FileDType::kI32 || tensor.dtype == FileDType::kU32) {
      values[i] = static_cast<int64_t>(ElementAsDouble(tensor, i));
    } else {
      return absl::InvalidArgumentError(
          Cat(where, " is ", tensor.dtype_name, "; it must be I64 or I32"));
    }
  }
  return values;
}

FileDType ToFileDType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return FileDType::kF32;
    case v1::DTYPE_FP16:
      return FileDType::kF16;
    case v1::DTYPE_BF16:
      return FileDType::kBF16;
    case v1::DTYPE_UINT8:
      return FileDType::kU8;
    default:
      return FileDType::kOther;
  }
}

std::string_view LowerName(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return "fp32";
    case v1::DTYPE_FP16:
      return "fp16";
    case v1::DTYPE_BF16:
      return "bf16";
    case v1::DTYPE_UINT8:
      return "uint8";
    default:
      return "?";
  }
}

std::optional<v1::DType> DTypeFromFlag(std::string_view text) {
  const std::string lower = Lower(text);
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_FP16, v1::DTYPE_BF16}) {
    if (lower == LowerName(dtype)) return dtype;
  }
  return std::nullopt;
}

absl::StatusOr<OutputTarget> OutputTarget::Create(const std::string& path, size_t tensors) {
  OutputTarget target;
  target.path_ = path;
  if (EndsWith(path, ".safetensors")) {
    target.kind_ = Kind::kSafetensors;
  } else if (EndsWith(path, ".npy")) {
    target.kind_ = Kind::kNpy;
    if (tensors != 1) {
      return absl::InvalidArgumentError(Cat("--output ", path,
                                            ": a .npy file holds one tensor and there are ",
                                            tensors, "; name a .safetensors file or a directory"));
    }
  } else {
    while (target.path_.size() > 1 && target.path_.back() == '/') target.path_.pop_back();
  }
  std::string parent = Directory(target.path_);
  if (target.kind_ == Kind::kDirectory && IsDirectory(target.path_)) parent = target.path_;
  if (target.kind_ == Kind::kDirectory && parent != target.path_ &&
      access(target.path_.c_str(), F_OK) == 0) {
    return absl::InvalidArgumentError(Cat(
        "--output ", path, ": is a file; name a directory, a .safetensors file or a .npy file"));
  }
  if (!IsDirectory(parent)) {
    return absl::NotFoundError(Cat("--output ", path, ": no directory ", parent));
  }
  if (access(parent.c_str(), W_OK) != 0) {
    return absl::PermissionDeniedError(Cat("--output ", path, ": cannot write in ", parent));
  }
  return target;
}

absl::StatusOr<std::vector<std::string>> OutputTarget::Write(
    const std::vector<NamedTensor>& tensors,
    const std::map<std::string, std::string>& metadata) const {
  std::vector<std::string> paths(tensors.size(), path_);
  if (kind_ == Kind::kSafetensors) {
    std::vector<SafetensorsEntry> entries;
    for (const NamedTensor& named : tensors) {
      entries.push_back({named.name, ToFileDType(named.tensor.dtype), "", named.tensor.shape,
                         named.tensor.bytes});
    }
    const std::string prefix = SafetensorsPrefix(&entries, metadata);
    std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(prefix))};
    for (const SafetensorsEntry& entry : entries) pieces.push_back(entry.data);
    if (absl::Status status = WriteFile(path_, pieces); !status.ok()) return status;
    return paths;
  }
  if (kind_ == Kind::kNpy) {
    paths.resize(1);
    if (absl::Status status = WriteNpy(path_, tensors.front().tensor); !status.ok()) return status;
    return paths;
  }
  if (!IsDirectory(path_) && mkdir(path_.c_str(), 0777) != 0) {
    return absl::InternalError(Cat(path_, ": ", std::strerror(errno)));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    paths[i] = Cat(path_, "/", tensors[i].name, ".npy");
    if (absl::Status status = WriteNpy(paths[i], tensors[i].tensor); !status.ok()) return status;
  }
  return paths;
}

}  // namespace attn::cli
