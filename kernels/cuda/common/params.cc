#include "kernels/cuda/common/params.h"

#include <algorithm>
#include <cmath>

namespace attn::cuda {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

int32_t Window(int64_t w) { return static_cast<int32_t>(std::min(w, int64_t{1} << 30)); }

int64_t PaddedLength(int64_t rows) { return (rows + kRowPadding - 1) / kRowPadding * kRowPadding; }

BiasType BiasTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return BiasType::kFp32;
    case DType::kFp16:
      return BiasType::kFp16;
    case DType::kBf16:
      return BiasType::kBf16;
    case DType::kUint8:
      break;
  }
  return BiasType::kNone;
}

DeviceSequence ToDeviceSequence(const AttentionProblem& p, int64_t b, int64_t padded) {
  const Sequence& s = p.sequences[b];
  return {.batch = p.layout == Layout::kBshd ? b : 0,
          .q_token = s.q_token,
          .k_token = s.k_token,
          .lse = p.LseOffset(b, 0),
          .padded = padded,
          .rows_q = static_cast<int32_t>(s.rows_q),
          .rows_k = static_cast<int32_t>(s.rows_k),
          .len_q = static_cast<int32_t>(s.len_q),
          .len_k = static_cast<int32_t>(s.len_k),
          .off = static_cast<int32_t>(s.off),
          .reserved = 0};
}

}  // namespace

ScoreParams MakeScoreParams(const AttentionProblem& p) {
  ScoreParams s = {};
  s.scale = p.softmax_scale;
  s.scale_log2 = p.softmax_scale * kLog2E;
  s.window_left = Window(p.window_left);
  s.window_right = Window(p.window_right);
  s.softcap = p.softcap;
  if (p.alibi) {
    s.alibi = p.alibi->slopes;
    s.alibi_batch = p.alibi->batch == 1 ? 0 : static_cast<int32_t>(p.num_heads);
  }
  if (p.bias) {
    const BiasOption& bias = *p.bias;
    s.bias_type = BiasTypeOf(bias.dtype);
    s.bias = bias.data;
    s.bias_head = bias.heads == 1 ? 0 : bias.rows * bias.cols;
    s.bias_batch = bias.batch == 1 ? 0 : bias.heads * bias.rows * bias.cols;
    s.bias_cols = bias.cols;
  }
  s.sinks = p.has_sinks ? p.sinks : nullptr;
  s.threshold = 65536;
  s.keep_scale = s.keep_inverse = 1.0f;
  if (p.dropout) {
    // Salmon et al., SC'11: what the key grows by from round to round.
    constexpr uint32_t kWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};
    const uint32_t seed[2] = {static_cast<uint32_t>(p.dropout->seed),
                              static_cast<uint32_t>(p.dropout->seed >> 32)};
    for (uint32_t n = 0; n < 20; ++n) s.philox_keys[n] = seed[n % 2] + n / 2 * kWeyl[n % 2];
    s.dropout_offset = p.dropout->offset;
    s.threshold = p.dropout->threshold;
    if (s.threshold == 0) {
      s.keep_scale = 0.0f;
    } else {
      s.keep_scale = 65536.0f / static_cast<float>(s.threshold);
      s.keep_log2 = std::log2(s.keep_scale);
      s.keep_inverse = static_cast<float>(s.threshold) / 65536.0f;
    }
    s.keep_add = (0x8000u - (s.threshold & 0x7FFFu)) * 0x10001u;
    s.keep_high = (s.threshold & 0x8000u) * 0x10001u;
  }
  if (p.block_mask) {
    const BlockMaskOption& mask = *p.block_mask;
    s.block_mask = mask.data;
    s.mask_head = mask.heads == 1 ? 0 : mask.rows * mask.cols;
    s.mask_batch = mask.batch == 1 ? 0 : mask.heads * mask.rows * mask.cols;
    s.mask_cols = static_cast<int32_t>(mask.cols);
    s.block_q = static_cast<int32_t>(std::min(mask.block_q, int64_t{1} << 30));
    s.block_k = static_cast<int32_t>(std::min(mask.block_k, int64_t{1} << 30));
  }
  return s;
}

bool UniformSequences(const AttentionProblem& p) {
  if (p.layout != Layout::kBshd) return false;
  const Sequence& first = p.sequences.front();
  return std::all_of(p.sequences.begin(), p.sequences.end(), [&first](const Sequence& s) {
    return s.len_q == first.len_q && s.len_k == first.len_k && s.off == first.off;
  });
}

std::vector<DeviceSequence> MakeSequences(const AttentionProblem& p) {
  std::vector<DeviceSequence> sequences;
  sequences.reserve(p.sequences.size());
  int64_t padded = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    sequences.push_back(ToDeviceSequence(p, b, padded));
    padded += PaddedLength(p.sequences[b].rows_q);
  }
  return sequences;
}

SequenceParams MakeSequenceParams(const AttentionProblem& p, const DeviceSequence* array) {
  return {.array = array,
          .first = ToDeviceSequence(p, 0, 0),
          .lse_batch = p.num_heads * p.seqlen_q,
          .padded_batch = static_cast<int32_t>(PaddedLength(p.sequences[0].rows_q)),
          .batch = static_cast<int32_t>(p.batch)};
}

int64_t PaddedRows(const AttentionProblem& p) {
  if (p.layout == Layout::kBshd) return p.batch * PaddedLength(p.seqlen_q);
  int64_t rows = 0;
  for (const Sequence& s : p.sequences) rows += PaddedLength(s.rows_q);
  return rows;
}

int64_t LseHeadStride(const AttentionProblem& p) {
  return p.layout == Layout::kBshd ? p.seqlen_q : p.total_q;
}

TensorStrides ToDevice(const Strides& s) { return {s.batch, s.token, s.head}; }

TensorStrides ContiguousStrides(const AttentionProblem& p, int64_t seqlen, int64_t heads,
                                int64_t head_dim) {
  return {p.layout == Layout::kBshd ? seqlen * heads * head_dim : 0, heads * head_dim, head_dim};
}

}  // namespace attn::cuda
