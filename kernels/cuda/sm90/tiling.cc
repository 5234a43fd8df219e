#include "kernels/cuda/sm90/tiling.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/sm90/plan.h"

namespace attn::cuda::sm90 {
namespace {

// The model's constants, in microseconds of an H200; what matters is how they compare. Fitted to
// 510 shapes, each with up to 60 tilings: the choice takes 1.1% longer than the best one in the
// geometric mean, 16% at most (kernels/README.md).
constexpr double kFlopsPerUs = 7.2e6;  // of a multiprocessor, all of whose warpgroups have rows
// Of a step's time, what goes by however few of the warpgroups have rows: one multiplies under
// another's softmax.
constexpr double kFixedShare = 0.6;
constexpr double kWorkUs = 2;              // beginning and ending a work
constexpr double kPartBytesPerUs = 32768;  // of a multiprocessor, while all write partial rows
constexpr double kMergeUs = 3, kMergeSplitUs = 0.05, kMergeBytesPerUs = 4.7e6;
// Something is lost that is not counted: a choice that does more is to gain this at least.
constexpr double kGain = 0.97;
constexpr int64_t kMinSplitKeys = 128;
constexpr int64_t kMaxSplitTurns = 8;  // more works than this for each multiprocessor gain nothing

// How many keys rows of a sequence see.
struct Seen {
  double least = 0, mean = 0, most = 0;
};
Seen KeysSeen(const AttentionProblem& p, const Sequence& s) {
  if (s.len_q == 0) return {};
  const auto of_row = [&](int64_t row) {
    const int64_t at = row + s.off;
    const int64_t begin = std::max<int64_t>(0, at - p.window_left);
    const int64_t end = std::min(s.len_k, at + p.window_right + 1);
    return static_cast<double>(std::max<int64_t>(0, end - begin));
  };
  const double first = of_row(0), middle = of_row(s.len_q / 2), last = of_row(s.len_q - 1);
  return {.least = std::min({first, middle, last}),
          .mean = (first + 2 * middle + last) / 4,
          .most = std::max({first, middle, last})};
}

// What the tiles take, of which none is split.
struct Load {
  int64_t tiles = 0;
  double total_us = 0, longest_us = 0;
  double step_us = 0;  // of one key tile, of the fullest tile of queries
  double part_us = 0;  // of writing its partial rows
  bool alike = true;   // all tiles take about as long
};
// Of the most keys that a row of a sequence sees, as many as the others see at least, that its
// tiles are alike.
constexpr double kAlike = 0.8;

Load LoadOf(const AttentionProblem& p, const Kernels& kernels, const ForwardInfo& tile, int pack,
            double slower) {
  const double full_step_us = 2.0 * tile.queries * tile.keys *
                              (kernels.head_dim + kernels.head_dim_v) * slower / kFlopsPerUs;
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
    const Seen keys = KeysSeen(p, s);
    const double most_steps = std::ceil(keys.most / tile.keys);
    const double mean_steps =
        keys.least == keys.most || tiles == 1 ? most_steps : keys.mean / tile.keys;
    load.tiles += tiles * heads;
    load.total_us += static_cast<double>(heads) * (static_cast<double>(tiles - 1) + last_share) *
                     mean_steps * full_step_us;
    load.longest_us = std::max(load.longest_us, most_steps * largest_share * full_step_us);
    load.step_us = std::max(load.step_us, largest_share * full_step_us);
    load.part_us = std::max(load.part_us, largest_share * full_part_us);
    load.alike = load.alike && keys.least >= kAlike * keys.most &&
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
    us = load.alike
             ? static_cast<double>(turns) * total_us / static_cast<double>(works)
             : std::max(us, total_us / static_cast<double>(multiprocessors) + longest_us / 2);
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
  // Options and block masks are a head's own.
  const bool plain_mode = mode == Mode::kFull || mode == Mode::kLimited;
  int64_t longest = 0;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.len_k);
  Tiling best;
  double least_us = 0;
  for (const bool narrow : {false, true}) {
    if (narrow && (!plain_mode || kernels.narrow_info.queries == 0)) break;
    const ForwardInfo& tile =
        narrow ? kernels.narrow_info : kernels.forward_info[static_cast<int>(mode)];
    const int64_t key_tiles = CeilDiv(longest, tile.keys);
    for (int pack = 0; pack <= (plain_mode ? kMaxPack : 0); ++pack) {
      if (p.group() % (1 << pack) != 0) break;
      const Load load = LoadOf(p, kernels, tile, pack, narrow ? kernels.narrow_slower : 1);
      const auto consider = [&](int64_t splits) {
        const int64_t split_tiles = CeilDiv(key_tiles, splits);
        const Tiling tiling{.narrow = narrow,
                            .pack = pack,
                            .splits = static_cast<int>(CeilDiv(key_tiles, split_tiles)),
                            .split_tiles = static_cast<int>(split_tiles)};
        const bool plain = !narrow && pack == 0 && splits == 1;
        const double us = EstimateUs(p, load, tiling, multiprocessors) / (plain ? 1.0 : kGain);
        if (!plain && us >= least_us) return;
        least_us = us;
        best = tiling;
      };
      if (key_tiles == 0 || load.tiles == 0) return best;
      consider(1);
      // As many splits as so many turns of all multiprocessors have room for.
      const int64_t most = std::min<int64_t>(longest / kMinSplitKeys, kMaxSplits);
      for (int64_t turns = 1, before = 1; turns <= kMaxSplitTurns; ++turns) {
        const int64_t splits = std::min(turns * multiprocessors / load.tiles, most);
        if (splits > before) consider(splits);
        before = std::max(before, splits);
      }
    }
  }
  return best;
}

}  // namespace attn::cuda::sm90
