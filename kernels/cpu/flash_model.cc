// The traffic of flash_cpu's loop nests, forward and backward, term by term as the workers move it.
#include <algorithm>

#include "kernels/cpu/flash_backward.h"
#include "kernels/cpu/flash_forward.h"

namespace attn {
namespace {

int64_t Length(const KeyRange& r) { return std::max<int64_t>(0, r.end - r.begin); }

KeyRange Intersect(const KeyRange& a, const KeyRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Calls body(range) for the tiles of keys that `keys` is worked on in.
template <class Body>
void ForKeyTiles(const AttentionProblem& p, const KeyRange& keys, const Body& body) {
  const int64_t step = KeyTileOf(p);
  for (int64_t base = keys.begin / step * step; base < keys.end; base += step) {
    body(Intersect({base, base + step}, keys));
  }
}

struct Sizes {
  int64_t d, dv;              // elements per row
  int64_t in, out, bias;      // bytes per element
  int64_t bwd_out, bwd_dout;  // the same, of backward's inputs
  explicit Sizes(const AttentionProblem& p)
      : d(p.head_dim),
        dv(p.head_dim_v),
        in(SizeOf(p.dtype)),
        out(SizeOf(p.out_dtype)),
        bias(p.bias ? SizeOf(p.bias->dtype) : 0),
        bwd_out(SizeOf(p.bwd_out_dtype)),
        bwd_dout(SizeOf(p.bwd_dout_dtype)) {}
};

struct Bytes {
  int64_t loaded = 0, stored = 0;
  Bytes& operator+=(const Bytes& other) {
    loaded += other.loaded;
    stored += other.stored;
    return *this;
  }
};

// Sums cost(batch, kv_head) over the call, computing it once per run of equally shaped sequences
// where it does not depend on contents.
template <class Cost>
Bytes SumOverHeads(const AttentionProblem& p, bool per_head, const Cost& cost) {
  Bytes total;
  Bytes last;
  const Sequence* previous = nullptr;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    if (per_head) {
      for (int64_t h = 0; h < p.num_kv_heads; ++h) total += cost(b, h);
      continue;
    }
    const bool same = previous != nullptr && previous->rows_q == s.rows_q &&
                      previous->rows_k == s.rows_k && previous->len_q == s.len_q &&
                      previous->len_k == s.len_k && previous->off == s.off;
    if (!same) last = cost(b, int64_t{0});
    previous = &s;
    total += {last.loaded * p.num_kv_heads, last.stored * p.num_kv_heads};
  }
  return total;
}

bool MaskMatters(const AttentionProblem& p) {
  return p.block_mask && p.block_mask->data != nullptr;
}

// Keys (k, v, bias) and block mask of one tile and split.
int64_t ForwardKeyBytes(const AttentionProblem& p, const Sizes& z, const ForwardTile& t,
                        const KeyRange& keys) {
  const Sequence& s = p.sequences[t.batch];
  int64_t loaded = 0;
  const auto bias_of = [&](int64_t panel, const KeyRange& range) {
    if (!p.bias) return int64_t{0};
    const int64_t rows = t.panel_rows(panel);
    const KeyRange seen = KeysOfRows(p, s, t.row + panel * kPanelRows, rows);
    return rows * Length(Intersect(seen, range)) * z.bias;
  };
  if (!MaskMatters(p)) {
    for (int64_t i = 0; p.bias && i < t.panels(); ++i) loaded += bias_of(i, keys);
    return loaded + Length(keys) * (z.d + z.dv) * z.in;
  }
  ForKeyTiles(p, keys, [&](const KeyRange& range) {
    bool shown = false;
    for (int64_t i = 0; i < t.panels(); ++i) {
      const int64_t row = t.row + i * kPanelRows, rows = t.panel_rows(i);
      loaded += BlockMaskBytes(p, row, rows);
      if (!BlockMaskShows(p, t.batch, t.kv_head, row, rows, range.begin)) continue;
      shown = true;
      loaded += bias_of(i, range);
    }
    if (shown) loaded += Length(range) * (z.d + z.dv) * z.in;
  });
  return loaded;
}

Bytes ForwardHeadBytes(const AttentionProblem& p, const ForwardPlan& plan, int64_t batch,
                       int64_t kv_head) {
  const Sizes z(p);
  const int64_t tiles = CeilDiv(p.sequences[batch].rows_q * p.group(), plan.tile_rows);
  Bytes bytes;
  for (int64_t index = 0; index < tiles; ++index) {
    const ForwardTile t = plan.TileOfHead(p, batch, kv_head, index);
    int64_t partial = 0;
    for (int64_t i = 0; plan.splits > 1 && i < t.panels(); ++i) {
      partial += 4 * (z.dv + 2) * RoundUp(t.panel_rows(i), kColumnStep);
    }
    for (int64_t split = 0; split < plan.splits; ++split) {
      bytes.loaded += t.valid * z.d * z.in + PanelInitBytes(p, t.valid) +
                      ForwardKeyBytes(p, z, t, plan.TileKeys(p, t, split)) + partial;
      bytes.stored += partial;
    }
    if (plan.splits > 1) bytes.loaded += PanelInitBytes(p, t.valid);
    if (p.has_sinks) bytes.loaded += 4 * t.valid;
    bytes.stored += t.rows * (z.dv * z.out + 4);
  }
  return bytes;
}

// Of the keys of `range`, those in tiles of which a panel sees something, and the bytes of block
// mask that telling it loads.
struct PanelKeys {
  int64_t seen = 0, mask_bytes = 0;
};
PanelKeys KeysOfPanel(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t row,
                      int64_t count, const KeyRange& range) {
  if (!MaskMatters(p)) return {.seen = Length(range)};
  PanelKeys keys;
  ForKeyTiles(p, range, [&](const KeyRange& tile) {
    keys.mask_bytes += BlockMaskBytes(p, row, count);
    if (BlockMaskShows(p, batch, kv_head, row, count, tile.begin)) keys.seen += Length(tile);
  });
  return keys;
}

// The panels of one span of keys.
Bytes BackwardSpanBytes(const AttentionProblem& p, const Sizes& z, int64_t batch, int64_t kv_head,
                        const KeyRange& span) {
  const Sequence& s = p.sequences[batch];
  const KeyRange rows = RowsThatSee(p, s, span.begin, span.end);
  const int64_t valid = s.len_q * p.group();
  const int64_t key_bytes = Length(span) * (z.d + z.dv) * z.in;
  const auto panel_bytes = [&](int64_t count) {
    // q, dout, lse, delta; the sum of dq.
    return Bytes{count * (z.d * z.in + z.dv * z.bwd_dout + 8 + 4 * z.d), count * 4 * z.d};
  };
  Bytes bytes;
  if (rows.begin >= rows.end) return bytes;
  if (!p.bias && !MaskMatters(p)) {
    const int64_t count = std::min(RoundUp(rows.end, kPanelRows), valid) - rows.begin;
    bytes += panel_bytes(count);
    bytes.loaded += key_bytes + PanelInitBytes(p, count);
    return bytes;
  }
  bool any = false;
  for (int64_t row = rows.begin; row < rows.end; row += kPanelRows) {
    const int64_t count = std::min(kPanelRows, valid - row);
    const PanelKeys keys =
        KeysOfPanel(p, batch, kv_head, row, count, Intersect(KeysOfRows(p, s, row, count), span));
    bytes.loaded += PanelInitBytes(p, count) + keys.mask_bytes;
    if (keys.seen == 0) continue;
    any = true;
    bytes += panel_bytes(count);
    if (p.bias) bytes += {count * keys.seen * (z.bias + 4), count * keys.seen * 4};
  }
  if (any) bytes.loaded += key_bytes;
  return bytes;
}

// The sums of row_dot from P and dP: q, dout, lse and delta of each panel, its keys, delta again.
Bytes RowDotBytes(const AttentionProblem& p, const Sizes& z, int64_t batch, int64_t kv_head) {
  const Sequence& s = p.sequences[batch];
  const int64_t valid = s.len_q * p.group();
  Bytes bytes;
  for (int64_t row = 0; row < valid; row += kPanelRows) {
    const int64_t count = std::min(kPanelRows, valid - row);
    const KeyRange keys = KeysOfRows(p, s, row, count);
    // Whole spans are loaded; where no mask leaves any out, as many as there are are one.
    const int64_t first = keys.begin / kKeySpan * kKeySpan;
    const int64_t end = std::min(RoundUp(keys.end, kKeySpan), s.len_k);
    const int64_t step = MaskMatters(p) ? kKeySpan : std::max<int64_t>(end - first, 1);
    bytes.loaded += PanelInitBytes(p, count);
    bool any = false;
    for (int64_t begin = first; begin < end; begin += step) {
      const KeyRange span = {begin, std::min(begin + step, end)};
      const PanelKeys seen = KeysOfPanel(p, batch, kv_head, row, count, Intersect(keys, span));
      bytes.loaded += seen.mask_bytes + count * seen.seen * z.bias;
      if (seen.seen == 0) continue;
      any = true;
      bytes.loaded += Length(span) * (z.d + z.dv) * z.in;
    }
    if (any) bytes += {count * (z.d * z.in + z.dv * z.bwd_dout + 8), count * 4};
  }
  return bytes;
}

Bytes BackwardHeadBytes(const AttentionProblem& p, const BackwardPlan& plan, bool dlse,
                        int64_t batch, int64_t kv_head) {
  const Sizes z(p);
  const Sequence& s = p.sequences[batch];
  const int64_t valid = s.len_q * p.group(), padding = (s.rows_q - s.len_q) * p.group();
  Bytes bytes;
  // Preparation.
  bytes.loaded += valid * (dlse ? 4 : 0);
  if (SumsRowDot(p)) {
    bytes += RowDotBytes(p, z, batch, kv_head);
  } else {
    bytes.loaded += valid * z.dv * (z.bwd_out + z.bwd_dout);
  }
  bytes.stored += valid * (plan.chunks * 4 * z.d + 4) + padding * z.d * z.out;
  for (int64_t begin = 0; begin < s.rows_k; begin += kKeySpan) {
    const KeyRange span = {begin, std::min({begin + kKeySpan, s.len_k})};
    if (span.begin < span.end) bytes += BackwardSpanBytes(p, z, batch, kv_head, span);
  }
  bytes.stored += s.rows_k * (z.d + z.dv) * z.out;
  if (plan.dq_copies() > 0) {
    bytes += {valid * plan.chunks * 4 * z.d, valid * z.d * z.out};
  }
  if (p.has_sinks) bytes.loaded += valid * 8;
  return bytes;
}

}  // namespace

TileModel ModelFlashForward(const AttentionProblem& p) {
  const ForwardPlan plan(p);
  const Bytes bytes = SumOverHeads(
      p, MaskMatters(p), [&](int64_t b, int64_t h) { return ForwardHeadBytes(p, plan, b, h); });
  TileModel model;
  model.tile_q = plan.tile_rows;
  model.tile_k = KeyTileOf(p);
  model.on_chip_elements =
      (plan.tile_rows + kKeyTile) * (p.head_dim + p.head_dim_v) + kKeyTile * kPanelRows;
  model.loaded_bytes = static_cast<uint64_t>(bytes.loaded);
  model.stored_bytes = static_cast<uint64_t>(bytes.stored);
  return model;
}

TileModel ModelFlashBackward(const AttentionProblem& p) {
  const BackwardPlan plan(p);
  Bytes bytes = SumOverHeads(p, MaskMatters(p), [&](int64_t b, int64_t h) {
    return BackwardHeadBytes(p, plan, p.has_dlse, b, h);
  });
  if (p.bias) bytes.stored += 4 * DbiasElements(p);
  if (p.has_sinks) bytes += {4 * p.num_heads, 4 * p.num_heads};
  TileModel model;
  model.tile_q = kPanelRows;
  model.tile_k = KeyTileOf(p);
  model.on_chip_elements = 2 * kKeySpan * (p.head_dim + p.head_dim_v) +
                           kPanelRows * (3 * p.head_dim + 2 * p.head_dim_v) +
                           2 * kKeyTile * kPanelRows;
  model.loaded_bytes = static_cast<uint64_t>(bytes.loaded);
  model.stored_bytes = static_cast<uint64_t>(bytes.stored);
  return model;
}

}  // namespace attn
