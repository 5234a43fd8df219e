#include "kernels/cuda/sm80/plan.h"

#include <algorithm>

#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/sm80/tiles.h"

namespace attn::cuda::sm80 {
namespace {

template <DType kType>
const Kernels& KernelsForDims(int64_t d, int64_t dv) {
  if (d <= 64 && dv <= 64) return KernelsOf<kType, 64, 64>();
  if (d <= 96 && dv <= 96) return KernelsOf<kType, 96, 96>();
  if (d <= 128 && dv <= 128) return KernelsOf<kType, 128, 128>();
  if (d <= 192 && dv <= 128) return KernelsOf<kType, 192, 128>();
  return KernelsOf<kType, 256, 256>();
}

// Row bytes of a call, and the size of an element of its gradients.
struct Bytes {
  int64_t q_row, v_row, k_row, grad;
  explicit Bytes(const AttentionProblem& p)
      : q_row(p.head_dim * SizeOf(p.dtype)),
        v_row(p.head_dim_v * SizeOf(p.dtype)),
        k_row(p.head_dim * SizeOf(p.dtype)),
        grad(SizeOf(p.out_dtype)) {}
};

// Few rows leave multiprocessors idle: then each walks over a part of the keys, and the parts are
// merged (merge.h). `work`: query tiles of all heads and sequences. `slots`: thread blocks that the
// device runs at a time. `enough`: work that needs no splitting. A split has a multiple of `turn`
// key tiles.
void SplitKeys(const AttentionProblem& p, int64_t work, int64_t slots, int64_t enough, int64_t turn,
               ForwardPlan* plan) {
  // A split of fewer tiles spends its time on the prologue and the merge.
  constexpr int64_t kMinTiles = 4;
  int64_t longest = 0;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.len_k);
  const int64_t key_tiles = CeilDiv(longest, plan->tile_k);
  plan->splits = 1;
  plan->split_tiles = static_cast<int>(key_tiles);
  if (work == 0 || work >= enough || key_tiles < 2 * kMinTiles) return;
  const int64_t wanted =
      std::min({slots / work, key_tiles / kMinTiles, static_cast<int64_t>(kMaxSplits)});
  if (wanted < 2) return;
  plan->split_tiles = static_cast<int>(CeilDiv(CeilDiv(key_tiles, wanted), turn) * turn);
  plan->splits = static_cast<int>(CeilDiv(key_tiles, plan->split_tiles));
}

}  // namespace

const Kernels& KernelsFor(const AttentionProblem& p) {
  return p.dtype == DType::kBf16 ? KernelsForDims<DType::kBf16>(p.head_dim, p.head_dim_v)
                                 : KernelsForDims<DType::kFp16>(p.head_dim, p.head_dim_v);
}

const BackwardKernels& BackwardFor(const Kernels& kernels, const DeviceProperties& device) {
  const bool compact = kernels.wide.shared_bytes > device.shared_bytes &&
                       kernels.compact.shared_bytes <= device.shared_bytes;
  return compact ? kernels.compact : kernels.wide;
}

Mode ModeOf(const AttentionProblem& p) {
  if (p.softcap > 0.0f || p.alibi || p.bias || !(p.softmax_scale > 0.0f)) return Mode::kOptions;
  return p.dropout ? Mode::kDropout : Mode::kPlain;
}

ForwardPlan PlanForward(const AttentionProblem& p, const TileInfo& tile,
                        const DeviceProperties& device) {
  // Up to here the packed rows of a group need no more tiles than the group has heads.
  constexpr int64_t kDecodeQueries = 16;
  ForwardPlan plan;
  plan.decode = p.seqlen_q <= kDecodeQueries && tile.decode_shared_bytes <= device.shared_bytes;
  int blocks_per_sm;
  if (plan.decode) {
    plan.tile_q = kDecodeRows;
    plan.tile_k = tile.decode_keys;
    blocks_per_sm = tile.decode_blocks_per_sm;
  } else {
    const ForwardInfo& forward = tile.forward[static_cast<int>(ModeOf(p))];
    plan.tile_q = forward.queries;
    plan.tile_k = forward.keys;
    blocks_per_sm = forward.blocks_per_sm;
  }
  const int64_t heads = plan.decode ? p.num_kv_heads : p.num_heads;
  const int64_t rows_per_query = plan.decode ? p.group() : 1;
  plan.tiles = static_cast<int>(CeilDiv(p.seqlen_q * rows_per_query, plan.tile_q));
  const int64_t slots = int64_t{device.multiprocessors} * blocks_per_sm;
  int64_t work = 0;
  for (const Sequence& s : p.sequences) {
    work += CeilDiv(s.rows_q * rows_per_query, plan.tile_q) * heads;
  }
  const int64_t enough = plan.decode
                             ? int64_t{device.multiprocessors} * tile.decode_busy_blocks * 9 / 10
                             : slots * 4 / 5;
  // Decode's four warps take turns: whole turns for each split.
  SplitKeys(p, work, slots, enough, plan.decode ? 4 : 1, &plan);
  // By clusters, which there are from 9.0 on. Splits of a head are read side by side anyway.
  plan.lockstep = plan.decode && plan.splits == 1 && plan.tiles == 1 && device.major >= 9 &&
                  p.num_kv_heads % kLockstepHeads == 0;
  return plan;
}

BackwardWorkspace PlanBackwardWorkspace(const AttentionProblem& p, const TileInfo& tile) {
  const int64_t rows = p.num_heads * PaddedRows(p);
  BackwardWorkspace w;
  w.delta = AlignRegion(rows * 4);
  w.dq_accumulator = w.delta + AlignRegion(rows * 4);
  w.bytes = w.dq_accumulator + (p.deterministic ? 0 : AlignRegion(rows * tile.head_dim * 4));
  return w;
}

TileModel ModelForward(const AttentionProblem& p, const TileInfo& tile, const ForwardPlan& plan) {
  // Decode's rows are a group's: keys are read once for all of it, by each row tile.
  TileModel model =
      ForwardTraffic(p, {.tile_q = plan.decode ? tile.forward[0].queries : plan.tile_q,
                         .tile_k = plan.tile_k,
                         .splits = plan.splits,
                         .heads_per_read = plan.decode ? p.group() : 1,
                         .key_reads = plan.decode ? plan.tiles : 1});
  model.tile_q = plan.tile_q;
  model.tile_k = plan.tile_k;
  model.on_chip_elements = model.tile_q * (tile.head_dim + tile.head_dim_v) +
                           model.tile_k * (tile.head_dim + tile.head_dim_v) +
                           model.tile_q * model.tile_k;
  return model;
}

TileModel ModelBackward(const AttentionProblem& p, const TileInfo& tile,
                        const BackwardKernels& kernels) {
  const Bytes bytes(p);
  const int64_t out_row = p.head_dim_v * SizeOf(p.bwd_out_dtype);
  const int64_t accumulator_row = int64_t{tile.head_dim} * 4;
  TileModel model = SumOver(p, [&](int64_t b, int64_t h) {
    const Sequence& s = p.sequences[b];
    const int64_t padded = CeilDiv(s.rows_q, kRowPadding) * kRowPadding;
    // Prepare: out, dout, lse (and dlse) in; lse2, delta and a zeroed accumulator out.
    int64_t loaded = s.len_q * (out_row + bytes.v_row + (p.has_dlse ? 8 : 4));
    int64_t stored = padded * 8;
    // Backward: q, dout, lse2 and delta once per pair of tiles; dq added to the accumulator.
    ForQueryTiles(
        p, b, h, kernels.queries, kernels.keys, 0, [&](int64_t rows, int64_t keys, int64_t tiles) {
          loaded += tiles * (rows * (bytes.q_row + bytes.v_row) + kernels.queries * int64_t{8});
          if (!p.deterministic) stored += tiles * kernels.queries * accumulator_row;
          if (p.bias) {
            loaded += rows * keys * (SizeOf(p.bias->dtype) + 4);
            stored += rows * keys * 4;
          }
        });
    // k, v, dk, dv once per kv head.
    if (h % p.group() == 0) {
      loaded += s.len_k * (bytes.k_row + bytes.v_row);
      stored += s.rows_k * (p.head_dim + p.head_dim_v) * bytes.grad;
    }
    if (SumsRowDot(p)) {
      const int64_t bias = p.bias ? SizeOf(p.bias->dtype) : 0;
      ForQueryTiles(p, b, h, tile.gradient_queries, 64, 0,
                    [&](int64_t rows, int64_t keys, int64_t) {
                      loaded += rows * (bytes.q_row + bytes.v_row + 8) +
                                keys * (bytes.k_row + bytes.v_row) + rows * keys * bias;
                    });
      stored += s.len_q * 4;
    }
    if (p.deterministic) {
      ForQueryTiles(
          p, b, h, tile.gradient_queries, 64, 0, [&](int64_t rows, int64_t keys, int64_t) {
            loaded += rows * (bytes.q_row + bytes.v_row + 8) + keys * (bytes.k_row + bytes.v_row);
          });
    } else {
      stored += padded * accumulator_row;  // zeroes
      loaded += CeilDiv(s.rows_q, kernels.queries) * kernels.queries * accumulator_row;
    }
    stored += s.rows_q * p.head_dim * bytes.grad;
    return TileModel{.loaded_bytes = static_cast<uint64_t>(loaded),
                     .stored_bytes = static_cast<uint64_t>(stored)};
  });
  model.tile_q = kernels.queries;
  model.tile_k = kernels.keys;
  model.on_chip_elements = (model.tile_q + 2 * model.tile_k) * (tile.head_dim + tile.head_dim_v) +
                           2 * model.tile_q * model.tile_k;
  return model;
}

}  // namespace attn::cuda::sm80
