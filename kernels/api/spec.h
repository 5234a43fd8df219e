// An attention call as the caller states it: unchecked. Validate() turns it into an
// AttentionProblem.
#ifndef ATTN_KERNELS_API_SPEC_H_
#define ATTN_KERNELS_API_SPEC_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/dtype.h"

namespace attn {

struct AttentionProblem;

enum class Pass : uint8_t { kForward, kBackward };
std::string_view Name(Pass pass);  // "forward", "backward"

// kBshd: [batch, seqlen, num_heads, head_dim]. kThd: packed, [total_tokens, num_heads, head_dim].
enum class Layout : uint8_t { kBshd, kThd };

// Which diagonal causal, windows and ALiBi count from: query i stands at key position i + off, with
// off = len_k - len_q (kBottomRight) or 0 (kTopLeft).
enum class Alignment : uint8_t { kBottomRight, kTopLeft };

// Limits that Validate() enforces, whatever the path.
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kMaxElements = int64_t{1} << 62;  // a tensor has fewer
// Far above what memory holds; they keep the arithmetic of a planned problem within 64 bits, and
// the sequences of a problem (a request may state a batch without a byte per entry) within memory.
inline constexpr int64_t kMaxBatch = int64_t{1} << 20;
inline constexpr int64_t kMaxHeads = int64_t{1} << 20;
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a token axis: seqlen, or total

// Shape of a dense tensor; the bytes live elsewhere.
struct TensorSpec {
  DType dtype = DType::kFp32;
  std::vector<int64_t> shape;    // outermost axis first
  std::vector<int64_t> strides;  // elements; empty: contiguous; the last is 1

  // Product of shape; -1 where an extent is negative or the product reaches kMaxElements. So a
  // result times any element size fits in uint64_t.
  int64_t NumElements() const;
  // Elements from the first to one past the last; 0 where empty; -1 as above, and where strides are
  // negative or do not match the shape.
  int64_t SpanElements() const;
};

struct DropoutSpec {
  float p = 0.0f;       // probability of dropping, [0, 1)
  uint64_t seed = 0;    // Philox key
  uint32_t offset = 0;  // fourth word of the Philox counter
};

struct BlockMaskSpec {
  TensorSpec mask;  // UINT8 [batch|1, num_heads|1, ceil(seqlen_q/block_q), ceil(seqlen_k/block_k)]
  int64_t block_q = 128;
  int64_t block_k = 128;
};

// Field names are those of attention.proto, which documents shapes, units, defaults and limits.
struct AttentionSpec {
  Layout layout = Layout::kBshd;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  TensorSpec q, k, v;
  std::vector<int64_t> cu_seqlens_q, cu_seqlens_k;  // THD only

  std::optional<float> softmax_scale;
  bool causal = false;
  Alignment alignment = Alignment::kBottomRight;
  std::optional<int64_t> window_left, window_right;
  std::vector<int64_t> seqlens_q, seqlens_k;  // BSHD only; empty: every row is valid
  std::optional<float> softcap;
  std::optional<TensorSpec> alibi_slopes, bias, sinks;
  std::optional<DropoutSpec> dropout;
  std::optional<BlockMaskSpec> block_mask;
  bool deterministic = false;
  std::optional<DType> out_dtype;

  // Backward only; not looked at for a forward pass. Leaving out, lse and dout unset is allowed
  // where only planning.
  std::optional<TensorSpec> out, lse, dout, dlse;
};

// Checks everything that can be checked without tensor contents and normalises it. The only place
// that does; every message names the field, the value and the limit. Errors: INVALID_ARGUMENT.
// Thread-safe.
absl::StatusOr<AttentionProblem> Validate(const AttentionSpec& spec, Pass pass);

}  // namespace attn

#endif  // ATTN_KERNELS_API_SPEC_H_
