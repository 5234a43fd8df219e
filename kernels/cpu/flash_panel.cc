#include "kernels/cpu/flash_panel.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/memory.h"

namespace attn {
namespace {

// The entries of the block mask that a panel needs for one column of blocks: query blocks
// [first, last], for each head of the group or for the one shared head.
struct MaskSlice {
  int64_t first, last, heads;

  MaskSlice(const AttentionProblem& p, int64_t row, int64_t count)
      : first(row / p.group() / p.block_mask->block_q),
        last((row + count - 1) / p.group() / p.block_mask->block_q),
        heads(p.block_mask->heads == 1 ? 1 : p.group()) {}

  const uint8_t* Entry(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t block,
                       int64_t head_of_group, int64_t j) const {
    const BlockMaskOption& m = *p.block_mask;
    const int64_t b = m.batch == 1 ? 0 : batch;
    const int64_t h = m.heads == 1 ? 0 : kv_head * p.group() + head_of_group;
    return m.data + ((b * m.heads + h) * m.rows + block) * m.cols + j / m.block_k;
  }
};

bool HasMask(const AttentionProblem& p) { return p.block_mask && p.block_mask->data != nullptr; }

}  // namespace

float QueryFactor(const AttentionProblem& p) {
  const double scale = p.softmax_scale;
  return static_cast<float>(p.softcap > 0 ? scale / static_cast<double>(p.softcap)
                                          : scale * kLog2e);
}

int64_t PanelInitBytes(const AttentionProblem& p, int64_t count) { return p.alibi ? 4 * count : 0; }

int64_t BlockMaskBytes(const AttentionProblem& p, int64_t row, int64_t count) {
  if (!HasMask(p)) return 0;
  const MaskSlice slice(p, row, count);
  return (slice.last - slice.first + 1) * slice.heads;
}

bool BlockMaskShows(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t row,
                    int64_t count, int64_t j) {
  if (!HasMask(p)) return true;
  const MaskSlice slice(p, row, count);
  for (int64_t block = slice.first; block <= slice.last; ++block) {
    for (int64_t g = 0; g < slice.heads; ++g) {
      if (*slice.Entry(p, batch, kv_head, block, g, j) != 0) return true;
    }
  }
  return false;
}

void Panel::Init(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t row,
                 int64_t count, TrafficCount& traffic) {
  p_ = &p;
  sequence_ = &p.sequences[batch];
  batch_ = batch;
  count_ = count;
  cols_ = RoundUp(count, kColumnStep);
  keys_ = KeysOfRows(p, *sequence_, row, count);
  const int64_t group = p.group();
  int64_t i = row / group, g = row % group;
  for (int64_t c = 0; c < count; ++c) {
    query_[c] = i;
    head_[c] = static_cast<int32_t>(kv_head * group + g);
    if (++g == group) {
      g = 0;
      ++i;
    }
  }
  full_ = {p.VisibleKeys(*sequence_, query_[count - 1]).begin,
           p.VisibleKeys(*sequence_, query_[0]).end};
  if (p.alibi) {
    const float* slopes = p.alibi->slopes + (p.alibi->batch == 1 ? 0 : batch * p.num_heads);
    for (int64_t c = 0; c < cols_; ++c) {
      slope_[c] =
          c < count ? static_cast<float>(LoadValue(traffic, slopes + head_[c]) * kLog2e) : 0.0f;
    }
  }
  if (p.dropout) {
    for (int64_t c = 0; c < cols_; ++c) {
      const int64_t from = std::min(c, count - 1);
      philox_query_[c] = static_cast<uint32_t>(query_[from]);
      philox_head_[c] = static_cast<uint32_t>(batch * p.num_heads + head_[from]);
    }
  }
  if (HasMask(p)) {
    const MaskSlice slice(p, row, count);
    mask_heads_ = slice.heads;
    mask_.resize((slice.last - slice.first + 1) * slice.heads);
  }
}

bool Panel::LoadBlockMask(int64_t j, TrafficCount& traffic) {
  if (!HasMask(*p_)) return true;
  const int64_t group = p_->group();
  const int64_t kv_head = head_[0] / group;
  const int64_t first_row = query_[0] * group + head_[0] % group;
  const MaskSlice slice(*p_, first_row, count_);
  bool any = false;
  uint8_t* entry = mask_.data();
  for (int64_t block = slice.first; block <= slice.last; ++block) {
    for (int64_t g = 0; g < slice.heads; ++g, ++entry) {
      *entry = LoadValue(traffic, slice.Entry(*p_, batch_, kv_head, block, g, j));
      any |= *entry != 0;
    }
  }
  return any;
}

void Panel::AddScoreTerms(int64_t j0, int64_t keys, float* s, float* softcap_grad, float* rows,
                          float* tile, TrafficCount& traffic) const {
  const AttentionProblem& p = *p_;
  if (p.softcap > 0) {
    SoftcapTile(keys, cols_, static_cast<float>(static_cast<double>(p.softcap) * kLog2e), s,
                softcap_grad);
  }
  if (p.bias) {
    for (int64_t c = 0; c < count_; ++c) {
      const int64_t at = p.BiasRowOffset(batch_, head_[c], query_[c]) + j0;
      LoadRow(traffic, ElementAt(p.bias->data, p.bias->dtype, at), p.bias->dtype, keys,
              rows + c * kKeyTile);
    }
    std::memset(rows + count_ * kKeyTile, 0,
                static_cast<size_t>((cols_ - count_) * kKeyTile) * sizeof(float));
    TransposeTile(rows, kKeyTile, cols_, keys, tile, cols_);
    AddScaledRow(tile, static_cast<float>(kLog2e), keys * cols_, s);
  }
  if (p.alibi) {
    alignas(64) float position[kPanelRows];
    for (int64_t c = 0; c < cols_; ++c) {
      position[c] = c < count_ ? static_cast<float>(query_[c] + sequence_->off - j0) : 0.0f;
    }
    AlibiTile(keys, cols_, slope_, position, s);
  }
  if (j0 >= full_.begin && j0 + keys <= full_.end && !HasMask(p)) return;
  alignas(64) int32_t lo[kPanelRows];
  alignas(64) int32_t hi[kPanelRows];
  for (int64_t c = 0; c < cols_; ++c) {
    lo[c] = 0;
    hi[c] = static_cast<int32_t>(keys);
    if (c >= count_) continue;
    if (HasMask(p)) {
      const int64_t block = query_[c] / p.block_mask->block_q - query_[0] / p.block_mask->block_q;
      const int64_t g = mask_heads_ == 1 ? 0 : head_[c] % mask_heads_;
      if (mask_[block * mask_heads_ + g] == 0) {
        hi[c] = 0;
        continue;
      }
    }
    const KeyRange visible = p.VisibleKeys(*sequence_, query_[c]);
    lo[c] = static_cast<int32_t>(std::clamp<int64_t>(visible.begin - j0, 0, keys));
    hi[c] = static_cast<int32_t>(std::clamp<int64_t>(visible.end - j0, 0, keys));
  }
  MaskTile(keys, cols_, lo, hi, s);
}

void Panel::Dropout(int64_t j0, int64_t keys, float* keep) const {
  DropoutTile(*p_->dropout, j0, keys, cols_, philox_query_, philox_head_,
              65536.0f / static_cast<float>(p_->dropout->threshold), keep);
}

}  // namespace attn
