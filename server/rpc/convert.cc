#include "server/rpc/convert.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_join.h"
#include "kernels/api/text.h"

namespace attn::server {
namespace {

constexpr std::array<std::string_view, kNumInputs> kInputNames = {"q",
                                                                  "k",
                                                                  "v",
                                                                  "options.alibi_slopes",
                                                                  "options.bias",
                                                                  "options.sinks",
                                                                  "options.block_mask.mask",
                                                                  "out",
                                                                  "lse",
                                                                  "dout",
                                                                  "dlse"};

absl::Status Missing(std::string_view field) {
  return absl::InvalidArgumentError(Cat(field, " is required"));
}

absl::Status UnknownEnum(std::string_view field, int value) {
  return absl::UnimplementedError(
      Cat(field, " has the value ", value, ", which this server does not know"));
}

absl::Status ConvertDType(std::string_view field, v1::DType value, DType* out) {
  switch (value) {
    case v1::DTYPE_UNSPECIFIED:
      return Missing(field);
    case v1::DTYPE_FP32:
      *out = DType::kFp32;
      return absl::OkStatus();
    case v1::DTYPE_FP16:
      *out = DType::kFp16;
      return absl::OkStatus();
    case v1::DTYPE_BF16:
      *out = DType::kBf16;
      return absl::OkStatus();
    case v1::DTYPE_UINT8:
      *out = DType::kUint8;
      return absl::OkStatus();
    default:
      return UnknownEnum(field, value);
  }
}

// Converts one tensor field and notes where its bytes are.
absl::Status ConvertTensor(const v1::Tensor& tensor, Input input, Purpose purpose, TensorSpec* spec,
                           ConvertedHeader* out) {
  const std::string_view name = Name(input);
  if (absl::Status s = ConvertDType(Cat(name, ".dtype"), tensor.dtype(), &spec->dtype); !s.ok()) {
    return s;
  }
  spec->shape.assign(tensor.shape().begin(), tensor.shape().end());
  spec->strides.assign(tensor.strides().begin(), tensor.strides().end());
  TensorRef& ref = (*out)[input];
  ref.present = true;
  ref.has_source = tensor.source_case() == v1::Tensor::kPayload;
  if (!ref.has_source && purpose == Purpose::kRun) {
    return absl::InvalidArgumentError(Cat(name, " has no source; set its payload index"));
  }
  ref.payload = tensor.payload();
  ref.offset_bytes = tensor.offset_bytes();
  return absl::OkStatus();
}

absl::Status ConvertOptionalTensor(bool has, const v1::Tensor& tensor, Input input, Purpose purpose,
                                   std::optional<TensorSpec>* spec, ConvertedHeader* out) {
  if (!has) return absl::OkStatus();
  return ConvertTensor(tensor, input, purpose, &spec->emplace(), out);
}

absl::Status ConvertShape(const v1::AttentionShape& shape, AttentionSpec* spec) {
  switch (shape.layout()) {
    case v1::LAYOUT_UNSPECIFIED:
      return Missing("shape.layout");
    case v1::LAYOUT_BSHD:
      spec->layout = Layout::kBshd;
      break;
    case v1::LAYOUT_THD:
      spec->layout = Layout::kThd;
      break;
    default:
      return UnknownEnum("shape.layout", shape.layout());
  }
  spec->num_heads = shape.num_heads();
  spec->num_kv_heads = shape.num_kv_heads();
  spec->cu_seqlens_q.assign(shape.cu_seqlens_q().begin(), shape.cu_seqlens_q().end());
  spec->cu_seqlens_k.assign(shape.cu_seqlens_k().begin(), shape.cu_seqlens_k().end());
  return absl::OkStatus();
}

absl::Status ConvertScalars(const v1::AttentionOptions& options, AttentionSpec* spec) {
  if (options.has_softmax_scale()) spec->softmax_scale = options.softmax_scale();
  if (options.has_window_left()) spec->window_left = options.window_left();
  if (options.has_window_right()) spec->window_right = options.window_right();
  if (options.has_softcap()) spec->softcap = options.softcap();
  spec->causal = options.causal();
  spec->deterministic = options.deterministic();
  switch (options.alignment()) {
    case v1::ALIGNMENT_UNSPECIFIED:
    case v1::ALIGNMENT_BOTTOM_RIGHT:
      spec->alignment = Alignment::kBottomRight;
      break;
    case v1::ALIGNMENT_TOP_LEFT:
      spec->alignment = Alignment::kTopLeft;
      break;
    default:
      return UnknownEnum("options.alignment", options.alignment());
  }
  spec->seqlens_q.assign(options.seqlens_q().begin(), options.seqlens_q().end());
  spec->seqlens_k.assign(options.seqlens_k().begin(), options.seqlens_k().end());
  if (options.has_dropout()) {
    if (!options.dropout().has_seed()) return Missing("options.dropout.seed");
    spec->dropout = DropoutSpec{.p = options.dropout().p(),
                                .seed = options.dropout().seed(),
                                .offset = options.dropout().offset()};
  }
  if (options.out_dtype() == v1::DTYPE_UNSPECIFIED) return absl::OkStatus();
  return ConvertDType("options.out_dtype", options.out_dtype(), &spec->out_dtype.emplace());
}

absl::Status ConvertOptions(const v1::AttentionOptions& options, Purpose purpose,
                            ConvertedHeader* out) {
  AttentionSpec& spec = out->spec;
  if (absl::Status s = ConvertScalars(options, &spec); !s.ok()) return s;
  absl::Status s = ConvertOptionalTensor(options.has_alibi_slopes(), options.alibi_slopes(),
                                         Input::kAlibiSlopes, purpose, &spec.alibi_slopes, out);
  if (!s.ok()) return s;
  s = ConvertOptionalTensor(options.has_bias(), options.bias(), Input::kBias, purpose, &spec.bias,
                            out);
  if (!s.ok()) return s;
  s = ConvertOptionalTensor(options.has_sinks(), options.sinks(), Input::kSinks, purpose,
                            &spec.sinks, out);
  if (!s.ok()) return s;
  if (!options.has_block_mask()) return absl::OkStatus();
  const v1::BlockMask& mask = options.block_mask();
  if (!mask.has_mask()) return Missing("options.block_mask.mask");
  BlockMaskSpec& mask_spec = spec.block_mask.emplace();
  if (mask.has_block_q()) mask_spec.block_q = mask.block_q();
  if (mask.has_block_k()) mask_spec.block_k = mask.block_k();
  return ConvertTensor(mask.mask(), Input::kBlockMask, purpose, &mask_spec.mask, out);
}

absl::Status ConvertPolicy(const v1::PathPolicy& policy, PathPolicy* out) {
  if (policy.mode() != v1::PATH_POLICY_NAMED && !policy.path().empty()) {
    return absl::InvalidArgumentError(Cat("path_policy.path is \"", policy.path().substr(0, 64),
                                          "\", but path_policy.mode is not PATH_POLICY_NAMED"));
  }
  switch (policy.mode()) {
    case v1::PATH_POLICY_UNSPECIFIED:
    case v1::PATH_POLICY_AUTO:
      out->mode = PolicyMode::kAuto;
      return absl::OkStatus();
    case v1::PATH_POLICY_REQUIRE_FLASH:
      out->mode = PolicyMode::kRequireFlash;
      return absl::OkStatus();
    case v1::PATH_POLICY_FORCE_STANDARD:
      out->mode = PolicyMode::kForceStandard;
      return absl::OkStatus();
    case v1::PATH_POLICY_NAMED:
      break;
    default:
      return UnknownEnum("path_policy.mode", policy.mode());
  }
  const std::optional<PathId> path = PathFromName(policy.path());
  if (!path) {
    return absl::InvalidArgumentError(
        Cat("path_policy.path is \"", policy.path().substr(0, 64), "\"; paths are ",
            absl::StrJoin(kAllPaths, ", ",
                          [](std::string* text, PathId p) { *text += Cat(Name(p)); })));
  }
  out->mode = PolicyMode::kNamed;
  out->path = *path;
  return absl::OkStatus();
}

absl::Status ConvertBackwardTensors(const v1::BackwardRequestHeader& header, Purpose purpose,
                                    ConvertedHeader* out) {
  if (purpose == Purpose::kRun) {
    if (!header.has_out()) return Missing("out");
    if (!header.has_lse()) return Missing("lse");
    if (!header.has_dout()) return Missing("dout");
  }
  AttentionSpec& spec = out->spec;
  absl::Status s =
      ConvertOptionalTensor(header.has_out(), header.out(), Input::kOut, purpose, &spec.out, out);
  if (!s.ok()) return s;
  s = ConvertOptionalTensor(header.has_lse(), header.lse(), Input::kLse, purpose, &spec.lse, out);
  if (!s.ok()) return s;
  s = ConvertOptionalTensor(header.has_dout(), header.dout(), Input::kDout, purpose, &spec.dout,
                            out);
  if (!s.ok()) return s;
  return ConvertOptionalTensor(header.has_dlse(), header.dlse(), Input::kDlse, purpose, &spec.dlse,
                               out);
}

const TensorSpec* SpecOf(const AttentionSpec& spec, Input input) {
  const auto get = [](const std::optional<TensorSpec>& t) { return t ? &*t : nullptr; };
  switch (input) {
    case Input::kQ:
      return &spec.q;
    case Input::kK:
      return &spec.k;
    case Input::kV:
      return &spec.v;
    case Input::kAlibiSlopes:
      return get(spec.alibi_slopes);
    case Input::kBias:
      return get(spec.bias);
    case Input::kSinks:
      return get(spec.sinks);
    case Input::kBlockMask:
      return spec.block_mask ? &spec.block_mask->mask : nullptr;
    case Input::kOut:
      return get(spec.out);
    case Input::kLse:
      return get(spec.lse);
    case Input::kDout:
      return get(spec.dout);
    case Input::kDlse:
      return get(spec.dlse);
  }
  return nullptr;
}

}  // namespace

std::string_view Name(Input input) { return kInputNames[static_cast<size_t>(input)]; }

absl::Status Convert(const v1::BackwardRequestHeader& header, Pass pass, Purpose purpose,
                     ConvertedHeader* out) {
  AttentionSpec& spec = out->spec;
  if (!header.has_shape()) return Missing("shape");
  if (absl::Status s = ConvertShape(header.shape(), &spec); !s.ok()) return s;
  if (!header.has_q()) return Missing("q");
  if (!header.has_k()) return Missing("k");
  if (!header.has_v()) return Missing("v");
  if (absl::Status s = ConvertTensor(header.q(), Input::kQ, purpose, &spec.q, out); !s.ok()) {
    return s;
  }
  if (absl::Status s = ConvertTensor(header.k(), Input::kK, purpose, &spec.k, out); !s.ok()) {
    return s;
  }
  if (absl::Status s = ConvertTensor(header.v(), Input::kV, purpose, &spec.v, out); !s.ok()) {
    return s;
  }
  if (absl::Status s = ConvertOptions(header.options(), purpose, out); !s.ok()) return s;
  if (absl::Status s = ConvertPolicy(header.path_policy(), &out->policy); !s.ok()) return s;
  switch (header.report_level()) {
    case v1::REPORT_LEVEL_UNSPECIFIED:
    case v1::REPORT_LEVEL_BASIC:
      break;
    case v1::REPORT_LEVEL_FULL:
      out->full_report = true;
      break;
    default:
      return UnknownEnum("report_level", header.report_level());
  }
  if (pass == Pass::kForward) return absl::OkStatus();
  return ConvertBackwardTensors(header, purpose, out);
}

absl::Status CheckOutputSizes(const AttentionProblem& p) {
  const auto bytes = [](int64_t tokens, int64_t heads, int64_t dim) {
    return 4.0 * static_cast<double>(tokens) * static_cast<double>(heads) *
           static_cast<double>(dim);
  };
  const int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const double largest =
      std::max(bytes(p.total_q, p.num_heads, dim), bytes(p.total_k, p.num_kv_heads, dim));
  if (largest < 0x1p60) return absl::OkStatus();
  return absl::InvalidArgumentError(Cat("a result for q with ", p.total_q, " tokens and k with ",
                                        p.total_k, " tokens would have about ", largest,
                                        " bytes; it must be below 2^60"));
}

uint64_t RequestBytes(const AttentionSpec& s) {
  const auto bytes_of = [](const TensorSpec& spec) {
    const auto elements = static_cast<uint64_t>(std::max<int64_t>(0, spec.NumElements()));
    const auto element = static_cast<uint64_t>(SizeOf(spec.dtype));
    return std::min(elements, (uint64_t{1} << 60) / element) * element;
  };
  uint64_t bytes = bytes_of(s.q) + bytes_of(s.k) + bytes_of(s.v);
  for (const std::optional<TensorSpec>* tensor :
       {&s.alibi_slopes, &s.bias, &s.sinks, &s.out, &s.lse, &s.dout, &s.dlse}) {
    if (*tensor) bytes += bytes_of(**tensor);
  }
  if (s.block_mask) bytes += bytes_of(s.block_mask->mask);
  return bytes;
}

absl::Status TooManyBytesError(uint64_t bytes, uint64_t limit) {
  return absl::ResourceExhaustedError(Cat("the call moves ", bytes,
                                          " tensor bytes in and out; the limit is ", limit,
                                          " (--max-request-bytes)"));
}

absl::Status LocatePayloads(ConvertedHeader* header, std::vector<uint64_t>* sizes) {
  std::array<bool, wire::kMaxPayloads> named{};
  sizes->clear();
  for (size_t i = 0; i < kNumInputs; ++i) {
    TensorRef& ref = header->tensors[i];
    if (!ref.present) continue;
    const std::string_view name = kInputNames[i];
    if (ref.payload >= wire::kMaxPayloads) {
      return absl::InvalidArgumentError(
          Cat(name, ".payload is ", ref.payload, "; a message has at most ", wire::kMaxPayloads));
    }
    const TensorSpec& spec = *SpecOf(header->spec, static_cast<Input>(i));
    const auto element = static_cast<uint64_t>(SizeOf(spec.dtype));
    const int64_t span = spec.SpanElements();
    if (span < 0 || static_cast<uint64_t>(span) > (uint64_t{1} << 62) / element) {
      return absl::InvalidArgumentError(Cat(name, ".shape spans more than 2^62 bytes"));
    }
    if (ref.offset_bytes % element != 0 || ref.offset_bytes > (uint64_t{1} << 62)) {
      return absl::InvalidArgumentError(Cat(name, ".offset_bytes is ", ref.offset_bytes,
                                            "; it must be a multiple of the element size ", element,
                                            " and at most 2^62"));
    }
    ref.span_bytes = static_cast<uint64_t>(span) * element;
    if (sizes->size() <= ref.payload) sizes->resize(ref.payload + 1, 0);
    named[ref.payload] = true;
    (*sizes)[ref.payload] = std::max((*sizes)[ref.payload], ref.offset_bytes + ref.span_bytes);
  }
  for (size_t i = 0; i < sizes->size(); ++i) {
    if (!named[i]) {
      return absl::InvalidArgumentError(
          Cat("payload ", i, " is not named by any tensor; indices count from 0 without gaps"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPayloadSizes(const ConvertedHeader& header, std::span<const uint64_t> sizes) {
  uint32_t named = 0;
  for (size_t i = 0; i < kNumInputs; ++i) {
    const TensorRef& ref = header.tensors[i];
    if (!ref.present) continue;
    named = std::max(named, ref.payload + 1);
    if (ref.payload >= sizes.size()) {
      return absl::InvalidArgumentError(Cat(kInputNames[i], ".payload is ", ref.payload,
                                            ", but the message has ", sizes.size(), " payloads"));
    }
    const uint64_t size = sizes[ref.payload];
    if (ref.offset_bytes > size || ref.span_bytes > size - ref.offset_bytes) {
      return absl::InvalidArgumentError(
          Cat(kInputNames[i], " needs ", ref.span_bytes, " bytes at offset_bytes ",
              ref.offset_bytes, " of payload ", ref.payload, ", which has ", size, " bytes"));
    }
  }
  if (sizes.size() > named) {
    return absl::InvalidArgumentError(
        Cat("the message has ", sizes.size(), " payloads, but no tensor names payload ", named));
  }
  return absl::OkStatus();
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return v1::DTYPE_FP32;
    case DType::kFp16:
      return v1::DTYPE_FP16;
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kUint8:
      return v1::DTYPE_UINT8;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::Pass ToProto(Pass pass) {
  return pass == Pass::kForward ? v1::PASS_FORWARD : v1::PASS_BACKWARD;
}

v1::PathClass ToProto(PathClass path_class) {
  return path_class == PathClass::kFlash ? v1::PATH_CLASS_FLASH : v1::PATH_CLASS_STANDARD;
}

v1::DeviceKind ToProto(DeviceKind kind) {
  return kind == DeviceKind::kCpu ? v1::DEVICE_KIND_CPU : v1::DEVICE_KIND_CUDA;
}

v1::Reason ToProto(Reason reason) { return static_cast<v1::Reason>(reason); }

void ToProto(const Rejection& rejection, bool full, v1::Rejection* out) {
  const std::string_view path = Name(rejection.path);
  out->set_path(path.data(), path.size());
  out->set_reason(ToProto(rejection.reason));
  out->set_detail(rejection.detail);
  if (full) out->set_sentence(Sentence(rejection));
}

}  // namespace attn::server
