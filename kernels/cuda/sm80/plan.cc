#include "kernels/cuda/sm80/plan.h"

#include <algorithm>

#include "kernels/cuda/sm80/tiles.h"

namespace attn::cuda::sm80 {
namespace {

int64_t Align(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

template <DType kType>
const Kernels& KernelsForDims(int64_t d, int64_t dv) {
  if (d <= 64 && dv <= 64) return KernelsOf<kType, 64, 64>();
  if (d <= 96 && dv <= 96) return KernelsOf<kType, 96, 96>();
  if (d <= 128 && dv <= 128) return KernelsOf<kType, 128, 128>();
  if (d <= 192 && dv <= 128) return KernelsOf<kType, 192, 128>();
  return KernelsOf<kType, 256, 256>();
}

// Element sizes and row bytes of a call.
struct Bytes {
  int64_t q_row, v_row, k_row, out_row, grad;
  explicit Bytes(const AttentionProblem& p)
      : q_row(p.head_dim * SizeOf(p.dtype)),
        v_row(p.head_dim_v * SizeOf(p.dtype)),
        k_row(p.head_dim * SizeOf(p.dtype)),
        out_row(p.head_dim_v * SizeOf(p.out_dtype)),
        grad(SizeOf(p.out_dtype)) {}
};

// Calls body(rows, keys, tiles) for each tile of `tile_q` queries of (b, h): its valid rows, the
// keys of the key tiles it visits, and the number of those.
template <class Body>
void ForQueryTiles(const AttentionProblem& p, int64_t b, int64_t h, int64_t tile_q, int64_t tile_k,
                   const Body& body) {
  const Sequence& s = p.sequences[b];
  const bool masked = p.block_mask && p.block_mask->data != nullptr;
  for (int64_t q0 = 0; q0 < s.len_q; q0 += tile_q) {
    const int64_t q_last = std::min(q0 + tile_q, s.len_q) - 1;
    const int64_t begin = std::max<int64_t>(0, q0 + s.off - p.window_left) / tile_k;
    const int64_t end = std::min(s.len_k, q_last + s.off + p.window_right + 1);
    int64_t keys = 0, tiles = 0;
    for (int64_t n = begin; n * tile_k < end; ++n) {
      const int64_t first = n * tile_k, last = std::min(first + tile_k, s.len_k) - 1;
      bool shown = !masked;
      for (int64_t i = q0; masked && !shown && i <= q_last; i += p.block_mask->block_q) {
        for (int64_t j = first; !shown && j <= last; j += p.block_mask->block_k) {
          shown = p.BlockVisible(b, h, i, j);
        }
        if (!shown) shown = p.BlockVisible(b, h, i, last);
      }
      if (!shown && masked) shown = p.BlockVisible(b, h, q_last, last);
      if (!shown) continue;
      keys += last - first + 1;
      ++tiles;
    }
    body(q_last - q0 + 1, keys, tiles);
  }
}

// Sum of cost(b, h) over all sequences and heads; once per run of alike sequences and for one kv
// head where heads are alike too.
template <class Cost>
TileModel SumOver(const AttentionProblem& p, const Cost& cost) {
  TileModel sum, last;
  const bool masked = p.block_mask && p.block_mask->data != nullptr;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    const Sequence& before = p.sequences[std::max<int64_t>(b - 1, 0)];
    const bool same = !masked && b > 0 && s.rows_q == before.rows_q && s.rows_k == before.rows_k &&
                      s.len_q == before.len_q && s.len_k == before.len_k && s.off == before.off;
    if (!same) {
      last = TileModel();
      for (int64_t h = 0; h < (masked ? p.num_heads : p.group()); ++h) {
        const TileModel one = cost(b, h);
        last.loaded_bytes += one.loaded_bytes;
        last.stored_bytes += one.stored_bytes;
      }
    }
    const uint64_t times = masked ? 1 : static_cast<uint64_t>(p.num_kv_heads);
    sum.loaded_bytes += last.loaded_bytes * times;
    sum.stored_bytes += last.stored_bytes * times;
  }
  return sum;
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
  int64_t work = 0, longest = 0;
  for (const Sequence& s : p.sequences) {
    work += CeilDiv(s.rows_q * rows_per_query, plan.tile_q) * heads;
    longest = std::max(longest, s.len_k);
  }
  const int64_t key_tiles = CeilDiv(longest, plan.tile_k);
  plan.split_tiles = static_cast<int>(key_tiles);
  // A split of fewer tiles spends its time on the prologue and the merge.
  constexpr int64_t min_tiles = 4;
  const int64_t enough = plan.decode
                             ? int64_t{device.multiprocessors} * tile.decode_busy_blocks * 9 / 10
                             : slots * 4 / 5;
  if (work == 0 || work >= enough || key_tiles < 2 * min_tiles) return plan;
  const int64_t wanted =
      std::min({slots / work, key_tiles / min_tiles, static_cast<int64_t>(kMaxSplits)});
  if (wanted < 2) return plan;
  // Decode's four warps take turns: whole turns for each split.
  const int64_t turn = plan.decode ? 4 : 1;
  plan.split_tiles = static_cast<int>(CeilDiv(CeilDiv(key_tiles, wanted), turn) * turn);
  plan.splits = static_cast<int>(CeilDiv(key_tiles, plan.split_tiles));
  return plan;
}

ForwardWorkspace PlanForwardWorkspace(const AttentionProblem& p, const ForwardPlan& plan) {
  ForwardWorkspace w;
  if (plan.splits == 1) return w;
  const int64_t rows = p.num_heads * p.total_q * plan.splits;
  w.partial_lse = Align(rows * p.head_dim_v * 4);
  w.bytes = w.partial_lse + Align(rows * 4);
  return w;
}

BackwardWorkspace PlanBackwardWorkspace(const AttentionProblem& p, const TileInfo& tile) {
  const int64_t rows = p.num_heads * PaddedRows(p);
  BackwardWorkspace w;
  w.delta = Align(rows * 4);
  w.dq_accumulator = w.delta + Align(rows * 4);
  w.bytes = w.dq_accumulator + (p.deterministic ? 0 : Align(rows * tile.head_dim * 4));
  return w;
}

TileModel ModelForward(const AttentionProblem& p, const TileInfo& tile, const ForwardPlan& plan) {
  const Bytes bytes(p);
  // Decode's rows are a group's: keys are read once for all of it, by each row tile.
  const int64_t heads_per_read = plan.decode ? p.group() : 1;
  TileModel model = SumOver(p, [&](int64_t b, int64_t h) {
    int64_t loaded = 0;
    ForQueryTiles(p, b, h, plan.decode ? tile.forward[0].queries : plan.tile_q, plan.tile_k,
                  [&](int64_t rows, int64_t keys, int64_t) {
                    // Each split loads the queries again; one that sees no key loads none.
                    loaded += rows * bytes.q_row * plan.splits;
                    if (h % heads_per_read == 0) {
                      loaded += keys * (bytes.k_row + bytes.v_row) * (plan.decode ? plan.tiles : 1);
                    }
                    if (p.bias) loaded += rows * keys * SizeOf(p.bias->dtype);
                  });
    const int64_t rows = p.sequences[b].rows_q;
    int64_t stored = rows * (bytes.out_row + 4);
    if (plan.splits > 1) {
      const int64_t partial = rows * plan.splits * (p.head_dim_v + 1) * 4;
      stored += partial;
      loaded += partial;
    }
    return TileModel{.loaded_bytes = static_cast<uint64_t>(loaded),
                     .stored_bytes = static_cast<uint64_t>(stored)};
  });
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
        p, b, h, kernels.queries, kernels.keys, [&](int64_t rows, int64_t keys, int64_t tiles) {
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
    if (p.bias) {  // row_dot
      ForQueryTiles(p, b, h, tile.gradient_queries, 64, [&](int64_t rows, int64_t keys, int64_t) {
        loaded += rows * (bytes.q_row + bytes.v_row + 8) + keys * (bytes.k_row + bytes.v_row) +
                  rows * keys * SizeOf(p.bias->dtype);
      });
      stored += s.len_q * 4;
    }
    if (p.deterministic) {
      ForQueryTiles(p, b, h, tile.gradient_queries, 64, [&](int64_t rows, int64_t keys, int64_t) {
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
