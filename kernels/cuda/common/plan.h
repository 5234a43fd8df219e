// What planning a call has in common on every tiled CUDA path: how keys are split, how a kernel is
// called, and the traffic of loops over tiles. Pure.
#ifndef ATTN_KERNELS_CUDA_COMMON_PLAN_H_
#define ATTN_KERNELS_CUDA_COMMON_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/api/backend.h"
#include "kernels/api/problem.h"

namespace attn::cuda {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Where the next region of a workspace starts.
inline int64_t AlignRegion(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }
template <class T>
T* RegionAt(std::byte* workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

// "bf16_d128_causal": element type, head dims of the tile, and what limits the keys.
std::string TileName(const AttentionProblem& p, int head_dim, int head_dim_v);

// The loop nest of a forward kernel: a thread block has tile_q queries and walks over tiles of
// tile_k keys.
struct ForwardLoops {
  int64_t tile_q = 0, tile_k = 0;
  int splits = 1;
  // Tiles of queries end with the last row stored, rounded up to this; 0: they begin with the
  // first.
  int64_t end_multiple = 0;
  // Where rows of a thread block are those of several query heads: how many share one reading of
  // the keys, and how often those are read.
  int64_t heads_per_read = 1, key_reads = 1;
};
// loaded_bytes and stored_bytes of it, those of the merge included: L2 to multiprocessor traffic.
TileModel ForwardTraffic(const AttentionProblem& p, const ForwardLoops& loops);

// Calls body(rows, keys, tiles) for each tile of `tile_q` queries of (b, h): its valid rows, the
// keys of the key tiles it visits, and the number of those. `before`: rows of the first tile that
// stand before the first query.
template <class Body>
void ForQueryTiles(const AttentionProblem& p, int64_t b, int64_t h, int64_t tile_q, int64_t tile_k,
                   int64_t before, const Body& body) {
  const Sequence& s = p.sequences[b];
  const bool masked = p.block_mask && p.block_mask->data != nullptr;
  for (int64_t start = -before; start < s.len_q; start += tile_q) {
    const int64_t q0 = std::max<int64_t>(0, start);
    const int64_t q_last = std::min(start + tile_q, s.len_q) - 1;
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

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_PLAN_H_
