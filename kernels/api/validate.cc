#include <cmath>

#include "kernels/api/validate_internal.h"

namespace attn {
namespace internal {

bool IsFloatType(DType dtype) {
  return dtype == DType::kFp32 || dtype == DType::kFp16 || dtype == DType::kBf16;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += Cat(axis == 0 ? "" : ", ", shape[axis]);
  }
  return text + "]";
}

absl::Status CheckTensor(std::string_view field, const TensorSpec& tensor) {
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    if (tensor.shape[axis] < 0) {
      return Invalid(field, ".shape[", axis, "] is ", tensor.shape[axis],
                     "; it must be at least 0");
    }
  }
  if (tensor.NumElements() < 0) {
    return Invalid(field, ".shape is ", ShapeText(tensor.shape),
                   "; the number of elements must be below 2^62");
  }
  if (tensor.strides.empty()) return absl::OkStatus();
  if (tensor.strides.size() != tensor.shape.size()) {
    return Invalid(field, ".strides has ", tensor.strides.size(), " entries; it must have ",
                   tensor.shape.size(), ", one for each axis of ", field, ".shape");
  }
  for (size_t axis = 0; axis < tensor.strides.size(); ++axis) {
    if (tensor.strides[axis] < 0) {
      return Invalid(field, ".strides[", axis, "] is ", tensor.strides[axis],
                     "; it must be at least 0");
    }
  }
  if (tensor.strides.back() != 1) {
    return Invalid(field, ".strides[", tensor.strides.size() - 1, "] is ", tensor.strides.back(),
                   "; the innermost stride must be 1");
  }
  if (tensor.SpanElements() < 0) {
    return Invalid(field, ".strides is ", ShapeText(tensor.strides), " with shape ",
                   ShapeText(tensor.shape), "; the span must be below 2^62 elements");
  }
  return absl::OkStatus();
}

absl::Status CheckContiguous(std::string_view field, const TensorSpec& tensor) {
  if (absl::Status status = CheckTensor(field, tensor); !status.ok()) return status;
  if (tensor.strides.empty() || tensor.NumElements() == 0) return absl::OkStatus();
  int64_t expected = 1;
  for (size_t axis = tensor.shape.size(); axis-- > 0;) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] != expected) {
      return Invalid(field, ".strides[", axis, "] is ", tensor.strides[axis], "; ", field,
                     " must be contiguous, so it must be ", expected);
    }
    expected *= tensor.shape[axis];
  }
  return absl::OkStatus();
}

absl::Status CheckAxes(std::string_view field, const TensorSpec& tensor,
                       const std::vector<AxisRule>& axes) {
  std::string names;
  for (const AxisRule& axis : axes) {
    names += Cat(names.empty() ? "" : ", ", axis.name, axis.or_one ? " or 1" : "");
  }
  if (tensor.shape.size() != axes.size()) {
    return Invalid(field, ".shape is ", ShapeText(tensor.shape), " with ", tensor.shape.size(),
                   " axes; it must have ", axes.size(), ": [", names, "]");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t extent = tensor.shape[i];
    if (extent == axes[i].extent || (axes[i].or_one && extent == 1)) continue;
    return Invalid(field, ".shape[", i, "] is ", extent, "; it must be ", axes[i].name, " ",
                   axes[i].extent, axes[i].or_one ? ", or 1" : "", " (", field, " is [", names,
                   "])");
  }
  return absl::OkStatus();
}

namespace {

// Where axes of q, k, v and what is shaped like them stand.
struct AxisPositions {
  size_t rank, token, head, dim;
};
AxisPositions PositionsOf(Layout layout) {
  return layout == Layout::kBshd ? AxisPositions{4, 1, 2, 3} : AxisPositions{3, 0, 1, 2};
}

Strides StridesOf(const TensorSpec& tensor, Layout layout) {
  const AxisPositions at = PositionsOf(layout);
  if (!tensor.strides.empty()) {
    return {layout == Layout::kBshd ? tensor.strides[0] : 0, tensor.strides[at.token],
            tensor.strides[at.head]};
  }
  // An empty tensor has no element to reach, and the product of its other extents may be of any
  // size.
  if (tensor.NumElements() == 0) return {0, 0, tensor.shape[at.dim]};
  const int64_t head = tensor.shape[at.dim];
  const int64_t token = head * tensor.shape[at.head];
  return {layout == Layout::kBshd ? token * tensor.shape[at.token] : 0, token, head};
}

absl::Status CheckHeads(const AttentionSpec& spec) {
  if (spec.num_heads < 1 || spec.num_heads > kMaxHeads) {
    return Invalid("num_heads is ", spec.num_heads, "; it must be 1 to ", kMaxHeads);
  }
  if (spec.num_kv_heads < 1) {
    return Invalid("num_kv_heads is ", spec.num_kv_heads, "; it must be at least 1");
  }
  if (spec.num_heads % spec.num_kv_heads != 0) {
    return Invalid("num_kv_heads is ", spec.num_kv_heads, "; it must divide num_heads ",
                   spec.num_heads);
  }
  return absl::OkStatus();
}

// q, k or v on its own: dtype, rank, heads, head_dim.
absl::Status CheckOperand(std::string_view field, const TensorSpec& tensor, Layout layout,
                          std::string_view heads_name, int64_t heads, std::string_view dim_name) {
  const AxisPositions at = PositionsOf(layout);
  if (!IsFloatType(tensor.dtype)) {
    return Invalid(field, ".dtype is ", Name(tensor.dtype), "; it must be FP32, FP16 or BF16");
  }
  if (tensor.shape.size() != at.rank) {
    return Invalid(field, ".shape is ", ShapeText(tensor.shape), " with ", tensor.shape.size(),
                   " axes; layout ", layout == Layout::kBshd ? "BSHD" : "THD", " needs ", at.rank,
                   layout == Layout::kBshd ? ": [batch, seqlen, " : ": [total_tokens, ", heads_name,
                   ", ", dim_name, "]");
  }
  if (absl::Status status = CheckTensor(field, tensor); !status.ok()) return status;
  if (tensor.shape[at.head] != heads) {
    return Invalid(field, ".shape[", at.head, "] is ", tensor.shape[at.head], "; it must be ",
                   heads_name, " ", heads, " (", field, " is ",
                   layout == Layout::kBshd ? "[batch, seqlen, " : "[total_tokens, ", heads_name,
                   ", ", dim_name, "])");
  }
  const int64_t dim = tensor.shape[at.dim];
  if (dim < 1 || dim > kMaxHeadDim) {
    return Invalid(dim_name, " (", field, ".shape[", at.dim, "]) is ", dim, "; it must be 1 to ",
                   kMaxHeadDim);
  }
  if (tensor.shape[at.token] > kMaxTokens) {
    return Invalid(field, ".shape[", at.token, "] is ", tensor.shape[at.token],
                   "; it must be at most ", kMaxTokens, " tokens");
  }
  if (layout == Layout::kBshd && tensor.shape[0] > kMaxBatch) {
    return Invalid("batch (", field, ".shape[0]) is ", tensor.shape[0], "; it must be at most ",
                   kMaxBatch);
  }
  return absl::OkStatus();
}

absl::Status CheckOperands(const AttentionSpec& spec) {
  const AxisPositions at = PositionsOf(spec.layout);
  absl::Status status =
      CheckOperand("q", spec.q, spec.layout, "num_heads", spec.num_heads, "head_dim");
  if (!status.ok()) return status;
  status = CheckOperand("k", spec.k, spec.layout, "num_kv_heads", spec.num_kv_heads, "head_dim");
  if (!status.ok()) return status;
  status = CheckOperand("v", spec.v, spec.layout, "num_kv_heads", spec.num_kv_heads, "head_dim_v");
  if (!status.ok()) return status;
  const struct {
    std::string_view field;
    const TensorSpec& tensor;
  } others[] = {{"k", spec.k}, {"v", spec.v}};
  for (const auto& other : others) {
    if (other.tensor.dtype != spec.q.dtype) {
      return Invalid(other.field, ".dtype is ", Name(other.tensor.dtype),
                     "; it must be the dtype of q, ", Name(spec.q.dtype));
    }
    if (spec.layout == Layout::kBshd && other.tensor.shape[0] != spec.q.shape[0]) {
      return Invalid(other.field, ".shape[0] is ", other.tensor.shape[0],
                     "; it must be the batch of q, ", spec.q.shape[0]);
    }
  }
  if (spec.k.shape[at.dim] != spec.q.shape[at.dim]) {
    return Invalid("k.shape[", at.dim, "] is ", spec.k.shape[at.dim],
                   "; it must be the head_dim of q, ", spec.q.shape[at.dim]);
  }
  if (spec.v.shape[at.token] != spec.k.shape[at.token]) {
    return Invalid("v.shape[", at.token, "] is ", spec.v.shape[at.token], "; it must be k.shape[",
                   at.token, "], ", spec.k.shape[at.token]);
  }
  return absl::OkStatus();
}

absl::Status CheckCuSeqlens(std::string_view field, const std::vector<int64_t>& cu_seqlens,
                            std::string_view tensor, int64_t total) {
  if (cu_seqlens.empty()) {
    return Invalid(field, " has 0 entries; layout THD needs batch + 1, at least 1");
  }
  if (cu_seqlens.size() > static_cast<size_t>(kMaxBatch) + 1) {
    return Invalid(field, " has ", cu_seqlens.size(), " entries; it may have at most ",
                   kMaxBatch + 1);
  }
  if (cu_seqlens[0] != 0) return Invalid(field, "[0] is ", cu_seqlens[0], "; it must be 0");
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] < cu_seqlens[i - 1]) {
      return Invalid(field, "[", i, "] is ", cu_seqlens[i], "; it must be at least ", field, "[",
                     i - 1, "], ", cu_seqlens[i - 1]);
    }
  }
  if (cu_seqlens.back() != total) {
    return Invalid(field, "[", cu_seqlens.size() - 1, "] is ", cu_seqlens.back(),
                   "; the last must be the total tokens of ", tensor, ", ", total);
  }
  return absl::OkStatus();
}

absl::Status FillThdSequences(const AttentionSpec& spec, AttentionProblem* p) {
  absl::Status status = CheckCuSeqlens("cu_seqlens_q", spec.cu_seqlens_q, "q", spec.q.shape[0]);
  if (!status.ok()) return status;
  status = CheckCuSeqlens("cu_seqlens_k", spec.cu_seqlens_k, "k", spec.k.shape[0]);
  if (!status.ok()) return status;
  if (spec.cu_seqlens_k.size() != spec.cu_seqlens_q.size()) {
    return Invalid("cu_seqlens_k has ", spec.cu_seqlens_k.size(), " entries; cu_seqlens_q has ",
                   spec.cu_seqlens_q.size(), ", and both must have batch + 1");
  }
  if (!spec.seqlens_q.empty() || !spec.seqlens_k.empty()) {
    const bool is_q = !spec.seqlens_q.empty();
    return Invalid(is_q ? "seqlens_q" : "seqlens_k", " has ",
                   (is_q ? spec.seqlens_q : spec.seqlens_k).size(),
                   " entries; with layout THD it must be empty (cu_seqlens states the lengths)");
  }
  p->batch = static_cast<int64_t>(spec.cu_seqlens_q.size()) - 1;
  p->total_q = spec.q.shape[0];
  p->total_k = spec.k.shape[0];
  p->sequences.resize(p->batch);
  for (int64_t b = 0; b < p->batch; ++b) {
    Sequence& s = p->sequences[b];
    s.q_token = spec.cu_seqlens_q[b];
    s.k_token = spec.cu_seqlens_k[b];
    s.rows_q = s.len_q = spec.cu_seqlens_q[b + 1] - s.q_token;
    s.rows_k = s.len_k = spec.cu_seqlens_k[b + 1] - s.k_token;
    p->seqlen_q = std::max(p->seqlen_q, s.rows_q);
    p->seqlen_k = std::max(p->seqlen_k, s.rows_k);
  }
  return absl::OkStatus();
}

absl::Status CheckSeqlens(std::string_view field, const std::vector<int64_t>& seqlens,
                          int64_t batch, int64_t limit) {
  if (seqlens.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(seqlens.size()) != batch) {
    return Invalid(field, " has ", seqlens.size(), " entries; it must have batch, ", batch,
                   ", or none");
  }
  for (size_t b = 0; b < seqlens.size(); ++b) {
    if (seqlens[b] < 0 || seqlens[b] > limit) {
      return Invalid(field, "[", b, "] is ", seqlens[b], "; it must be 0 to ", limit);
    }
  }
  return absl::OkStatus();
}

absl::Status FillBshdSequences(const AttentionSpec& spec, AttentionProblem* p) {
  const bool has_cu_q = !spec.cu_seqlens_q.empty();
  if (has_cu_q || !spec.cu_seqlens_k.empty()) {
    return Invalid(has_cu_q ? "cu_seqlens_q" : "cu_seqlens_k", " has ",
                   (has_cu_q ? spec.cu_seqlens_q : spec.cu_seqlens_k).size(),
                   " entries; with layout BSHD it must be empty");
  }
  p->batch = spec.q.shape[0];
  p->seqlen_q = spec.q.shape[1];
  p->seqlen_k = spec.k.shape[1];
  absl::Status status = CheckSeqlens("seqlens_q", spec.seqlens_q, p->batch, p->seqlen_q);
  if (!status.ok()) return status;
  status = CheckSeqlens("seqlens_k", spec.seqlens_k, p->batch, p->seqlen_k);
  if (!status.ok()) return status;
  p->total_q = p->batch * p->seqlen_q;  // at most 2^60: kMaxBatch * kMaxTokens
  p->total_k = p->batch * p->seqlen_k;
  p->sequences.resize(p->batch);
  for (int64_t b = 0; b < p->batch; ++b) {
    Sequence& s = p->sequences[b];
    s.rows_q = p->seqlen_q;
    s.rows_k = p->seqlen_k;
    s.len_q = spec.seqlens_q.empty() ? s.rows_q : spec.seqlens_q[b];
    s.len_k = spec.seqlens_k.empty() ? s.rows_k : spec.seqlens_k[b];
  }
  return absl::OkStatus();
}

// "FP16, the dtype of q, or FP32".
std::string DtypeOfQOrFp32(DType dtype) {
  if (dtype == DType::kFp32) return "FP32";
  return Cat(Name(dtype), ", the dtype of q, or FP32");
}

// A tensor in the layout of q with head_dim_v, of q's dtype or FP32.
absl::Status CheckOutLike(std::string_view field, const TensorSpec& tensor,
                          const AttentionSpec& spec, const AttentionProblem& p) {
  if (absl::Status status = CheckTensor(field, tensor); !status.ok()) return status;
  if (tensor.dtype != DType::kFp32 && tensor.dtype != p.dtype) {
    return Invalid(field, ".dtype is ", Name(tensor.dtype), "; it must be ",
                   DtypeOfQOrFp32(p.dtype));
  }
  std::vector<AxisRule> axes = {{"num_heads", p.num_heads}, {"head_dim_v", p.head_dim_v}};
  if (spec.layout == Layout::kBshd) {
    axes.insert(axes.begin(), {{"batch", p.batch}, {"seqlen_q", p.seqlen_q}});
  } else {
    axes.insert(axes.begin(), {"total_q", p.total_q});
  }
  return CheckAxes(field, tensor, axes);
}

absl::Status CheckLseLike(std::string_view field, const TensorSpec& tensor,
                          const AttentionSpec& spec, const AttentionProblem& p) {
  if (tensor.dtype != DType::kFp32) {
    return Invalid(field, ".dtype is ", Name(tensor.dtype), "; it must be FP32");
  }
  if (absl::Status status = CheckContiguous(field, tensor); !status.ok()) return status;
  if (spec.layout == Layout::kBshd) {
    return CheckAxes(field, tensor,
                     {{"batch", p.batch}, {"num_heads", p.num_heads}, {"seqlen_q", p.seqlen_q}});
  }
  return CheckAxes(field, tensor, {{"num_heads", p.num_heads}, {"total_q", p.total_q}});
}

absl::Status ValidateBackward(const AttentionSpec& spec, const TensorSpec& default_out,
                              AttentionProblem* p) {
  const TensorSpec& out = spec.out ? *spec.out : default_out;
  const TensorSpec& dout = spec.dout ? *spec.dout : default_out;
  if (absl::Status status = CheckOutLike("out", out, spec, *p); !status.ok()) return status;
  if (absl::Status status = CheckOutLike("dout", dout, spec, *p); !status.ok()) return status;
  if (spec.lse) {
    if (absl::Status status = CheckLseLike("lse", *spec.lse, spec, *p); !status.ok()) return status;
  }
  if (spec.dlse) {
    absl::Status status = CheckLseLike("dlse", *spec.dlse, spec, *p);
    if (!status.ok()) return status;
  }
  p->bwd_out_dtype = out.dtype;
  p->bwd_dout_dtype = dout.dtype;
  p->bwd_out = StridesOf(out, spec.layout);
  p->bwd_dout = StridesOf(dout, spec.layout);
  p->has_dlse = spec.dlse.has_value();
  return absl::OkStatus();
}

}  // namespace
}  // namespace internal

absl::StatusOr<AttentionProblem> Validate(const AttentionSpec& spec, Pass pass) {
  using internal::Invalid;
  if (absl::Status status = internal::CheckHeads(spec); !status.ok()) return status;
  if (absl::Status status = internal::CheckOperands(spec); !status.ok()) return status;

  AttentionProblem p;
  const internal::AxisPositions at = internal::PositionsOf(spec.layout);
  p.layout = spec.layout;
  p.dtype = spec.q.dtype;
  p.num_heads = spec.num_heads;
  p.num_kv_heads = spec.num_kv_heads;
  p.head_dim = spec.q.shape[at.dim];
  p.head_dim_v = spec.v.shape[at.dim];
  p.q = internal::StridesOf(spec.q, spec.layout);
  p.k = internal::StridesOf(spec.k, spec.layout);
  p.v = internal::StridesOf(spec.v, spec.layout);
  absl::Status status = spec.layout == Layout::kBshd ? internal::FillBshdSequences(spec, &p)
                                                     : internal::FillThdSequences(spec, &p);
  if (!status.ok()) return status;

  // out is the one output that is not shaped like an input.
  TensorSpec out;
  out.dtype = p.dtype;
  out.shape = spec.q.shape;
  out.shape[at.dim] = p.head_dim_v;
  if (out.NumElements() < 0) {
    return Invalid("out would have shape ", internal::ShapeText(out.shape),
                   "; the number of elements must be below 2^62");
  }
  p.out_dtype = spec.out_dtype.value_or(p.dtype);
  if (p.out_dtype != DType::kFp32 && p.out_dtype != p.dtype) {
    return Invalid("out_dtype is ", Name(p.out_dtype), "; it must be ",
                   internal::DtypeOfQOrFp32(p.dtype));
  }
  if (status = internal::ValidateOptions(spec, &p); !status.ok()) return status;
  if (pass == Pass::kBackward) {
    if (status = internal::ValidateBackward(spec, out, &p); !status.ok()) return status;
  }
  return p;
}

}  // namespace attn
