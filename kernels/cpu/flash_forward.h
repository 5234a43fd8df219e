// flash_cpu, forward: how the work is divided, what it moves, and running it.
#ifndef ATTN_KERNELS_CPU_FLASH_FORWARD_H_
#define ATTN_KERNELS_CPU_FLASH_FORWARD_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/cpu/flash_panel.h"
#include "kernels/cpu/thread_pool.h"

namespace attn {

// Most panels per tile. K and V are brought into cache once per tile, which costs as much as a
// tenth of one panel's products, so tiles are as tall as the number of tiles allows (ForwardPlan).
inline constexpr int64_t kMaxTilePanels = 4;

// One tile: query rows [row, row + rows) of (batch, kv_head), of which the first `valid` are within
// Lq.
struct ForwardTile {
  int64_t batch = 0, kv_head = 0;
  int64_t row = 0, rows = 0, valid = 0;

  int64_t panels() const { return CeilDiv(valid, kPanelRows); }
  int64_t panel_rows(int64_t panel) const {
    return std::min(kPanelRows, valid - panel * kPanelRows);
  }
};

// The division of a forward call. A function of the problem alone, so that results do not depend on
// threads or scheduling.
struct ForwardPlan {
  // Query rows per tile: a multiple of kPanelRows.
  int64_t tile_rows = kPanelRows;
  // Tiles of rows per (sequence, kv head), and where each sequence's tiles begin when all
  // (sequence, kv head, tile) are counted in that order. Sequences stored equally long have no
  // list.
  int64_t tiles_per_head = 0;
  std::vector<int64_t> first_tile;  // [batch + 1]; empty: uniform
  int64_t total_tiles = 0;
  // Each tile's keys are cut into `splits` parts of split_keys, computed apart and merged: for few
  // queries with many keys. 1: no cut.
  int64_t splits = 1;
  int64_t split_keys = kUnlimited;

  explicit ForwardPlan(const AttentionProblem& p);
  // Tile `index` of (batch, kv_head), from the first row on.
  ForwardTile TileOfHead(const AttentionProblem& p, int64_t batch, int64_t kv_head,
                         int64_t index) const;

  // Tile `number` < total_tiles in the order in which tiles are handed out: within a head the last
  // first, which with causal sees the most keys, so that a call ends with short ones.
  ForwardTile Tile(const AttentionProblem& p, int64_t number) const;

  // Keys that `tile` works on in one split; the begin is a multiple of 8.
  KeyRange TileKeys(const AttentionProblem& p, const ForwardTile& tile, int64_t split) const;

  // Floats of one partial result: for each row of the tile its output and (m, l).
  int64_t PartialFloats(const AttentionProblem& p) const { return (p.head_dim_v + 2) * tile_rows; }
  int64_t WorkspaceBytes(const AttentionProblem& p) const {
    return splits == 1 ? 0 : total_tiles * splits * PartialFloats(p) * 4;
  }
};

// How the inputs of a call are read by RunContext::reader: some whole sequences at a time. For
// calls with many short sequences, where bringing the inputs together would take as long as
// attention; with long ones it takes no time that counts. A function of the problem alone.
struct InputWindows {
  int64_t sequences = 0;                             // per window
  int64_t count = 0;                                 // windows; 0: not for this problem
  int64_t q_extent = 0, k_extent = 0, v_extent = 0;  // elements that a sequence spans

  InputWindows(const AttentionProblem& p, const ForwardPlan& plan);
};

// With context.reader, InputWindows::count must not be 0.
absl::Status RunFlashForward(const AttentionProblem& p, const ForwardTensors& tensors,
                             const RunContext& context, ThreadPool* pool);

// What RunFlashForward() loads and stores. O(tiles of rows) for each distinct shape of sequence;
// with a block mask, O(tiles).
TileModel ModelFlashForward(const AttentionProblem& p);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_FLASH_FORWARD_H_
