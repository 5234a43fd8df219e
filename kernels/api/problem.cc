#include "kernels/api/problem.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/api/text.h"

namespace attn {
namespace {

// "[3, 0, 17]": where element `index` stands in a contiguous tensor of this shape.
std::string Position(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> position(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    position[axis] = index % shape[axis];
    index /= shape[axis];
  }
  std::string text = "[";
  for (size_t axis = 0; axis < position.size(); ++axis) {
    text += Cat(axis == 0 ? "" : ", ", position[axis]);
  }
  return text + "]";
}

// The first element that is NaN or +inf, or -1. Integer comparisons over chunks, so that the
// compiler can vectorise: a bias is as large as the score matrix.
template <typename Bits>
int64_t FirstNanOrPlusInf(const void* data, int64_t count, Bits infinity) {
  constexpr int64_t kChunk = 1024;
  const auto* bytes = static_cast<const unsigned char*>(data);
  const Bits magnitude_mask = static_cast<Bits>(~Bits{0}) >> 1;
  auto is_bad = [&](Bits bits) {
    return static_cast<Bits>(bits & magnitude_mask) > infinity || bits == infinity;
  };
  auto load = [&](int64_t index) {
    Bits bits;
    std::memcpy(&bits, bytes + index * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    return bits;
  };
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, count);
    bool any = false;
    for (int64_t index = begin; index < end; ++index) any |= is_bad(load(index));
    if (!any) continue;
    for (int64_t index = begin; index < end; ++index) {
      if (is_bad(load(index))) return index;
    }
  }
  return -1;
}

absl::Status CheckBias(const AttentionProblem& p) {
  const BiasOption& bias = *p.bias;
  const int64_t count = bias.batch * bias.heads * bias.rows * bias.cols;
  int64_t bad = -1;
  switch (bias.dtype) {
    case DType::kFp32:
      bad = FirstNanOrPlusInf<uint32_t>(bias.data, count, 0x7F800000u);
      break;
    case DType::kFp16:
      bad = FirstNanOrPlusInf<uint16_t>(bias.data, count, 0x7C00u);
      break;
    case DType::kBf16:
      bad = FirstNanOrPlusInf<uint16_t>(bias.data, count, 0x7F80u);
      break;
    case DType::kUint8:
      return absl::InvalidArgumentError("bias has dtype UINT8; it must be FP32, FP16 or BF16");
  }
  if (bad < 0) return absl::OkStatus();
  std::vector<int64_t> shape = {bias.batch, bias.heads, bias.rows, bias.cols};
  if (p.layout == Layout::kThd) shape.erase(shape.begin());
  return absl::InvalidArgumentError(Cat("bias", Position(bad, shape), " is ",
                                        LoadElement(bias.data, bias.dtype, bad),
                                        "; it must be finite or -inf"));
}

absl::Status CheckAlibi(const AttentionProblem& p) {
  for (int64_t index = 0; index < p.alibi->batch * p.num_heads; ++index) {
    const float slope = LoadElement(p.alibi->slopes, DType::kFp32, index);
    if (std::isfinite(slope)) continue;
    std::vector<int64_t> shape = {p.num_heads};
    if (p.alibi->batch != 1) shape.insert(shape.begin(), p.alibi->batch);
    return absl::InvalidArgumentError(
        Cat("alibi_slopes", Position(index, shape), " is ", slope, "; it must be finite"));
  }
  return absl::OkStatus();
}

absl::Status CheckSinks(const AttentionProblem& p) {
  for (int64_t head = 0; head < p.num_heads; ++head) {
    const float sink = LoadElement(p.sinks, DType::kFp32, head);
    if (std::isnan(sink) || sink == std::numeric_limits<float>::infinity()) {
      return absl::InvalidArgumentError(
          Cat("sinks[", head, "] is ", sink, "; it must be finite or -inf"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlockMask(const AttentionProblem& p) {
  const BlockMaskOption& mask = *p.block_mask;
  const int64_t count = mask.batch * mask.heads * mask.rows * mask.cols;
  for (int64_t index = 0; index < count; ++index) {
    if (mask.data[index] <= 1) continue;
    return absl::InvalidArgumentError(
        Cat("block_mask.mask", Position(index, {mask.batch, mask.heads, mask.rows, mask.cols}),
            " is ", static_cast<int>(mask.data[index]), "; it must be 0 or 1"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t OutElements(const AttentionProblem& p) { return p.total_q * p.num_heads * p.head_dim_v; }
int64_t LseElements(const AttentionProblem& p) { return p.total_q * p.num_heads; }
int64_t DqElements(const AttentionProblem& p) { return p.total_q * p.num_heads * p.head_dim; }
int64_t DkElements(const AttentionProblem& p) { return p.total_k * p.num_kv_heads * p.head_dim; }
int64_t DvElements(const AttentionProblem& p) { return p.total_k * p.num_kv_heads * p.head_dim_v; }
int64_t DbiasElements(const AttentionProblem& p) {
  return p.bias ? p.bias->batch * p.bias->heads * p.bias->rows * p.bias->cols : 0;
}

bool SumsRowDot(const AttentionProblem& p) {
  constexpr int64_t kFewValueDims = 32;
  return p.bias || (p.dtype != DType::kFp32 && p.head_dim_v <= kFewValueDims);
}

absl::Status ValidateContents(const AttentionProblem& p) {
  if (p.bias && p.bias->data != nullptr) {
    if (absl::Status status = CheckBias(p); !status.ok()) return status;
  }
  if (p.alibi && p.alibi->slopes != nullptr) {
    if (absl::Status status = CheckAlibi(p); !status.ok()) return status;
  }
  if (p.has_sinks && p.sinks != nullptr) {
    if (absl::Status status = CheckSinks(p); !status.ok()) return status;
  }
  if (p.block_mask && p.block_mask->data != nullptr) return CheckBlockMask(p);
  return absl::OkStatus();
}

}  // namespace attn
