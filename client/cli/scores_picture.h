// The score matrix of one head, drawn: what is visible, and the tile that lives on chip.
#ifndef ATTN_CLIENT_CLI_SCORES_PICTURE_H_
#define ATTN_CLIENT_CLI_SCORES_PICTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/format.h"
#include "client/cli/problem.h"

namespace attn::cli {

inline constexpr int kMaxPictureColumns = 40;
inline constexpr int kMaxPictureRows = 14;

// The glyphs of the picture.
struct ScoreGlyphs {
  std::string tile, done, full, part, hidden;
  explicit ScoreGlyphs(const Style& style);
};

// Which (i, j) of one sequence, head 0, are visible, by lengths, causal, window and block mask.
// Same rules as attention.proto's AttentionOptions.
class Visibility {
 public:
  Visibility(const Problem& problem, const Extent& extent);

  struct Range {
    int64_t begin = 0;
    int64_t end = 0;  // begin >= end: none
  };
  // Keys that row i may see, block mask aside.
  Range Keys(int64_t i) const;
  bool Block(int64_t i, int64_t j) const;
  bool has_block_mask() const { return mask_ != nullptr; }

 private:
  int64_t len_q_ = 0, len_k_ = 0, off_ = 0;
  int64_t window_left_ = 0, window_right_ = 0;
  const std::byte* mask_ = nullptr;  // of (sequence, head 0)
  int64_t mask_cols_ = 0, block_q_ = 128, block_k_ = 128;
};

// Lines of a framed picture of at most kMaxPictureColumns x kMaxPictureRows cells, a cell about
// twice as high as wide. tile_q, tile_k: 0 draws no tile.
std::vector<std::string> DrawScores(const Visibility& visibility, const Extent& extent,
                                    int64_t tile_q, int64_t tile_k, const Style& style);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_SCORES_PICTURE_H_
