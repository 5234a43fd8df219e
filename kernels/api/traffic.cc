#include "kernels/api/traffic.h"

#include <limits>

namespace attn {
namespace {

// Counts saturate: a problem that is only planned may be of any size that Validate() takes, and
// pairs times heads can pass 2^64.
using Wide = unsigned __int128;

uint64_t Saturate(Wide value) {
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  return value > kMax ? kMax : static_cast<uint64_t>(value);
}

Wide SaturatingMul(Wide a, uint64_t b) { return Wide{Saturate(a)} * b; }

// Σ over t in [0, n) of clamp(a + t, 0, width), in closed form.
Wide ClampedRamp(int64_t a, int64_t n, int64_t width) {
  const int64_t ramp_begin = std::clamp<int64_t>(-a, 0, n);  // first t with a + t >= 0
  const int64_t ramp_end =
      std::clamp<int64_t>(width - a, ramp_begin, n);  // first with a + t >= width
  const Wide count = static_cast<Wide>(ramp_end - ramp_begin);
  Wide sum = static_cast<Wide>(n - ramp_end) * static_cast<Wide>(width);
  if (count > 0) {
    const int64_t first = a + ramp_begin;
    const int64_t last = a + ramp_end - 1;
    sum += (static_cast<Wide>(first) + static_cast<Wide>(last)) * count / 2;
  }
  return sum;
}

// Visible pairs of one sequence by lengths, causal and window, within rows [row_begin, row_end) and
// keys [key_begin, key_end).
Wide PairsInRectangle(const AttentionProblem& p, const Sequence& s, int64_t row_begin,
                      int64_t row_end, int64_t key_begin, int64_t key_end) {
  row_end = std::min(row_end, s.len_q);
  key_end = std::min(key_end, s.len_k);
  if (row_begin >= row_end || key_begin >= key_end) return 0;
  const int64_t rows = row_end - row_begin;
  const int64_t width = key_end - key_begin;
  // Row i sees keys up to i + off + window_right, less those before i + off - window_left. For row
  // row_begin + t each is a ramp in t, clamped to the rectangle.
  const int64_t position = row_begin + s.off - key_begin;
  const Wide upto = ClampedRamp(position + p.window_right + 1, rows, width);
  const Wide before = ClampedRamp(position - p.window_left, rows, width);
  return upto - before;
}

// Visible pairs of one sequence under one [rows, cols] block mask.
Wide PairsUnderMask(const AttentionProblem& p, const Sequence& s, const uint8_t* mask) {
  const BlockMaskOption& m = *p.block_mask;
  Wide pairs = 0;
  for (int64_t row = 0; row < m.rows && row * m.block_q < s.len_q; ++row) {
    const uint8_t* blocks = mask + row * m.cols;
    const int64_t row_begin = row * m.block_q;
    const int64_t row_end = row_begin + std::min(m.block_q, s.len_q - row_begin);
    const int64_t cols = std::min(m.cols, (s.len_k - 1) / m.block_k + 1);
    for (int64_t col = 0; col < cols;) {
      if (blocks[col] == 0) {
        ++col;
        continue;
      }
      int64_t end = col + 1;  // a run of visible blocks is one rectangle
      while (end < cols && blocks[end] != 0) ++end;
      const int64_t key_end = end == cols ? s.len_k : end * m.block_k;
      pairs += PairsInRectangle(p, s, row_begin, row_end, col * m.block_k, key_end);
      col = end;
    }
  }
  return pairs;
}

// Visible pairs of sequence b, all query heads.
Wide PairsOfSequence(const AttentionProblem& p, int64_t b) {
  const Sequence& s = p.sequences[b];
  if (s.len_q == 0 || s.len_k == 0) return 0;
  if (!p.block_mask || p.block_mask->data == nullptr) {
    return SaturatingMul(PairsInRectangle(p, s, 0, s.len_q, 0, s.len_k), p.num_heads);
  }
  const BlockMaskOption& m = *p.block_mask;
  const int64_t mask_batch = m.batch == 1 ? 0 : b;
  Wide pairs = 0;
  for (int64_t h = 0; h < m.heads; ++h) {
    pairs += PairsUnderMask(p, s, m.data + (mask_batch * m.heads + h) * m.rows * m.cols);
  }
  return SaturatingMul(pairs, m.heads == 1 ? p.num_heads : 1);
}

bool SameLengths(const Sequence& a, const Sequence& b) {
  return a.len_q == b.len_q && a.len_k == b.len_k && a.off == b.off;
}

struct ValidTokens {
  uint64_t q = 0;
  uint64_t k = 0;
};
ValidTokens CountValidTokens(const AttentionProblem& p) {
  ValidTokens tokens;
  for (const Sequence& s : p.sequences) {
    tokens.q += static_cast<uint64_t>(s.len_q);
    tokens.k += static_cast<uint64_t>(s.len_k);
  }
  return tokens;
}

}  // namespace

uint64_t VisiblePairs(const AttentionProblem& p) {
  const bool mask_per_sequence = p.block_mask && p.block_mask->batch != 1;
  Wide total = 0;
  Wide pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    // Sequences of the same lengths under the same mask are counted once.
    if (b == 0 || mask_per_sequence || !SameLengths(p.sequences[b], p.sequences[b - 1])) {
      pairs = PairsOfSequence(p, b);
    }
    total = Saturate(total + pairs);
  }
  return Saturate(total);
}

uint64_t Flops(const AttentionProblem& p, Pass pass) {
  const int64_t per_pair = pass == Pass::kForward ? 2 * (p.head_dim + p.head_dim_v)
                                                  : 2 * (3 * p.head_dim + 2 * p.head_dim_v);
  return Saturate(Wide{VisiblePairs(p)} * static_cast<uint64_t>(per_pair));
}

uint64_t CompulsoryBytes(const AttentionProblem& p, Pass pass) {
  const ValidTokens tokens = CountValidTokens(p);
  const Wide q_rows = Wide{tokens.q} * static_cast<uint64_t>(p.num_heads);
  const Wide k_rows = Wide{tokens.k} * static_cast<uint64_t>(p.num_kv_heads);
  const auto dims = static_cast<uint64_t>(p.head_dim);
  const auto dims_v = static_cast<uint64_t>(p.head_dim_v);
  const auto size = static_cast<uint64_t>(SizeOf(p.dtype));
  const auto out_size = static_cast<uint64_t>(SizeOf(p.out_dtype));
  constexpr uint64_t kFloat = sizeof(float);

  Wide bytes = q_rows * dims * size + k_rows * (dims + dims_v) * size;  // q, k, v
  if (p.alibi) bytes += Wide{uint64_t(p.alibi->batch)} * uint64_t(p.num_heads) * kFloat;
  if (p.has_sinks) bytes += uint64_t(p.num_heads) * kFloat;
  if (p.bias) bytes += Wide{uint64_t(DbiasElements(p))} * uint64_t(SizeOf(p.bias->dtype));
  if (p.block_mask) {
    const BlockMaskOption& m = *p.block_mask;
    bytes += uint64_t(m.batch * m.heads * m.rows * m.cols);
  }
  if (pass == Pass::kForward) {
    bytes += Wide{uint64_t(OutElements(p))} * out_size + Wide{uint64_t(LseElements(p))} * kFloat;
    return Saturate(bytes);
  }
  bytes += q_rows * dims_v * uint64_t(SizeOf(p.bwd_out_dtype) + SizeOf(p.bwd_dout_dtype));
  bytes += q_rows * kFloat * (p.has_dlse ? 2 : 1);  // lse, dlse
  bytes += (Wide{uint64_t(DqElements(p))} + uint64_t(DkElements(p)) + uint64_t(DvElements(p))) *
           out_size;
  bytes += Wide{uint64_t(DbiasElements(p))} * kFloat;
  if (p.has_sinks) bytes += uint64_t(p.num_heads) * kFloat;
  return Saturate(bytes);
}

uint64_t StandardBytes(const AttentionProblem& p, Pass pass, int64_t score_bytes) {
  const uint64_t passes = pass == Pass::kForward ? 4 : 7;
  const uint64_t per_entry =
      passes * static_cast<uint64_t>(p.num_heads) * static_cast<uint64_t>(score_bytes);
  Wide total = CompulsoryBytes(p, pass);
  for (const Sequence& s : p.sequences) {
    const Wide entries = static_cast<Wide>(s.len_q) * static_cast<Wide>(s.len_k);
    total = Saturate(total + SaturatingMul(entries, per_entry));
  }
  return Saturate(total);
}

double StandardElementsPerHead(int64_t n, int64_t m, int64_t d) {
  const double nm = static_cast<double>(n) * static_cast<double>(m);
  return 2 * nm + 2 * (static_cast<double>(n) + static_cast<double>(m)) * static_cast<double>(d);
}

double FlashElementsPerHead(int64_t n, int64_t m, int64_t d, int64_t on_chip_elements) {
  const double nm = static_cast<double>(n) * static_cast<double>(m);
  const double dd = static_cast<double>(d);
  const double linear = 2 * (static_cast<double>(n) + static_cast<double>(m)) * dd;
  if (on_chip_elements <= 0) return linear;
  return linear + 2 * nm * dd * dd / static_cast<double>(on_chip_elements);
}

}  // namespace attn
