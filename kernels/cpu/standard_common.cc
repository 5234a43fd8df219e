#include "kernels/cpu/standard_common.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/convert.h"

namespace attn::standard {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

}  // namespace

Rows QueryRows(const AttentionProblem& p, const void* data, DType dtype, const Strides& strides,
               int64_t b, int64_t h, int64_t dim) {
  const int64_t offset =
      b * strides.batch + p.sequences[b].q_token * strides.token + h * strides.head;
  return {ElementAt(data, dtype, offset), dtype, strides.token, dim};
}

Rows KeyRows(const AttentionProblem& p, const void* data, const Strides& strides, int64_t b,
             int64_t kv_head, int64_t dim) {
  const int64_t offset =
      b * strides.batch + p.sequences[b].k_token * strides.token + kv_head * strides.head;
  return {ElementAt(data, p.dtype, offset), p.dtype, strides.token, dim};
}

void OutRows::Zero(int64_t begin, int64_t end, TrafficCount& count) const {
  for (int64_t r = begin; r < end; ++r) StoreZeros(count, dim, dtype, Row(r));
}

OutRows QueryOutRows(const AttentionProblem& p, void* data, int64_t b, int64_t h, int64_t dim) {
  const int64_t token = p.layout == Layout::kBshd ? b * p.seqlen_q : p.sequences[b].q_token;
  const int64_t offset = (token * p.num_heads + h) * dim;
  return {ElementAt(data, p.out_dtype, offset), p.out_dtype, p.num_heads * dim, dim};
}

OutRows KeyOutRows(const AttentionProblem& p, void* data, DType dtype, int64_t b, int64_t head,
                   int64_t kv_heads, int64_t dim) {
  const int64_t token = p.layout == Layout::kBshd ? b * p.seqlen_k : p.sequences[b].k_token;
  const int64_t offset = (token * kv_heads + head) * dim;
  return {ElementAt(data, dtype, offset), dtype, kv_heads * dim, dim};
}

Tile LoadTile(const Rows& rows, int64_t begin, int64_t n, float* scratch, TrafficCount& count) {
  count.Load(n * rows.dim * SizeOf(rows.dtype));
  if (rows.dtype == DType::kFp32) {
    return {static_cast<const float*>(rows.Row(begin)), rows.stride};
  }
  for (int64_t r = 0; r < n; ++r) {
    WidenRow(rows.Row(begin + r), rows.dtype, rows.dim, scratch + r * rows.dim);
  }
  return {scratch, rows.dim};
}

bool ScoreProduct(const Rows& left, int64_t n, const Rows& right, int64_t m, const Slot& slot,
                  float* scores, StopFlag& stop, TrafficCount& count) {
  if (n == 0) return true;
  const int64_t stride = ScoreStride(m);
  for (int64_t j = 0; j < m; j += kSumTile) {
    const int64_t cols = std::min(kSumTile, m - j);
    const Tile keys = LoadTile(right, j, cols, slot.right, count);
    TransposeTile(keys.data, keys.stride, cols, right.dim, slot.transposed, kSumTile);
    for (int64_t i = 0; i < n; i += kRowTile) {
      if (stop.ShouldStop()) return false;
      const int64_t rows = std::min(kRowTile, n - i);
      const Tile queries = LoadTile(left, i, rows, slot.left, count);
      Gemm(rows, cols, left.dim, {queries.data, queries.stride, 1}, slot.transposed, kSumTile,
           scores + i * stride + j, stride, GemmOutput::kStore);
      count.Store(rows * cols * 4);
    }
  }
  return true;
}

bool OutProduct(const GemmLeft& weights, int64_t rows, const Rows& right, int64_t terms,
                float factor, const float* row_factors, const Slot& slot, const OutRows& out,
                StopFlag& stop, TrafficCount& count) {
  const int64_t dim = out.dim;
  for (int64_t r = 0; r < rows; r += kOutTile) {
    const int64_t block = std::min(kOutTile, rows - r);
    std::fill_n(slot.accumulator, block * dim, 0.0f);
    for (int64_t t = 0; t < terms; t += kSumTile) {
      if (stop.ShouldStop()) return false;
      const int64_t depth = std::min(kSumTile, terms - t);
      const Tile tile = LoadTile(right, t, depth, slot.right, count);
      const float* block_weights = weights.data + r * weights.row_stride + t * weights.k_stride;
      count.Load(block * depth * 4);
      Gemm(block, dim, depth, {block_weights, weights.row_stride, weights.k_stride}, tile.data,
           tile.stride, slot.accumulator, dim, GemmOutput::kAdd);
    }
    if (factor != 1.0f) ScaleRow(factor, block * dim, slot.accumulator);
    for (int64_t i = 0; i < block; ++i) {
      if (row_factors != nullptr) ScaleRow(row_factors[r + i], dim, slot.accumulator + i * dim);
      StoreRow(count, slot.accumulator + i * dim, dim, out.dtype, out.Row(r + i));
    }
  }
  return true;
}

HeadScores::HeadScores(const AttentionProblem& p, int64_t b, int64_t h, const Slot& slot,
                       TrafficCount& count)
    : p_(p), s_(p.sequences[b]), b_(b), h_(h), slot_(slot), sink_(kNegInf) {
  if (p.alibi) {
    slope_ = LoadValue(count, p.alibi->slopes + (p.alibi->batch == 1 ? 0 : b * p.num_heads) + h);
  }
  if (p.has_sinks) sink_ = LoadValue(count, p.sinks + h);
}

void HeadScores::Apply(int64_t i, float* row, float* cap_grad, TrafficCount& count) const {
  ScoreRowParams params;
  params.softmax_scale = p_.softmax_scale;
  params.softcap = p_.softcap;
  params.alibi_slope = slope_;
  params.position = i + s_.off;
  if (p_.bias) {
    const DType dtype = p_.bias->dtype;
    LoadRow(count, ElementAt(p_.bias->data, dtype, p_.BiasRowOffset(b_, h_, i)), dtype, s_.len_k,
            slot_.bias_row);
    params.bias = slot_.bias_row;
  }
  ScoreRow(params, s_.len_k, row, cap_grad);
  Hide(i, row, count);
}

void HeadScores::Hide(int64_t i, float* row, TrafficCount& count) const {
  const KeyRange visible = p_.VisibleKeys(s_, i);
  const int64_t begin = std::clamp<int64_t>(visible.begin, 0, s_.len_k);
  const int64_t end = std::clamp<int64_t>(visible.end, begin, s_.len_k);
  std::fill_n(row, begin, kNegInf);
  std::fill_n(row + end, s_.len_k - end, kNegInf);
  if (!p_.block_mask) return;
  const int64_t block_k = p_.block_mask->block_k;
  for (int64_t j = 0; j < s_.len_k;) {
    const int64_t width = std::min(block_k, s_.len_k - j);
    count.Load(1);
    if (!p_.BlockVisible(b_, h_, i, j)) std::fill_n(row + j, width, kNegInf);
    j += width;
  }
}

const float* HeadScores::Keep(int64_t i) const {
  if (!p_.dropout) return nullptr;
  DropoutRow(*p_.dropout, static_cast<uint32_t>(b_ * p_.num_heads + h_), static_cast<uint32_t>(i),
             0, s_.len_k, slot_.keep_row);
  return slot_.keep_row;
}

}  // namespace attn::standard
