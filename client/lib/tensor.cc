#include "client/lib/tensor.h"

#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attn::client {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 62;

int64_t Product(const std::vector<int64_t>& shape) {
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return -1;
    empty |= extent == 0;
  }
  if (empty) return 0;
  int64_t product = 1;
  for (const int64_t extent : shape) {
    if (extent > kMaxElements / product) return -1;
    product *= extent;
  }
  return product;
}

}  // namespace

std::shared_ptr<std::byte> AllocateAligned(uint64_t size_bytes) {
  void* memory = ::operator new (size_bytes, std::align_val_t{kAlignment}, std::nothrow);
  if (memory == nullptr) return nullptr;
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory), [](std::byte* bytes) {
    ::operator delete (bytes, std::align_val_t{kAlignment});
  });
}

int64_t SizeOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return 4;
    case v1::DTYPE_FP16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_UINT8:
      return 1;
    default:
      return 0;
  }
}

int64_t DenseBytes(v1::DType dtype, const std::vector<int64_t>& shape) {
  const int64_t elements = Product(shape);
  const int64_t size = SizeOf(dtype);
  if (elements < 0 || size == 0 || elements > kMaxElements / size) return -1;
  return elements * size;
}

std::string Describe(v1::DType dtype, const std::vector<int64_t>& shape) {
  std::string name = v1::DType_Name(dtype);
  if (name.empty()) name = absl::StrCat("dtype ", static_cast<int>(dtype));
  if (name.rfind("DTYPE_", 0) == 0) name.erase(0, 6);
  return absl::StrCat(name, " [", absl::StrJoin(shape, ", "), "]");
}

absl::Status CheckTensor(const char* field, const HostTensor& tensor) {
  const int64_t bytes = DenseBytes(tensor.dtype, tensor.shape);
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", Describe(tensor.dtype, tensor.shape),
                     " is not a tensor: extents are at least 0, elements fit in 62 bits, dtype is "
                     "FP32, FP16, BF16 or UINT8"));
  }
  if (tensor.bytes.size() != static_cast<uint64_t>(bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", tensor.bytes.size(), " bytes given, but ",
                     Describe(tensor.dtype, tensor.shape), " takes ", bytes));
  }
  return absl::OkStatus();
}

int64_t HostTensor::NumElements() const { return Product(shape); }

HostTensor HostTensor::Allocate(v1::DType dtype, std::vector<int64_t> shape) {
  const int64_t size = DenseBytes(dtype, shape);
  if (size < 0) return {};
  std::shared_ptr<std::byte> memory = AllocateAligned(size);
  if (memory == nullptr) return {};
  std::memset(memory.get(), 0, size);
  HostTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = {memory.get(), static_cast<size_t>(size)};
  tensor.owner = std::move(memory);
  return tensor;
}

std::span<std::byte> HostTensor::mutable_bytes() {
  // Allocate() made the memory, and made it writable.
  return {const_cast<std::byte*>(bytes.data()), bytes.size()};
}

}  // namespace attn::client
