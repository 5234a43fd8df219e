#include "kernels/cuda/sm90/tiling.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/sm90/plan.h"

namespace attn::cuda::sm90 {
namespace {

// The model's constants, in microseconds of an H200; what matters is how they compare. Fitted to
// 556 shapes, each with up to 45 tilings: the model's choice takes 1.2% longer than the best one in
// the geometric mean, 20% at most (kernels/README.md).
constexpr double kFlopsPerUs = 7.2e6;  // of a multiprocessor, all of whose warpgroups have rows
// Of a step's time, what goes by however few of the warpgroups have rows: one multiplies under
// another's softmax.
constexpr double kFixedShare = 0.6;
constexpr double kWorkUs = 2;              // beginning and ending a work
constexpr double kPartBytesPerUs = 32768;  // of a multiprocessor, while all write partial rows
constexpr double kMergeUs = 3, kMergeSplitUs = 0.05, kMergeBytesPerUs = 4.7e6;
// Something is lost that is not counted: a choice that does more is to gain this at least.
constexpr double kGain = 0.97;
// With so many works for each multiprocessor, long and short ones even out.
constexpr int64_t kFewTurns = 4;
constexpr int64_t kMinSplitTiles = 4;
constexpr int64_t kMaxSplitTurns = 8;  // more works than this for each multiprocessor gain nothing

// Keys that the first and the last row of a sequence see.
struct Seen {
  double first, last;
};
Seen KeysSeen(const AttentionProblem& p, const Sequence& s) {
  const auto of_row = [&](int64_t row) {
    const int64_t at = row + s.off;
    const int64_t begin = std::max<int64_t>(0, at - std::min(p.window_left, kUnlimited));
    const int64_t end = std::min(s.len_k, at + std::min(p.window_right, kUnlimited) + 1);
    return static_cast<double>(std::max<int64_t>(0, end - begin));
  };
  return {of_row(0), of_row(s.len_q - 1)};
}

// What the tiles take, of which none is split.
struct Load {
  int64_t tiles = 0;
  double total_us = 0, longest_us = 0;
  double step_us = 0;  // of one key tile, of the fullest tile of queries
  double part_us = 0;  // of writing its partial rows
  bool alike = true;   // all tiles take about as long
};

Load LoadOf(const AttentionProblem& p, const Kernels& kernels, const ForwardInfo& tile, int pack) {
  const double full_step_us =
      2.0 * tile.queries * tile.keys * (kernels.head_dim + kernels.head_dim_v) / kFlopsPerUs;
  const double full_part_us =
      static_cast<double>(tile.queries * p.head_dim_v * 4) / kPartBytesPerUs;
  const auto share_of = [&](int64_t rows) {
    const auto groups = static_cast<double>(CeilDiv(rows, kWarpgroupRows));
    return kFixedShare + (1 - kFixedShare) * groups * kWarpgroupRows / tile.queries;
  };
  const int64_t heads = p.num_heads >> pack;
  Load load;
  const Sequence* before = nullptr;
  for (const Sequence& s : p.sequences) {
    const int64_t rows = s.rows_q << pack;
    if (rows == 0) continue;
    const int64_t tiles = CeilDiv(rows, tile.queries),
                  last_rows = rows - (tiles - 1) * tile.queries;
    const double last_share = share_of(last_rows), largest_share = tiles > 1 ? 1 : last_share;
    const Seen keys = s.len_q > 0 ? KeysSeen(p, s) : Seen{0, 0};
    const double most_steps = std::ceil(std::max(keys.first, keys.last) / tile.keys);
    const double mean_steps = keys.first == keys.last || tiles == 1
                                  ? most_steps
                                  : (keys.first + keys.last) / 2 / tile.keys;
    load.tiles += tiles * heads;
    load.total_us += static_cast<double>(heads) * (static_cast<double>(tiles - 1) + last_share) *
                     mean_steps * full_step_us;
    load.longest_us = std::max(load.longest_us, most_steps * largest_share * full_step_us);
    load.step_us = std::max(load.step_us, largest_share * full_step_us);
    load.part_us = std::max(load.part_us, largest_share * full_part_us);
    load.alike = load.alike && keys.first == keys.last &&
                 (before == nullptr || (before->rows_q == s.rows_q && before->len_k == s.len_k));
    before = &s;
  }
  return load;
}

double EstimateUs(const AttentionProblem& p, const Load& load, const Tiling& tiling,
                  int64_t multiprocessors) {
  const bool split = tiling.splits > 1;
  const double work_us = kWorkUs + (split ? load.part_us : 0);
  const double longest_us =
      work_us +
      (split ? std::min(load.longest_us, tiling.split_tiles * load.step_us) : load.longest_us);
  const int64_t works = load.tiles * tiling.splits, turns = CeilDiv(works, multiprocessors);
  const double total_us = load.total_us + static_cast<double>(works) * work_us;
  double us = longest_us;
  if (turns > 1) {
    if (!load.alike) {
      us = std::max(us, total_us / static_cast<double>(multiprocessors) + longest_us / 2);
    } else if (turns <= kFewTurns) {
      us *= static_cast<double>(turns);
    } else {
      us = static_cast<double>(turns) * total_us / static_cast<double>(works);
    }
  }
  if (split) {
    const int64_t bytes = p.num_heads * p.total_q * tiling.splits * p.head_dim_v * 4;
    us += kMergeUs + kMergeSplitUs * tiling.splits + static_cast<double>(bytes) / kMergeBytesPerUs;
  }
  return us;
}

}  // namespace

Tiling ChooseTiling(const AttentionProblem& p, const Kernels& kernels, int64_t multiprocessors) {
  const Mode mode = ModeOf(p);
  const ForwardInfo& tile = kernels.forward_info[static_cast<int>(mode)];
  int64_t longest = 0;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.len_k);
  const int64_t key_tiles = CeilDiv(longest, tile.keys);
  const int64_t most_splits = std::min<int64_t>(key_tiles / kMinSplitTiles, kMaxSplits);
  // Options and block masks are a head's own.
  const int most_pack = mode == Mode::kFull || mode == Mode::kLimited ? kMaxPack : 0;
  Tiling best{.split_tiles = static_cast<int>(key_tiles)};
  if (key_tiles == 0) return best;
  double least_us = 0;
  for (int pack = 0; pack <= most_pack && p.group() % (1 << pack) == 0; ++pack) {
    const Load load = LoadOf(p, kernels, tile, pack);
    if (load.tiles == 0) return best;
    const auto consider = [&](int64_t splits) {
      const int64_t split_tiles = CeilDiv(key_tiles, splits);
      const Tiling tiling{.pack = pack,
                          .splits = static_cast<int>(CeilDiv(key_tiles, split_tiles)),
                          .split_tiles = static_cast<int>(split_tiles)};
      const bool plain = pack == 0 && splits == 1;
      const double us = EstimateUs(p, load, tiling, multiprocessors) / (plain ? 1.0 : kGain);
      if (!plain && us >= least_us) return;
      least_us = us;
      best = tiling;
    };
    consider(1);
    // As many splits as so many turns of all multiprocessors have room for.
    for (int64_t turns = 1, before = 1; turns <= kMaxSplitTurns; ++turns) {
      const int64_t splits = std::min(turns * multiprocessors / load.tiles, most_splits);
      if (splits > before) consider(splits);
      before = std::max(before, splits);
    }
  }
  return best;
}

}  // namespace attn::cuda::sm90
