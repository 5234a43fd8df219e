#include "kernels/cuda/common/plan.h"

#include "kernels/api/text.h"
#include "kernels/cuda/common/merge.h"

namespace attn::cuda {

std::string TileName(const AttentionProblem& p, int head_dim, int head_dim_v) {
  std::string name = Cat(LowerName(p.dtype), "_d", head_dim);
  if (head_dim_v != head_dim) name += Cat("x", head_dim_v);
  if (p.window_left < kUnlimited) {
    name += "_window";
  } else if (p.window_right < kUnlimited) {
    name += "_causal";
  }
  return name;
}

SplitWorkspace PlanSplitWorkspace(const AttentionProblem& p, int splits) {
  SplitWorkspace w;
  if (splits == 1) return w;
  const int64_t rows = p.num_heads * p.total_q * splits;
  w.partial_lse = AlignRegion(rows * p.head_dim_v * 4);
  w.bytes = w.partial_lse + AlignRegion(rows * 4);
  return w;
}

TileModel ForwardTraffic(const AttentionProblem& p, const ForwardLoops& loops) {
  const int64_t q_row = p.head_dim * SizeOf(p.dtype);
  const int64_t kv_row = (p.head_dim + p.head_dim_v) * SizeOf(p.dtype);
  const int64_t out_row = p.head_dim_v * SizeOf(p.out_dtype);
  return SumOver(p, [&](int64_t b, int64_t h) {
    int64_t loaded = 0, before = 0;
    const int64_t rows = p.sequences[b].rows_q;
    if (loops.end_multiple > 0) {
      const int64_t end = CeilDiv(rows, loops.end_multiple) * loops.end_multiple;
      before = CeilDiv(end, loops.tile_q) * loops.tile_q - end;
    }
    ForQueryTiles(p, b, h, loops.tile_q, loops.tile_k, before,
                  [&](int64_t rows, int64_t keys, int64_t) {
                    // Each split loads the queries again; one that sees no key loads none.
                    loaded += rows * q_row * loops.splits;
                    if (h % loops.heads_per_read == 0) loaded += keys * kv_row * loops.key_reads;
                    if (p.bias) loaded += rows * keys * SizeOf(p.bias->dtype);
                  });
    int64_t stored = rows * (out_row + 4);
    if (loops.splits > 1) {
      const int64_t partial = rows * loops.splits * (p.head_dim_v + 1) * 4;
      stored += partial;
      loaded += partial;
    }
    return TileModel{.loaded_bytes = static_cast<uint64_t>(loaded),
                     .stored_bytes = static_cast<uint64_t>(stored)};
  });
}

}  // namespace attn::cuda
