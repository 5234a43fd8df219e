#include "kernels/cpu/standard_plan.h"

#include <algorithm>
#include <limits>

namespace attn::standard {
namespace {

using Wide = __int128;

int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

int64_t Clamp(Wide value) {
  constexpr Wide kMax = std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::min(value, kMax));
}

Wide Align64(Wide bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of one pass over one (sequence, query head). All counts fit: lengths are at most 2^40.
struct Bytes {
  Wide loaded = 0;
  Wide stored = 0;
};

// S = Q K^T or dP = dO V^T: the right operand once, the left once for each key tile.
Bytes ScoreProduct(int64_t n, int64_t m, int64_t dim, int64_t left_size, int64_t right_size) {
  if (n == 0 || m == 0) return {};
  const Wide left = Wide{n} * dim * left_size * CeilDiv(m, kSumTile);
  return {left + Wide{m} * dim * right_size, Wide{n} * m * 4};
}

// out, dq, dk or dv: the score matrix once, the right operand once for each block of output rows.
// rows: output rows; terms: rows of the right operand.
Bytes OutProduct(int64_t rows, int64_t terms, int64_t dim, int64_t right_size, int64_t out_size) {
  const Wide right = Wide{terms} * dim * right_size * CeilDiv(rows, kOutTile);
  return {Wide{rows} * terms * 4 + right, Wide{rows} * dim * out_size};
}

int64_t MaskCols(const AttentionProblem& p, const Sequence& s) {
  return p.block_mask ? CeilDiv(s.len_k, p.block_mask->block_k) : 0;
}

// Options read with each row of scores, and once for each head.
Wide RowOptionBytes(const AttentionProblem& p, const Sequence& s) {
  const Wide per_row = (p.bias ? Wide{s.len_k} * SizeOf(p.bias->dtype) : 0) + MaskCols(p, s);
  return per_row * s.len_q + (p.alibi ? 4 : 0) + (p.has_sinks ? 4 : 0);
}

Bytes ForwardHead(const AttentionProblem& p, const Sequence& s) {
  const int64_t n = s.len_q;
  const int64_t m = s.len_k;
  const int64_t size = SizeOf(p.dtype);
  const int64_t out_size = SizeOf(p.out_dtype);
  const Bytes scores = ScoreProduct(n, m, p.head_dim, size, size);
  const Bytes out = OutProduct(n, m, p.head_dim_v, size, out_size);
  const Wide matrix = Wide{n} * m * 4;
  Bytes total;
  total.loaded = scores.loaded + matrix + RowOptionBytes(p, s) + out.loaded;
  total.stored = scores.stored + matrix + out.stored + Wide{s.rows_q} * 4;
  total.stored += Wide{s.rows_q - n} * p.head_dim_v * out_size;
  return total;
}

Bytes BackwardHead(const AttentionProblem& p, const Sequence& s) {
  const int64_t n = s.len_q;
  const int64_t m = s.len_k;
  const int64_t size = SizeOf(p.dtype);
  const int64_t dout_size = SizeOf(p.bwd_dout_dtype);
  const int64_t out_size = SizeOf(p.out_dtype);
  const bool grouped = p.group() > 1;
  const int64_t kv_size = grouped ? 4 : out_size;
  const Wide matrix = Wide{n} * m * 4;
  Bytes total;
  auto add = [&](const Bytes& b) {
    total.loaded += b.loaded;
    total.stored += b.stored;
  };
  add(ScoreProduct(n, m, p.head_dim, size, size));
  add(ScoreProduct(n, m, p.head_dim_v, dout_size, size));
  // The row pass: S and dP in, P and dS out; out and dout, if row_dot is made of them, lse and dlse
  // of each row.
  const Wide row_dot =
      SumsRowDot(p) ? 0 : Wide{p.head_dim_v} * (SizeOf(p.bwd_out_dtype) + dout_size);
  const Wide row = row_dot + 4 + (p.has_dlse ? 4 : 0);
  add({2 * matrix + Wide{n} * row + RowOptionBytes(p, s), 2 * matrix});
  if (p.bias) {
    if (!DbiasIsShared(p)) {
      total.stored += Wide{n} * p.bias->cols * 4;
    } else {
      const Wide kept = ScoreMatrices(p, Pass::kBackward) == 3 ? matrix : 0;
      add({2 * matrix, kept + matrix});
    }
  }
  add(OutProduct(m, n, p.head_dim_v, dout_size, kv_size));
  add(OutProduct(m, n, p.head_dim, size, kv_size));
  add(OutProduct(n, m, p.head_dim, size, out_size));
  total.stored += Wide{s.rows_q - n} * p.head_dim * out_size;
  if (p.has_sinks) add({8, 8});
  return total;
}

// What does not belong to one query head: per kv head the sum over its group, and padding.
Bytes BackwardKvHead(const AttentionProblem& p, const Sequence& s) {
  const Wide dims = p.head_dim + p.head_dim_v;
  const int64_t out_size = SizeOf(p.out_dtype);
  const int64_t padding = s.rows_k - s.len_k;
  if (p.group() == 1) return {0, padding * dims * out_size};
  return {Wide{p.group()} * s.len_k * dims * 4, s.rows_k * dims * out_size};
}

bool SameLengths(const Sequence& a, const Sequence& b) {
  return a.len_q == b.len_q && a.len_k == b.len_k && a.rows_q == b.rows_q && a.rows_k == b.rows_k;
}

}  // namespace

int64_t ScoreStride(int64_t len_k) { return (len_k + 15) / 16 * 16 + 16; }

bool DbiasIsShared(const AttentionProblem& p) {
  if (!p.bias) return false;
  const bool all_batches = p.layout == Layout::kThd || p.bias->batch == p.batch;
  return !all_batches || p.bias->heads != p.num_heads;
}

int64_t ScoreMatrices(const AttentionProblem& p, Pass pass) {
  if (pass == Pass::kForward) return 1;
  return DbiasIsShared(p) && p.softcap > 0 ? 3 : 2;
}

Workspace::Workspace(const AttentionProblem& p, Pass pass, int num_slots) : num_slots_(num_slots) {
  Wide matrix = 0;
  for (const Sequence& s : p.sequences) {
    matrix = std::max(matrix, Wide{s.len_q} * ScoreStride(s.len_k) * 4);
  }
  const Wide dim = std::max(p.head_dim, p.head_dim_v);
  matrices_ = ScoreMatrices(p, pass);
  matrix_bytes_ = Clamp(Align64(matrix));
  row_bytes_ = Clamp(Align64(Wide{p.seqlen_k} * 4));
  tile_bytes_ = Clamp(Align64(dim * kSumTile * 4));
  accumulator_bytes_ = Clamp(Align64(dim * kOutTile * 4));
  const Wide slot =
      Wide{matrices_} * matrix_bytes_ + Wide{3} * row_bytes_ + 3 * tile_bytes_ + accumulator_bytes_;
  slot_bytes_ = Clamp(slot);
  Wide at = slot * num_slots;
  dk_parts_at_ = Clamp(at);
  const bool parts = pass == Pass::kBackward && p.group() > 1;
  if (parts) at += Align64(Wide{p.total_k} * p.num_heads * p.head_dim * 4);
  dv_parts_at_ = Clamp(at);
  if (parts) at += Align64(Wide{p.total_k} * p.num_heads * p.head_dim_v * 4);
  dsink_parts_at_ = Clamp(at);
  if (pass == Pass::kBackward && p.has_sinks) at += Align64(Wide{p.batch} * p.num_heads * 8);
  bytes_ = Clamp(at);
}

Slot Workspace::GetSlot(std::span<std::byte> memory, int slot) const {
  std::byte* at = memory.data() + slot * slot_bytes_;
  auto take = [&at](int64_t bytes) {
    auto* part = reinterpret_cast<float*>(at);
    at += bytes;
    return part;
  };
  Slot result = {};
  for (int64_t i = 0; i < matrices_; ++i) result.scores[i] = take(matrix_bytes_);
  result.bias_row = take(row_bytes_);
  result.keep_row = take(row_bytes_);
  result.cap_row = take(row_bytes_);
  result.left = take(tile_bytes_);
  result.right = take(tile_bytes_);
  result.transposed = take(tile_bytes_);
  result.accumulator = take(accumulator_bytes_);
  return result;
}

float* Workspace::DkParts(std::span<std::byte> memory) const {
  return reinterpret_cast<float*>(memory.data() + dk_parts_at_);
}
float* Workspace::DvParts(std::span<std::byte> memory) const {
  return reinterpret_cast<float*>(memory.data() + dv_parts_at_);
}
double* Workspace::DsinkParts(std::span<std::byte> memory) const {
  return reinterpret_cast<double*>(memory.data() + dsink_parts_at_);
}

int NumSlots(const AttentionProblem& p, int num_workers) {
  return static_cast<int>(std::clamp<int64_t>(p.batch * p.num_heads, 1, num_workers));
}

TileModel Model(const AttentionProblem& p, Pass pass) {
  constexpr Wide kMax = std::numeric_limits<uint64_t>::max();
  TileModel model;
  model.tile_q = kRowTile;
  model.tile_k = kSumTile;
  model.on_chip_elements = (kRowTile + kSumTile) * p.head_dim + kRowTile * kSumTile;
  Bytes total;
  Bytes sequence;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    if (b == 0 || !SameLengths(s, p.sequences[b - 1])) {
      const Bytes head = pass == Pass::kForward ? ForwardHead(p, s) : BackwardHead(p, s);
      const Bytes kv = pass == Pass::kForward ? Bytes{} : BackwardKvHead(p, s);
      sequence.loaded = std::min(kMax, p.num_heads * head.loaded + p.num_kv_heads * kv.loaded);
      sequence.stored = std::min(kMax, p.num_heads * head.stored + p.num_kv_heads * kv.stored);
    }
    total.loaded = std::min(kMax, total.loaded + sequence.loaded);
    total.stored = std::min(kMax, total.stored + sequence.stored);
  }
  if (pass == Pass::kBackward) {
    total.stored += p.has_sinks ? Wide{p.num_heads} * 4 : 0;
    // Zeroed before anything is added; or whole rows are written, padding rows besides.
    if (DbiasIsShared(p)) {
      total.stored += Wide{DbiasElements(p)} * 4;
    } else if (p.bias) {
      Wide valid_rows = 0;
      for (const Sequence& s : p.sequences) valid_rows += s.len_q;
      total.stored += (Wide{p.total_q} - valid_rows) * p.num_heads * p.bias->cols * 4;
    }
  }
  model.loaded_bytes = static_cast<uint64_t>(std::min(kMax, total.loaded));
  model.stored_bytes = static_cast<uint64_t>(std::min(kMax, total.stored));
  return model;
}

}  // namespace attn::standard
