#include "client/cli/scores_picture.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attn::cli {
namespace {

namespace v1 = client::v1;

constexpr int64_t kUnlimited = int64_t{1} << 60;
// Points looked at per cell and axis: enough to tell whole, part and nothing apart on a diagonal.
constexpr int64_t kSamples = 16;

struct Cells {
  int rows = 1;
  int cols = 1;
};

Cells Layout(const Extent& extent) {
  const double n = static_cast<double>(std::max<int64_t>(1, extent.queries));
  const double m = static_cast<double>(std::max<int64_t>(1, extent.keys));
  // Entries per cell height; a cell is half as wide.
  const double unit = std::max(n / kMaxPictureRows, 2 * m / kMaxPictureColumns);
  return {std::clamp(static_cast<int>(std::lround(n / unit)), 1, kMaxPictureRows),
          std::clamp(static_cast<int>(std::lround(2 * m / unit)), 2, kMaxPictureColumns)};
}

// Entries [begin, end) that cell `index` of `cells` covers, never none.
Visibility::Range Covered(int index, int cells, int64_t entries) {
  const int64_t begin = entries * index / cells;
  return {begin, std::max(begin + 1, entries * (index + 1) / cells)};
}

// How much of a cell is visible: 0, 1 or between.
double Share(const Visibility& visibility, Visibility::Range rows, Visibility::Range cols) {
  const int64_t row_step = std::max<int64_t>(1, (rows.end - rows.begin) / kSamples);
  const int64_t col_step = std::max<int64_t>(1, (cols.end - cols.begin) / kSamples);
  int64_t seen = 0;
  int64_t all = 0;
  const auto look = [&](int64_t i) {
    const Visibility::Range keys = visibility.Keys(i);
    if (!visibility.has_block_mask()) {
      all += cols.end - cols.begin;
      seen += std::max<int64_t>(0, std::min(cols.end, keys.end) - std::max(cols.begin, keys.begin));
      return;
    }
    for (int64_t j = cols.begin; j < cols.end; j += col_step) {
      ++all;
      if (j >= keys.begin && j < keys.end && visibility.Block(i, j)) ++seen;
    }
  };
  for (int64_t i = rows.begin; i < rows.end; i += row_step) look(i);
  look(rows.end - 1);
  return static_cast<double>(seen) / static_cast<double>(all);
}

// Where the tile is drawn, in entries: a query tile below the middle, and the middle one of the key
// tiles that it visits.
struct TilePlace {
  Visibility::Range rows, cols;
  int64_t first_key = 0;  // where this query tile began
  bool any = false;
};

TilePlace PlaceTile(const Visibility& visibility, const Extent& extent, int64_t tile_q,
                    int64_t tile_k) {
  TilePlace place;
  if (tile_q < 1 || tile_k < 1 || extent.queries < 1 || extent.keys < 1) return place;
  const int64_t tiles = (extent.queries + tile_q - 1) / tile_q;
  for (int64_t step = 0; step < tiles && step < 64 && !place.any; ++step) {
    // From 60% downwards, then around: padding may leave the lower rows empty.
    const int64_t tile =
        (tiles * 3 / 5 + tiles - step * std::max<int64_t>(1, tiles / 64) % tiles) % tiles;
    place.rows = {tile * tile_q, std::min(extent.queries, (tile + 1) * tile_q)};
    Visibility::Range keys = visibility.Keys(place.rows.begin);
    for (const int64_t i : {place.rows.begin, place.rows.end - 1}) {
      const Visibility::Range row = visibility.Keys(i);
      if (row.begin >= row.end) continue;
      if (keys.begin >= keys.end) keys = row;
      keys = {std::min(keys.begin, row.begin), std::max(keys.end, row.end)};
    }
    if (keys.begin >= keys.end) continue;
    const int64_t first = keys.begin / tile_k;
    const int64_t last = (keys.end - 1) / tile_k;
    const int64_t middle = (first + last + 1) / 2;
    place.cols = {middle * tile_k, std::min(extent.keys, (middle + 1) * tile_k)};
    place.first_key = first * tile_k;
    place.any = true;
  }
  return place;
}

bool Overlaps(Visibility::Range a, Visibility::Range b) {
  return a.begin < b.end && b.begin < a.end;
}

}  // namespace

ScoreGlyphs::ScoreGlyphs(const Style& style)
    : tile(style.unicode ? "█" : "#"),
      done(style.unicode ? "▓" : "="),
      full(style.unicode ? "▒" : "+"),
      part(style.unicode ? "░" : ":"),
      hidden(" ") {}

Visibility::Visibility(const Problem& problem, const Extent& extent)
    : len_q_(extent.queries), len_k_(extent.keys) {
  const v1::AttentionOptions& options = problem.header.options();
  if (options.seqlens_q_size() > 0) {
    len_q_ = std::clamp<int64_t>(options.seqlens_q(0), 0, extent.queries);
  }
  if (options.seqlens_k_size() > 0) {
    len_k_ = std::clamp<int64_t>(options.seqlens_k(0), 0, extent.keys);
  }
  off_ = options.alignment() == v1::ALIGNMENT_TOP_LEFT ? 0 : len_k_ - len_q_;
  const auto side = [](bool set, int64_t value) {
    return set ? std::clamp<int64_t>(value, 0, kUnlimited) : kUnlimited;
  };
  window_left_ = side(options.has_window_left(), options.window_left());
  window_right_ = options.causal() ? 0 : side(options.has_window_right(), options.window_right());

  const client::HostTensor& mask = problem.inputs.block_mask;
  if (!mask.empty() && mask.shape.size() == 4) {
    block_q_ = options.block_mask().has_block_q() ? options.block_mask().block_q() : 128;
    block_k_ = options.block_mask().has_block_k() ? options.block_mask().block_k() : 128;
    const int64_t rows = mask.shape[2];
    mask_cols_ = mask.shape[3];
    const int64_t batch =
        mask.shape[0] > static_cast<int64_t>(extent.sequence) ? extent.sequence : 0;
    const int64_t first = batch * mask.shape[1] * rows * mask_cols_;
    const int64_t needed_rows = block_q_ < 1 ? 0 : (extent.queries + block_q_ - 1) / block_q_;
    const int64_t needed_cols = block_k_ < 1 ? 0 : (extent.keys + block_k_ - 1) / block_k_;
    // A mask of the wrong shape is the server's to refuse; here it is only not drawn.
    if (block_q_ >= 1 && block_k_ >= 1 && needed_rows <= rows && needed_cols <= mask_cols_ &&
        first + rows * mask_cols_ <= static_cast<int64_t>(mask.bytes.size())) {
      mask_ = mask.bytes.data() + first;
    }
  }
}

Visibility::Range Visibility::Keys(int64_t i) const {
  if (i >= len_q_) return {0, 0};
  const int64_t position = i + off_;
  return {std::max<int64_t>(0, position - window_left_),
          std::min<int64_t>(len_k_, position + window_right_ + 1)};
}

bool Visibility::Block(int64_t i, int64_t j) const {
  return mask_ == nullptr || mask_[i / block_q_ * mask_cols_ + j / block_k_] != std::byte{0};
}

std::vector<std::string> DrawScores(const Visibility& visibility, const Extent& extent,
                                    int64_t tile_q, int64_t tile_k, const Style& style) {
  const ScoreGlyphs glyphs(style);
  const Cells cells = Layout(extent);
  const TilePlace tile = PlaceTile(visibility, extent, tile_q, tile_k);
  const auto edge = [&](std::string_view left, std::string_view right) {
    std::string line(left);
    for (int c = 0; c < cells.cols; ++c) line += style.unicode ? "─" : "-";
    return line.append(right);
  };
  const std::string side = style.unicode ? "│" : "|";
  std::vector<std::string> lines;
  lines.push_back(style.unicode ? edge("┌", "┐") : edge("+", "+"));
  for (int r = 0; r < cells.rows; ++r) {
    const Visibility::Range rows = Covered(r, cells.rows, extent.queries);
    std::string line = side;
    for (int c = 0; c < cells.cols; ++c) {
      const Visibility::Range cols = Covered(c, cells.cols, extent.keys);
      const double share =
          extent.queries < 1 || extent.keys < 1 ? 0 : Share(visibility, rows, cols);
      const bool band = tile.any && Overlaps(rows, tile.rows);
      if (band && Overlaps(cols, tile.cols)) {
        line += style.Cyan(glyphs.tile);
      } else if (band && share > 0 && cols.end <= tile.cols.begin && cols.end > tile.first_key) {
        line += glyphs.done;
      } else {
        line += share <= 0 ? glyphs.hidden : share >= 1 ? glyphs.full : glyphs.part;
      }
    }
    lines.push_back(line + side);
  }
  lines.push_back(style.unicode ? edge("└", "┘") : edge("+", "+"));
  return lines;
}

}  // namespace attn::cli
