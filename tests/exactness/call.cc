#include "tests/exactness/call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "absl/strings/str_cat.h"

namespace attn::exactness {
namespace {

constexpr int64_t kGuardBytes = 128;
constexpr std::byte kGuard{0xA5};
constexpr std::byte kPoison{0xFF};
constexpr double kRisePerKey = 0.125;  // of a logit, as Numbers::kRising says

enum Stream : uint64_t { kQ, kK, kV, kDout, kDlse, kBias, kHidden, kAlibi, kSinks, kBlock, kDir };

uint64_t Index(int64_t b, int64_t i, int64_t h, int64_t d) {
  return (((static_cast<uint64_t>(b) << 20) + i) << 27) + (static_cast<uint64_t>(h) << 10) + d;
}

}  // namespace

uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

float Gauss(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t bits = Mix(Mix(seed * 64 + stream) ^ index);
  const double u = ((bits >> 32) + 1.0) / 4294967297.0;
  const double angle = (bits & 0xFFFFFFFFu) * (2.0 * std::numbers::pi / 4294967296.0);
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(angle));
}

GuardedBuffer::GuardedBuffer(int64_t bytes)
    : bytes_(bytes), storage_(bytes + 2 * kGuardBytes + 64, kGuard) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data()) + kGuardBytes;
  offset_ = kGuardBytes + (64 - address % 64) % 64;
  std::fill_n(data(), bytes_, kPoison);
}

bool GuardedBuffer::GuardsIntact() const {
  const auto intact = [](std::byte b) { return b == kGuard; };
  const auto body = storage_.begin() + static_cast<int64_t>(offset_);
  return std::all_of(storage_.begin(), body, intact) &&
         std::all_of(body + bytes_, storage_.end(), intact);
}

bool operator==(const GuardedBuffer& a, const GuardedBuffer& b) {
  return a.bytes_ == b.bytes_ && (a.bytes_ == 0 || std::memcmp(a.data(), b.data(), a.bytes_) == 0);
}

void Call::MakeLengths() {
  const Case& c = case_;
  lens_q_ = c.lens_q;
  lens_k_ = c.lens_k;
  batch_ = c.batch;
  rows_q_ = c.seqlen_q;
  rows_k_ = c.seqlen_k;
  if (c.layout == Layout::kBshd) {
    spec_.seqlens_q = c.lens_q;
    spec_.seqlens_k = c.lens_k;
    if (lens_q_.empty()) lens_q_.assign(batch_, c.seqlen_q);
    if (lens_k_.empty()) lens_k_.assign(batch_, c.seqlen_k);
    return;
  }
  for (int64_t b = 0; c.lens_q.empty() && b < batch_; ++b) {
    lens_q_.push_back(b % 2 == 0 ? c.seqlen_q : c.seqlen_q / 2);
    lens_k_.push_back(b % 2 == 0 ? c.seqlen_k : c.seqlen_k * 2 / 3 + 1);
  }
  batch_ = static_cast<int64_t>(lens_q_.size());
  rows_q_ = rows_k_ = 0;
  spec_.cu_seqlens_q = spec_.cu_seqlens_k = {0};
  for (int64_t b = 0; b < batch_; ++b) {
    rows_q_ = std::max(rows_q_, lens_q_[b]);
    rows_k_ = std::max(rows_k_, lens_k_[b]);
    spec_.cu_seqlens_q.push_back(spec_.cu_seqlens_q.back() + lens_q_[b]);
    spec_.cu_seqlens_k.push_back(spec_.cu_seqlens_k.back() + lens_k_[b]);
  }
}

// Valid entries get their value; everything else, padding and gaps, stays NaN.
Input Call::MakeInput(DType dtype, bool query, int64_t heads, int64_t dim,
                      const Values::Entry& entry) const {
  const bool thd = case_.layout == Layout::kThd;
  const std::vector<int64_t>& cu = query ? spec_.cu_seqlens_q : spec_.cu_seqlens_k;
  const std::vector<int64_t>& lens = query ? lens_q_ : lens_k_;
  const int64_t tokens = thd ? cu.back() : (query ? rows_q_ : rows_k_);
  const int64_t batch = thd ? 1 : batch_;
  int64_t head_stride = dim, token_stride = heads * dim, batch_stride = tokens * token_stride;
  Input in;
  if (case_.storage == Storage::kGaps) {
    head_stride = dim + 3;
    token_stride = heads * head_stride + 5;
    batch_stride = tokens * token_stride + 7;
    in.start_bytes = SizeOf(dtype);
  } else if (case_.storage == Storage::kHeadsFirst) {
    token_stride = dim;
    head_stride = tokens * dim;
    batch_stride = heads * head_stride;
  } else if (case_.storage == Storage::kOneHead && !query) {
    head_stride = 0;
    token_stride = dim;
    batch_stride = tokens * dim;
  }
  in.spec.dtype = dtype;
  in.spec.shape = {batch, tokens, heads, dim};
  in.spec.strides = {batch_stride, token_stride, head_stride, 1};
  if (thd) {
    in.spec.shape.erase(in.spec.shape.begin());
    in.spec.strides.erase(in.spec.strides.begin());
  }
  const int64_t span = std::max<int64_t>(0, in.spec.SpanElements());
  if (case_.storage == Storage::kContiguous) in.spec.strides.clear();  // the default
  in.bytes.assign(span * SizeOf(dtype) + in.start_bytes, kPoison);
  for (int64_t b = 0; b < batch_; ++b) {
    for (int64_t i = 0; i < lens[b]; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at =
            (thd ? cu[b] * token_stride : b * batch_stride) + i * token_stride + h * head_stride;
        for (int64_t d = 0; d < dim; ++d) {
          StoreElement(in.bytes.data() + in.start_bytes, dtype, at + d, entry(b, i, h, d));
        }
      }
    }
  }
  return in;
}

void Call::MakeBias(const Values& values) {
  const Case& c = case_;
  const bool thd = c.layout == Layout::kThd;
  const bool one_batch = c.bias == BiasShape::kSharedBatch || c.bias == BiasShape::kSharedBoth;
  const bool one_head = c.bias == BiasShape::kSharedHeads || c.bias == BiasShape::kSharedBoth;
  const int64_t heads = one_head ? 1 : c.heads;
  const int64_t batch = thd || one_batch ? 1 : batch_;
  const int64_t rows = thd ? spec_.cu_seqlens_q.back() : rows_q_;
  spec_.bias = TensorSpec{.dtype = c.bias_dtype, .shape = {}, .strides = {}};
  if (!thd) spec_.bias->shape.push_back(batch);
  for (int64_t n : {heads, rows, rows_k_}) spec_.bias->shape.push_back(n);
  bias_.resize(batch * heads * rows * rows_k_ * SizeOf(c.bias_dtype));
  int64_t n = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < rows_k_; ++j, ++n) {
          float x = Gauss(c.seed, kBias, n);
          const bool hidden = i % 5 == 3 || Mix(c.seed * 64 + kHidden + 1000003 * n) % 5 == 0;
          if (c.bias_hides && hidden) x = -std::numeric_limits<float>::infinity();
          if (values.bias) x = values.bias(b, h, i, j);
          StoreElement(bias_.data(), c.bias_dtype, n, x);
        }
      }
    }
  }
}

void Call::MakeBlockMask(const Values& values) {
  const Case& c = case_;
  const int64_t batch = c.block_mask_broadcast ? 1 : batch_;
  const int64_t heads = c.block_mask_broadcast ? 1 : c.heads;
  const int64_t rows = (rows_q_ + c.block_q - 1) / c.block_q;
  const int64_t cols = (rows_k_ + c.block_k - 1) / c.block_k;
  spec_.block_mask = BlockMaskSpec{
      .mask = {.dtype = DType::kUint8, .shape = {batch, heads, rows, cols}, .strides = {}},
      .block_q = c.block_q,
      .block_k = c.block_k};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t s = 0; s < cols; ++s) {
          const uint64_t random = Mix(c.seed * 64 + kBlock + 7919 * block_mask_.size());
          bool shown = random % 5 < 3 && (h + r) % 3 != 1;
          if (values.block_mask) shown = values.block_mask(b, h, r, s);
          block_mask_.push_back(shown ? 1 : 0);
        }
      }
    }
  }
}

void Call::MakeOptions(const Values& values) {
  const Case& c = case_;
  spec_.softmax_scale = c.scale;
  spec_.causal = c.causal;
  spec_.alignment = c.alignment;
  spec_.window_left = c.window_left;
  spec_.window_right = c.window_right;
  spec_.softcap = c.softcap;
  spec_.deterministic = c.deterministic;
  if (c.out_fp32) spec_.out_dtype = DType::kFp32;
  if (c.dropout > 0) {
    spec_.dropout = DropoutSpec{.p = c.dropout, .seed = Mix(c.seed), .offset = 7};
  }
  if (c.alibi > 0) {
    const int64_t n = (c.alibi == 2 ? batch_ : 1) * c.heads;
    for (int64_t i = 0; i < n; ++i) alibi_.push_back(0.1f * Gauss(c.seed, kAlibi, i));
    spec_.alibi_slopes = TensorSpec{};
    if (c.alibi == 2) spec_.alibi_slopes->shape.push_back(batch_);
    spec_.alibi_slopes->shape.push_back(c.heads);
  }
  if (c.sinks) {
    for (int64_t h = 0; h < c.heads; ++h) sinks_.push_back(2.0f * Gauss(c.seed, kSinks, h));
    if (c.heads > 1) sinks_.back() = -std::numeric_limits<float>::infinity();
    spec_.sinks = TensorSpec{.shape = {c.heads}, .strides = {}};
  }
  if (c.bias != BiasShape::kNone) MakeBias(values);
  if (c.block_mask) MakeBlockMask(values);
}

Call::Call(const Case& c, const Values& values) : case_(c) {
  spec_.layout = c.layout;
  spec_.num_heads = c.heads;
  spec_.num_kv_heads = c.kv_heads;
  MakeLengths();
  const int64_t group = c.heads / c.kv_heads;
  const double scale = c.scale ? std::abs(*c.scale) : 1.0 / std::sqrt(double(c.dim));
  const auto random = [&c](Stream stream) {
    return [&c, stream](int64_t b, int64_t i, int64_t h, int64_t d) {
      const float x = Gauss(c.seed, stream, Index(b, i, h, d));
      const bool positive = c.numbers == Numbers::kSameSign || c.numbers == Numbers::kFlat;
      return positive ? 1.0f + 0.5f * std::abs(x) : x;
    };
  };
  // One direction for each kv head, of ±1.
  const auto direction = [&c](int64_t kv_head, int64_t d) {
    return Mix(c.seed * 64 + kDir + 524287 * Index(0, 0, kv_head, d)) % 2 == 0 ? 1.0f : -1.0f;
  };
  const auto q = [&](int64_t b, int64_t i, int64_t h, int64_t d) {
    const float x = Gauss(c.seed, kQ, Index(b, i, h, d));
    if (c.numbers == Numbers::kTimes8) return 8 * x;
    if (c.numbers == Numbers::kTimes64) return 64 * x;
    if (c.numbers == Numbers::kShared)
      return x + 4 * Gauss(c.seed, kDir, Index(0, 0, h / group, d));
    if (c.numbers == Numbers::kSameSign) return 0.01f * x;
    if (c.numbers == Numbers::kFlat) return 0.0f;
    if (c.numbers == Numbers::kSpike) return x + 30 * direction(h / group, d);
    if (c.numbers == Numbers::kRising) return 0.25f * x + direction(h / group, d);
    if (c.numbers == Numbers::kFalling) return 0.25f * x - direction(h / group, d);
    if (c.numbers == Numbers::kCrossing)
      return 0.25f * x + (i % 2 == 0 ? 1.0f : -1.0f) * direction(h / group, d);
    return x;
  };
  const auto k = [&](int64_t b, int64_t i, int64_t h, int64_t d) {
    const float x = Gauss(c.seed, kK, Index(b, i, h, d));
    if (c.numbers == Numbers::kShared) return x - 4 * Gauss(c.seed, kDir, Index(0, 0, h, d));
    if (c.numbers == Numbers::kSpike && i == lens_k_[b] / 2) {
      return static_cast<float>(1e4 / (scale * 30 * c.dim)) * direction(h, d);
    }
    if (c.numbers >= Numbers::kRising) {
      return 0.25f * x + static_cast<float>(kRisePerKey * i / (scale * c.dim)) * direction(h, d);
    }
    return x;
  };
  q_ = MakeInput(c.dtype, true, c.heads, c.dim, values.q ? values.q : Values::Entry(q));
  k_ = MakeInput(c.dtype, false, c.kv_heads, c.dim, values.k ? values.k : Values::Entry(k));
  v_ = MakeInput(c.dtype, false, c.kv_heads, c.dim_v, values.v ? values.v : random(kV));
  dout_ = MakeInput(c.dout_fp32 ? DType::kFp32 : c.dtype, true, c.heads, c.dim_v,
                    values.dout ? values.dout : random(kDout));
  spec_.q = q_.spec;
  spec_.k = k_.spec;
  spec_.v = v_.spec;
  spec_.dout = dout_.spec;
  MakeOptions(values);
  const bool thd = c.layout == Layout::kThd;
  spec_.lse = TensorSpec{};
  spec_.lse->shape = thd ? std::vector<int64_t>{c.heads, spec_.cu_seqlens_q.back()}
                         : std::vector<int64_t>{batch_, c.heads, rows_q_};
  if (!c.dlse) return;
  spec_.dlse = spec_.lse;
  dlse_.assign(spec_.lse->NumElements(), std::numeric_limits<float>::quiet_NaN());
  for (int64_t b = 0; b < batch_; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < lens_q_[b]; ++i) {
        const int64_t at = thd ? h * spec_.cu_seqlens_q.back() + spec_.cu_seqlens_q[b] + i
                               : (b * c.heads + h) * rows_q_ + i;
        dlse_[at] = values.dlse ? values.dlse(b, h, i) : Gauss(c.seed, kDlse, Index(b, i, h, 0));
      }
    }
  }
}

reference::Data Call::data() const {
  return {.q = q_.data(),
          .k = k_.data(),
          .v = v_.data(),
          .alibi_slopes = alibi_.data(),
          .bias = bias_.data(),
          .sinks = sinks_.data(),
          .block_mask = block_mask_.data(),
          .dout = dout_.data(),
          .dlse = case_.dlse ? dlse_.data() : nullptr};
}

absl::StatusOr<AttentionProblem> Call::Problem(Pass pass) const {
  AttentionSpec spec = spec_;
  if (pass == Pass::kForward) {
    spec.dout.reset();
    spec.dlse.reset();
    spec.lse.reset();
  } else {
    spec.out = dout_.spec;  // same shape and strides
    spec.out->dtype = spec.out_dtype.value_or(spec.q.dtype);
  }
  absl::StatusOr<AttentionProblem> problem = Validate(spec, pass);
  if (!problem.ok()) return problem;
  if (problem->alibi) problem->alibi->slopes = alibi_.data();
  if (problem->bias) problem->bias->data = bias_.data();
  if (problem->has_sinks) problem->sinks = sinks_.data();
  if (problem->block_mask) problem->block_mask->data = block_mask_.data();
  const absl::Status contents = ValidateContents(*problem);
  if (!contents.ok()) return contents;
  return problem;
}

}  // namespace attn::exactness
