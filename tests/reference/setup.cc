#include "tests/reference/setup.h"

#include <algorithm>
#include <cmath>

#include "kernels/api/philox.h"

namespace attn::reference {
namespace {

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return std::ldexp(1.0, -8);
    case DType::kFp16:
      return std::ldexp(1.0, -11);
    default:
      return std::ldexp(1.0, -22);
  }
}

View MakeView(const TensorSpec& t, const void* data) {
  std::vector<int64_t> strides = t.strides;
  if (strides.empty()) {
    strides.assign(t.shape.size(), 1);
    for (size_t a = t.shape.size() - 1; a > 0; --a) strides[a - 1] = strides[a] * t.shape[a];
  }
  if (t.shape.size() == 3) return {data, t.dtype, 0, strides[0], strides[1]};
  return {data, t.dtype, strides[0], strides[1], strides[2]};
}

void FindSequences(Setup& s) {
  const AttentionSpec& spec = s.spec;
  for (int64_t b = 0; b < s.batch; ++b) {
    Seq seq;
    if (s.thd) {
      seq.q0 = spec.cu_seqlens_q[b];
      seq.k0 = spec.cu_seqlens_k[b];
      seq.lq = spec.cu_seqlens_q[b + 1] - seq.q0;
      seq.lk = spec.cu_seqlens_k[b + 1] - seq.k0;
      s.seqlen_q = std::max(s.seqlen_q, seq.lq);
      s.seqlen_k = std::max(s.seqlen_k, seq.lk);
    } else {
      seq.lq = spec.seqlens_q.empty() ? s.seqlen_q : spec.seqlens_q[b];
      seq.lk = spec.seqlens_k.empty() ? s.seqlen_k : spec.seqlens_k[b];
    }
    seq.off = spec.alignment == Alignment::kBottomRight ? seq.lk - seq.lq : 0;
    s.seqs.push_back(seq);
  }
}

}  // namespace

double Underflow(DType dtype) { return std::ldexp(1.0, dtype == DType::kFp16 ? -25 : -100); }

Setup MakeSetup(const AttentionSpec& spec, const Data& data, bool backward) {
  Setup s{.spec = spec, .data = data, .backward = backward};
  s.thd = spec.layout == Layout::kThd;
  s.heads = spec.num_heads;
  s.kv_heads = spec.num_kv_heads;
  s.dim = spec.q.shape.back();
  s.dim_v = spec.v.shape.back();
  if (s.thd) {
    s.batch = static_cast<int64_t>(spec.cu_seqlens_q.size()) - 1;
    s.total_q = spec.q.shape[0];
    s.total_k = spec.k.shape[0];
  } else {
    s.batch = spec.q.shape[0];
    s.seqlen_q = spec.q.shape[1];
    s.seqlen_k = spec.k.shape[1];
  }
  FindSequences(s);
  s.q = MakeView(spec.q, data.q);
  s.k = MakeView(spec.k, data.k);
  s.v = MakeView(spec.v, data.v);
  if (backward) s.dout = MakeView(*spec.dout, data.dout);
  s.scale = spec.softmax_scale ? double{*spec.softmax_scale} : 1.0 / std::sqrt(double(s.dim));
  s.softcap = spec.softcap.value_or(0.0f);
  s.left = spec.window_left.value_or(-1);
  s.right = spec.causal ? 0 : spec.window_right.value_or(-1);
  if (spec.dropout) s.dropout_threshold = DropoutThreshold(spec.dropout->p);
  const DType out_dtype = spec.out_dtype.value_or(spec.q.dtype);
  s.units = {UnitRoundoff(spec.q.dtype), UnitRoundoff(out_dtype), Underflow(spec.q.dtype),
             Underflow(out_dtype)};
  return s;
}

}  // namespace attn::reference
