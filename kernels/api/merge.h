// Merging partial attention results over disjoint sets of keys.
#ifndef ATTN_KERNELS_API_MERGE_H_
#define ATTN_KERNELS_API_MERGE_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace attn {

// One partial result over some of the keys.
//   out: FP32 [rows, head_dim_v], each row normalised by its own denominator.
//   lse: FP32 [rows], natural log; -inf where the part saw no key (its out row is then not read).
struct PartialResult {
  const float* out;
  const float* lse;
};

// Merges partial results (double inside, rounded to fp32 once): lse = log Σ exp(lse_p), out =
// Σ exp(lse_p − lse)·out_p. Row r of every part is the same query. A sink must be in exactly one
// part. Empty with empty is empty (out 0, lse −inf), never NaN. The output may alias one of the
// parts. Errors: INVALID_ARGUMENT where parts is empty, rows or head_dim_v negative, or an lse is
// NaN or +inf (names the part, row and value). Thread-safe. Source: FlashAttention (Dao et al.
// 2022), Section 3.1, the softmax decomposition.
absl::Status MergePartials(std::span<const PartialResult> parts, int64_t rows, int64_t head_dim_v,
                           float* out, float* lse);

}  // namespace attn

#endif  // ATTN_KERNELS_API_MERGE_H_
