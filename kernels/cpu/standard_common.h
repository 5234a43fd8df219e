// What the forward and the backward of the standard CPU path share.
#ifndef ATTN_KERNELS_CPU_STANDARD_COMMON_H_
#define ATTN_KERNELS_CPU_STANDARD_COMMON_H_

#include <cstdint>

#include "kernels/api/backend.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/score_row.h"
#include "kernels/cpu/standard_plan.h"
#include "kernels/cpu/stop_flag.h"

namespace attn::standard {

// The rows of one head of one sequence in a tensor: row r starts at data + r * stride elements.
struct Rows {
  const std::byte* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t stride = 0;  // elements
  int64_t dim = 0;

  const void* Row(int64_t r) const { return ElementAt(data, dtype, r * stride); }
};

Rows QueryRows(const AttentionProblem& p, const void* data, DType dtype, const Strides& strides,
               int64_t b, int64_t h, int64_t dim);
Rows KeyRows(const AttentionProblem& p, const void* data, const Strides& strides, int64_t b,
             int64_t kv_head, int64_t dim);

// The rows of one head of one sequence in a contiguous output [tokens, heads, dim].
struct OutRows {
  std::byte* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t stride = 0;
  int64_t dim = 0;

  void* Row(int64_t r) const { return ElementAt(data, dtype, r * stride); }
  void Zero(int64_t begin, int64_t end, TrafficCount& count) const;
};

OutRows QueryOutRows(const AttentionProblem& p, void* data, int64_t b, int64_t h, int64_t dim);
// kv_heads: the number of heads of `data`.
OutRows KeyOutRows(const AttentionProblem& p, void* data, DType dtype, int64_t b, int64_t head,
                   int64_t kv_heads, int64_t dim);

// A tile of fp32 rows.
struct Tile {
  const float* data;
  int64_t stride;
};
// Rows [begin, begin + n) as fp32: in place where they are FP32, else widened into `scratch`.
Tile LoadTile(const Rows& rows, int64_t begin, int64_t n, float* scratch, TrafficCount& count);

// scores [n, m] = left right^T, with row stride ScoreStride(m). False where it was stopped.
bool ScoreProduct(const Rows& left, int64_t n, const Rows& right, int64_t m, const Slot& slot,
                  float* scores, StopFlag& stop, TrafficCount& count);

// out [rows, dim] = factor * diag(row_factors) * weights right, with right [terms, dim] and
// weights(r, t) at weights.data[r * row_stride + t * k_stride]; row_factors null: ones. False where
// it was stopped.
bool OutProduct(const GemmLeft& weights, int64_t rows, const Rows& right, int64_t terms,
                float factor, const float* row_factors, const Slot& slot, const OutRows& out,
                StopFlag& stop, TrafficCount& count);

// What makes the scores of one head out of q·k.
class HeadScores {
 public:
  HeadScores(const AttentionProblem& p, int64_t b, int64_t h, const Slot& slot,
             TrafficCount& count);

  // row [len_k]: q_i·k_j on entry, the score on exit, -inf where not visible. cap_grad: see
  // ScoreRow().
  void Apply(int64_t i, float* row, float* cap_grad, TrafficCount& count) const;
  // The dropout factors of row i, [len_k]; null without dropout.
  const float* Keep(int64_t i) const;
  // -inf: none.
  float sink() const { return sink_; }

 private:
  void Hide(int64_t i, float* row, TrafficCount& count) const;

  const AttentionProblem& p_;
  const Sequence& s_;
  const int64_t b_, h_;
  const Slot& slot_;
  float slope_ = 0.0f;
  float sink_;
};

}  // namespace attn::standard

#endif  // ATTN_KERNELS_CPU_STANDARD_COMMON_H_
