// How a forward call of flash_cpu is divided.
#include <algorithm>

#include "kernels/cpu/flash_forward.h"

namespace attn {
namespace {

// Keys are split where there are fewer tiles than this, and never into parts shorter than
// kMinSplitKeys, below which the merge costs more than it gains. Fixed, not the number of threads,
// so that results are the same on every machine.
constexpr int64_t kEnoughTiles = 16;
constexpr int64_t kMinSplitKeys = 1024;

// Tiles grow taller only while at least so many remain to be shared out.
constexpr int64_t kTilesWanted = 32;

// Windows of so many bytes stay in a core's second-level cache beside the tiles.
constexpr int64_t kWindowBytes = int64_t{256} << 10;

// Fewer windows are shared out unevenly, and of so small a call the inputs are put together in no
// time.
constexpr int64_t kMinWindows = 32;

// Elements from a sequence's first to past its last.
int64_t Extent(const Strides& strides, int64_t tokens, int64_t heads, int64_t dim) {
  if (tokens == 0 || heads == 0) return 0;
  return (tokens - 1) * strides.token + (heads - 1) * strides.head + dim;
}

}  // namespace

KeyRange ForwardPlan::TileKeys(const AttentionProblem& p, const ForwardTile& t,
                               int64_t split) const {
  if (t.valid == 0) return {0, 0};
  KeyRange keys = KeysOfRows(p, p.sequences[t.batch], t.row, t.valid);
  if (splits > 1) {
    keys.begin = std::max(keys.begin, split * split_keys);
    keys.end = std::min(keys.end, (split + 1) * split_keys);
  }
  return keys.begin < keys.end ? keys : KeyRange{0, 0};
}

ForwardPlan::ForwardPlan(const AttentionProblem& p) {
  int64_t max_len_k = 0, panels = 0;
  for (const Sequence& s : p.sequences) {
    max_len_k = std::max(max_len_k, s.len_k);
    panels += CeilDiv(s.rows_q * p.group(), kPanelRows) * p.num_kv_heads;
  }
  tile_rows = std::clamp<int64_t>(panels / kTilesWanted, 1, kMaxTilePanels) * kPanelRows;
  if (p.layout == Layout::kBshd) {
    tiles_per_head = CeilDiv(p.seqlen_q * p.group(), tile_rows);
    total_tiles = tiles_per_head * p.num_kv_heads * p.batch;
  } else {
    first_tile.reserve(p.sequences.size() + 1);
    for (const Sequence& s : p.sequences) {
      first_tile.push_back(total_tiles);
      total_tiles += CeilDiv(s.rows_q * p.group(), tile_rows) * p.num_kv_heads;
    }
    first_tile.push_back(total_tiles);
  }
  if (total_tiles > 0 && total_tiles < kEnoughTiles && max_len_k >= 2 * kMinSplitKeys) {
    const int64_t parts =
        std::min(CeilDiv(kEnoughTiles, total_tiles), CeilDiv(max_len_k, kMinSplitKeys));
    split_keys = RoundUp(CeilDiv(max_len_k, parts), kKeyTile);
    splits = CeilDiv(max_len_k, split_keys);
  }
}

ForwardTile ForwardPlan::TileOfHead(const AttentionProblem& p, int64_t batch, int64_t kv_head,
                                    int64_t index) const {
  const Sequence& s = p.sequences[batch];
  ForwardTile tile{batch, kv_head, index * tile_rows, 0, 0};
  tile.rows = std::min(tile_rows, s.rows_q * p.group() - tile.row);
  tile.valid = std::clamp<int64_t>(s.len_q * p.group() - tile.row, 0, tile.rows);
  return tile;
}

ForwardTile ForwardPlan::Tile(const AttentionProblem& p, int64_t number) const {
  int64_t batch, within, tiles;
  if (first_tile.empty()) {
    tiles = tiles_per_head;
    batch = number / (tiles * p.num_kv_heads);
    within = number % (tiles * p.num_kv_heads);
  } else {
    batch = std::upper_bound(first_tile.begin(), first_tile.end(), number) - first_tile.begin() - 1;
    within = number - first_tile[batch];
    tiles = (first_tile[batch + 1] - first_tile[batch]) / p.num_kv_heads;
  }
  return TileOfHead(p, batch, within / tiles, tiles - 1 - within % tiles);
}

InputWindows::InputWindows(const AttentionProblem& p, const ForwardPlan& plan) {
  if (p.layout != Layout::kBshd || plan.splits > 1 || plan.total_tiles == 0) return;
  q_extent = Extent(p.q, p.seqlen_q, p.num_heads, p.head_dim);
  k_extent = Extent(p.k, p.seqlen_k, p.num_kv_heads, p.head_dim);
  v_extent = Extent(p.v, p.seqlen_k, p.num_kv_heads, p.head_dim_v);
  // Sequences that overlap, or lie within each other, would be read again and again.
  if (q_extent > p.q.batch || k_extent > p.k.batch || v_extent > p.v.batch) return;
  const int64_t stride_bytes = (p.q.batch + p.k.batch + p.v.batch) * SizeOf(p.dtype);
  const int64_t fit = kWindowBytes / std::max<int64_t>(stride_bytes, 1);
  if (fit == 0 || CeilDiv(p.batch, fit) < kMinWindows) return;
  sequences = fit;
  count = CeilDiv(p.batch, fit);
}

}  // namespace attn
