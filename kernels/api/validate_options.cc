#include <cmath>
#include <limits>

#include "kernels/api/philox.h"
#include "kernels/api/validate_internal.h"

namespace attn::internal {
namespace {

absl::Status CheckScaleAndCap(const AttentionSpec& spec, AttentionProblem* p) {
  p->softmax_scale = spec.softmax_scale.value_or(
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(p->head_dim))));
  if (!std::isfinite(p->softmax_scale)) {
    return Invalid("softmax_scale is ", p->softmax_scale, "; it must be finite");
  }
  if (spec.softcap && !(std::isfinite(*spec.softcap) && *spec.softcap > 0.0f)) {
    return Invalid("softcap is ", *spec.softcap,
                   "; it must be finite and over 0 (no cap is an unset field)");
  }
  p->softcap = spec.softcap.value_or(0.0f);
  return absl::OkStatus();
}

absl::Status CheckWindow(const AttentionSpec& spec, AttentionProblem* p) {
  const struct {
    std::string_view field;
    const std::optional<int64_t>& value;
    int64_t* normalised;
  } sides[] = {{"window_left", spec.window_left, &p->window_left},
               {"window_right", spec.window_right, &p->window_right}};
  for (const auto& side : sides) {
    if (side.value && *side.value < 0) {
      return Invalid(side.field, " is ", *side.value,
                     "; it must be at least 0 (unlimited is an unset field)");
    }
    *side.normalised = std::min(side.value.value_or(kUnlimited), kUnlimited);
  }
  if (spec.causal && spec.window_right.value_or(0) != 0) {
    return Invalid("window_right is ", *spec.window_right, "; with causal it must be 0 or unset");
  }
  if (spec.causal) p->window_right = 0;
  p->alignment = spec.alignment;
  for (Sequence& s : p->sequences) {
    s.off = spec.alignment == Alignment::kBottomRight ? s.len_k - s.len_q : 0;
  }
  return absl::OkStatus();
}

absl::Status CheckAlibi(const TensorSpec& slopes, AttentionProblem* p) {
  if (slopes.dtype != DType::kFp32) {
    return Invalid("alibi_slopes.dtype is ", Name(slopes.dtype), "; it must be FP32");
  }
  if (absl::Status status = CheckContiguous("alibi_slopes", slopes); !status.ok()) return status;
  std::vector<AxisRule> axes = {{"num_heads", p->num_heads}};
  if (slopes.shape.size() != 1) axes.insert(axes.begin(), {"batch", p->batch});
  if (absl::Status status = CheckAxes("alibi_slopes", slopes, axes); !status.ok()) return status;
  p->alibi.emplace();
  p->alibi->batch = slopes.shape.size() == 1 ? 1 : p->batch;
  return absl::OkStatus();
}

absl::Status CheckBias(const TensorSpec& bias, AttentionProblem* p) {
  if (!IsFloatType(bias.dtype)) {
    return Invalid("bias.dtype is ", Name(bias.dtype), "; it must be FP32, FP16 or BF16");
  }
  if (absl::Status status = CheckContiguous("bias", bias); !status.ok()) return status;
  const bool thd = p->layout == Layout::kThd;
  std::vector<AxisRule> axes = {{"num_heads", p->num_heads, true},
                                {thd ? "total_q" : "seqlen_q", thd ? p->total_q : p->seqlen_q},
                                {thd ? "max_seqlen_k" : "seqlen_k", p->seqlen_k}};
  if (!thd) axes.insert(axes.begin(), {"batch", p->batch, true});
  if (absl::Status status = CheckAxes("bias", bias, axes); !status.ok()) return status;
  const size_t head_axis = thd ? 0 : 1;
  p->bias.emplace();
  p->bias->dtype = bias.dtype;
  p->bias->batch = thd ? 1 : bias.shape[0];
  p->bias->heads = bias.shape[head_axis];
  p->bias->rows = bias.shape[head_axis + 1];
  p->bias->cols = bias.shape[head_axis + 2];
  return absl::OkStatus();
}

absl::Status CheckSinks(const TensorSpec& sinks, AttentionProblem* p) {
  if (sinks.dtype != DType::kFp32) {
    return Invalid("sinks.dtype is ", Name(sinks.dtype), "; it must be FP32");
  }
  if (absl::Status status = CheckContiguous("sinks", sinks); !status.ok()) return status;
  p->has_sinks = true;
  return CheckAxes("sinks", sinks, {{"num_heads", p->num_heads}});
}

absl::Status CheckDropout(const DropoutSpec& dropout, AttentionProblem* p) {
  if (!(dropout.p >= 0.0f && dropout.p < 1.0f)) {
    return Invalid("dropout.p is ", dropout.p, "; it must be at least 0 and below 1");
  }
  const uint32_t threshold = DropoutThreshold(dropout.p);
  if (threshold == 0) {
    return Invalid("dropout.p is ", dropout.p,
                   "; round(65536 * (1 - p)) is 0, and it must be at least 1");
  }
  // The words of the Philox counter.
  constexpr int64_t kWords = int64_t{1} << 32;
  if (p->seqlen_q > kWords) {
    return Invalid("seqlen_q is ", p->seqlen_q, "; with dropout it must be at most ", kWords);
  }
  if (p->seqlen_k > 8 * kWords) {
    return Invalid("seqlen_k is ", p->seqlen_k, "; with dropout it must be at most ", 8 * kWords);
  }
  if (p->batch * p->num_heads > kWords) {
    return Invalid("batch * num_heads is ", p->batch * p->num_heads,
                   "; with dropout it must be at most ", kWords);
  }
  if (threshold == 65536) return absl::OkStatus();  // every entry is kept, at scale 1
  p->dropout = DropoutOption{dropout.seed, dropout.offset, threshold};
  return absl::OkStatus();
}

absl::Status CheckBlockMask(const BlockMaskSpec& spec, AttentionProblem* p) {
  if (spec.block_q < 1) {
    return Invalid("block_mask.block_q is ", spec.block_q, "; it must be at least 1");
  }
  if (spec.block_k < 1) {
    return Invalid("block_mask.block_k is ", spec.block_k, "; it must be at least 1");
  }
  if (spec.mask.dtype != DType::kUint8) {
    return Invalid("block_mask.mask.dtype is ", Name(spec.mask.dtype), "; it must be UINT8");
  }
  if (absl::Status status = CheckContiguous("block_mask.mask", spec.mask); !status.ok()) {
    return status;
  }
  auto blocks = [](int64_t tokens, int64_t block) {
    return tokens / block + (tokens % block != 0 ? 1 : 0);  // tokens + block - 1 could overflow
  };
  absl::Status status =
      CheckAxes("block_mask.mask", spec.mask,
                {{"batch", p->batch, true},
                 {"num_heads", p->num_heads, true},
                 {"ceil(seqlen_q / block_q)", blocks(p->seqlen_q, spec.block_q)},
                 {"ceil(seqlen_k / block_k)", blocks(p->seqlen_k, spec.block_k)}});
  if (!status.ok()) return status;
  p->block_mask.emplace();
  p->block_mask->batch = spec.mask.shape[0];
  p->block_mask->heads = spec.mask.shape[1];
  p->block_mask->rows = spec.mask.shape[2];
  p->block_mask->cols = spec.mask.shape[3];
  p->block_mask->block_q = spec.block_q;
  p->block_mask->block_k = spec.block_k;
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateOptions(const AttentionSpec& spec, AttentionProblem* p) {
  p->deterministic = spec.deterministic;
  if (absl::Status status = CheckScaleAndCap(spec, p); !status.ok()) return status;
  if (absl::Status status = CheckWindow(spec, p); !status.ok()) return status;
  if (spec.alibi_slopes) {
    if (absl::Status status = CheckAlibi(*spec.alibi_slopes, p); !status.ok()) return status;
  }
  if (spec.bias) {
    if (absl::Status status = CheckBias(*spec.bias, p); !status.ok()) return status;
  }
  if (spec.sinks) {
    if (absl::Status status = CheckSinks(*spec.sinks, p); !status.ok()) return status;
  }
  if (spec.dropout) {
    if (absl::Status status = CheckDropout(*spec.dropout, p); !status.ok()) return status;
  }
  if (spec.block_mask) return CheckBlockMask(*spec.block_mask, p);
  return absl::OkStatus();
}

}  // namespace attn::internal
