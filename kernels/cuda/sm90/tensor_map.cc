#include "kernels/cuda/sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/api/text.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/sm90/kernel_params.h"

namespace attn::cuda::sm90 {
namespace {

constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;  // strides are below it
constexpr int64_t kMaxTokens = int64_t{1} << 31;       // so are coordinates, which are int32

// In pieces of how many bytes L2 reads memory for a copy: those of a row of a panel. With 256,
// calls that memory limits read it 7 to 14% more slowly (kernels/README.md).
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

struct Axis {
  std::string_view name;
  int64_t extent, stride;  // elements
};

std::string StrideObstacle(std::string_view name, const StridedTensor& t, const Axis& axis) {
  if (axis.extent <= 1) return "";
  // Beyond the limit in elements it is in bytes too, and the product might not fit.
  const int64_t bytes = std::min(axis.stride, kMaxStrideBytes) * t.element_bytes;
  const std::string what = Cat(name, " stride of ", axis.name, " ", bytes, " bytes");
  if (bytes <= 0) return Cat(what, " <= 0");
  if (bytes >= kMaxStrideBytes) return Cat(what, " >= ", kMaxStrideBytes);
  if (bytes % kRowAlignment != 0) return Cat(what, ", not a multiple of ", kRowAlignment);
  return "";
}

struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  absl::Status status;
};

Encoder FindEncoder() {
  constexpr char kName[] = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  Encoder encoder;
  if (error != cudaSuccess) {
    cudaGetLastError();
    encoder.status = ToStatus(error, kName);
  } else if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    encoder.status = absl::InternalError(Cat("the CUDA driver has no ", kName, " of CUDA 12.0"));
  } else {
    encoder.encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }
  return encoder;
}

}  // namespace

std::string MapObstacle(std::string_view name, const StridedTensor& t) {
  if (t.tokens == 0) return "";  // nothing is read
  if (t.tokens >= kMaxTokens) return Cat(name, " tokens ", t.tokens, " >= ", kMaxTokens);
  for (const Axis& axis :
       {Axis{"heads", t.heads, t.strides.head}, Axis{"tokens", t.tokens, t.strides.token},
        Axis{"batch", t.batch, t.strides.batch}}) {
    std::string obstacle = StrideObstacle(name, t, axis);
    if (!obstacle.empty()) return obstacle;
  }
  return "";
}

absl::Status EncodeTensorMap(const StridedTensor& t, const void* data, DType dtype, MapBox map_box,
                             CUtensorMap* map) {
  static const Encoder* const kEncoder = new Encoder(FindEncoder());
  if (kEncoder->encode == nullptr) return kEncoder->status;
  // An axis of one element may have any stride; the encoder wants a valid one.
  const auto stride = [&t](int64_t extent, int64_t elements) {
    const bool any = extent <= 1 || t.tokens == 0;
    return static_cast<cuuint64_t>(any ? kRowAlignment : elements * t.element_bytes);
  };
  // Of a tensor without tokens, of which nothing is read, a single row is mapped.
  const auto extent = [&t](int64_t n) { return static_cast<cuuint64_t>(t.tokens == 0 ? 1 : n); };
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(t.dim), extent(t.heads), extent(t.tokens),
                              extent(t.batch)};
  const cuuint64_t strides[3] = {stride(t.heads, t.strides.head), stride(t.tokens, t.strides.token),
                                 stride(t.batch, t.strides.batch)};
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(map_box.heads),
                             static_cast<cuuint32_t>(map_box.tokens), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = kEncoder->encode(
      map,
      dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, kPromotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(Cat(
      "cuTensorMapEncodeTiled: CUresult ", static_cast<int>(result), " for [", t.batch, ", ",
      t.tokens, ", ", t.heads, ", ", t.dim, "] with strides ", strides[2], ", ", strides[1], ", ",
      strides[0], " bytes, boxes of ", map_box.tokens, " tokens, ", map_box.heads, " heads"));
}

}  // namespace attn::cuda::sm90
