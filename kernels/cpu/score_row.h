// One row of scores (one query, one head, keys j = 0 … n - 1 in order), with SIMD: for the standard
// path.
#ifndef ATTN_KERNELS_CPU_SCORE_ROW_H_
#define ATTN_KERNELS_CPU_SCORE_ROW_H_

#include <cstdint>

#include "kernels/api/problem.h"

namespace attn {

// What turns q·k into a score. Semantics: attention.proto, AttentionOptions.
struct ScoreRowParams {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;         // 0: none
  const float* bias = nullptr;  // [n], already widened; null: none
  float alibi_slope = 0.0f;     // 0: none
  int64_t position = 0;         // i + off; for ALiBi
};

// scores[j] = q·k on entry, the score on exit. Where softcap_grad is not null it gets
// 1 - tanh²(scale·q·k / softcap), or 1 without a cap. Does not mask: hide entries with -inf
// afterwards. Thread-safe.
void ScoreRow(const ScoreRowParams& params, int64_t n, float* scores,
              float* softcap_grad = nullptr);

// Largest entry; -inf where n = 0. Thread-safe.
float MaxRow(const float* x, int64_t n);

// x[j] = exp(x[j] - shift); returns their sum. shift must be finite. Relative error under 2e-7;
// results under 2^-126 become 0; exp(-inf) = 0. Thread-safe.
float ExpRow(float shift, int64_t n, float* x);

// keep[j] = 65536 / threshold where entry (i, j0 + j) of `head` (b * num_heads + h) is kept, else
// 0. j0 is a multiple of 8. Thread-safe.
void DropoutRow(const DropoutOption& dropout, uint32_t head, uint32_t i, int64_t j0, int64_t n,
                float* keep);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_SCORE_ROW_H_
