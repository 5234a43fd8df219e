// A panel: up to 64 query rows of one (sequence, kv head) that flash_cpu works on together, and
// what turns their q·k into scores. The query heads of a GQA group are folded into the rows: row r
// is query r / group of head hk·group + r mod group, so that K and V are read once for the whole
// group.
#ifndef ATTN_KERNELS_CPU_FLASH_PANEL_H_
#define ATTN_KERNELS_CPU_FLASH_PANEL_H_

#include <cstdint>
#include <vector>

#include "kernels/api/problem.h"
#include "kernels/cpu/counting.h"
#include "kernels/cpu/flash_tile.h"

namespace attn {

inline constexpr int64_t kPanelRows = kMaxColumns;
// Keys whose scores are computed at once. 128 x 64 scores are 32 KB: with the operands they stay
// within L2, and mostly L1.
inline constexpr int64_t kKeyTile = 128;
// Block masks may change every so many keys, and nowhere between.
inline constexpr int64_t kMaskStep = 64;

inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
inline int64_t CeilDiv(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Keys per tile: smaller with a block mask, so that a tile lies in one column of blocks.
inline int64_t KeyTileOf(const AttentionProblem& p) { return p.block_mask ? kMaskStep : kKeyTile; }

// Keys that some of `count` >= 1 valid rows from `row` on may see, by lengths, causal and window.
// The begin is aligned down to 8 keys, which the dropout mask needs.
inline KeyRange KeysOfRows(const AttentionProblem& p, const Sequence& s, int64_t row,
                           int64_t count) {
  const int64_t group = p.group();
  const int64_t begin = p.VisibleKeys(s, row / group).begin;
  const int64_t end = p.VisibleKeys(s, (row + count - 1) / group).end;
  return begin < end ? KeyRange{begin & ~int64_t{7}, end} : KeyRange{0, 0};
}

// Multiplies q before q·k, so that the product is in the log2 domain, or the argument of tanh.
float QueryFactor(const AttentionProblem& p);

// Which panels of which (sequence, kv head) and where their entries lie. Made once per panel; the
// per-column arrays are filled only where options ask for them.
class Panel {
 public:
  // Rows [row, row + count) must be valid; 1 <= count <= kPanelRows. Loads the ALiBi slopes.
  void Init(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t row, int64_t count,
            TrafficCount& traffic);

  int64_t count() const { return count_; }
  int64_t cols() const { return cols_; }  // count rounded up to kColumnStep
  KeyRange keys() const { return keys_; }
  int64_t query(int64_t c) const { return query_[c]; }
  int64_t head(int64_t c) const { return head_[c]; }

  // Looks up the block mask for the tile of keys that holds key j; false: no row sees it. True
  // where there is no mask. Call before AddScoreTerms() for that tile.
  bool LoadBlockMask(int64_t j, TrafficCount& traffic);

  // s [keys, cols] holds q·k times QueryFactor() for the keys from j0 on; turns it into scores in
  // the log2 domain: cap, bias, ALiBi, and −inf where hidden. softcap_grad: see SoftcapTile(). rows
  // and tile are room for [kPanelRows, kKeyTile] floats each; used with a bias only.
  void AddScoreTerms(int64_t j0, int64_t keys, float* s, float* softcap_grad, float* rows,
                     float* tile, TrafficCount& traffic) const;

  // The dropout mask of a tile as factors 0 or 65536/T. j0 is a multiple of 8. Only with dropout.
  void Dropout(int64_t j0, int64_t keys, float* keep) const;

 private:
  const AttentionProblem* p_ = nullptr;
  const Sequence* sequence_ = nullptr;
  int64_t batch_ = 0;
  int64_t count_ = 0, cols_ = 0;
  KeyRange keys_, full_;  // keys that some row sees; keys that every row sees
  int64_t mask_heads_ = 1;
  std::vector<uint8_t> mask_;  // [query block - first query block][head of the group or 1]
  alignas(64) int64_t query_[kPanelRows];
  alignas(64) int32_t head_[kPanelRows];
  alignas(64) uint32_t philox_query_[kPanelRows];
  alignas(64) uint32_t philox_head_[kPanelRows];
  alignas(64) float slope_[kPanelRows];
};

// Bytes that Panel::Init() loads for `count` rows.
int64_t PanelInitBytes(const AttentionProblem& p, int64_t count);

// Bytes that Panel::LoadBlockMask() loads each time.
int64_t BlockMaskBytes(const AttentionProblem& p, int64_t row, int64_t count);

// What Panel::LoadBlockMask() returns, without loading; for the traffic model.
bool BlockMaskShows(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t row,
                    int64_t count, int64_t j);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_FLASH_PANEL_H_
