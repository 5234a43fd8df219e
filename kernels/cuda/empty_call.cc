#include "kernels/cuda/empty_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace attn::cuda {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

void Zero(void* data, int64_t elements, DType dtype) {
  if (elements > 0) std::memset(data, 0, static_cast<size_t>(elements * SizeOf(dtype)));
}

// Σ_d dout_id · out_id of row i of (b, h).
double RowDot(const AttentionProblem& p, const BackwardTensors& t, int64_t b, int64_t h,
              int64_t i) {
  const int64_t batch = p.layout == Layout::kBshd ? b : 0;
  const int64_t token = p.sequences[b].q_token + i;
  const auto start = [&](const Strides& s) {
    return batch * s.batch + token * s.token + h * s.head;
  };
  const int64_t out = start(p.bwd_out), dout = start(p.bwd_dout);
  double sum = 0;
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    sum += static_cast<double>(LoadElement(t.out, p.bwd_out_dtype, out + d)) *
           static_cast<double>(LoadElement(t.dout, p.bwd_dout_dtype, dout + d));
  }
  return sum;
}

// dsink_h = Σ_i exp(sink_h − lse_i)·(dlse_i − row_dot_i): with no key the sink alone makes lse, and
// it has a gradient.
float SinkGradient(const AttentionProblem& p, const BackwardTensors& t, int64_t h) {
  const float sink = p.sinks[h];
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = p.LseOffset(b, h);
    for (int64_t i = 0; i < p.sequences[b].len_q; ++i) {
      const float lse = t.lse[first + i];
      if (sink == kNegInf || lse == kNegInf) continue;
      const double dlse = t.dlse == nullptr ? 0.0 : t.dlse[first + i];
      sum += std::exp(static_cast<double>(sink) - lse) * (dlse - RowDot(p, t, b, h, i));
    }
  }
  return static_cast<float>(sum);
}

}  // namespace

void AnswerEmptyForward(const AttentionProblem& p, const ForwardTensors& tensors) {
  Zero(tensors.out, OutElements(p), p.out_dtype);
  std::fill_n(tensors.lse, LseElements(p), kNegInf);
  if (!p.has_sinks || p.total_q == 0) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      std::fill_n(tensors.lse + p.LseOffset(b, h), p.sequences[b].len_q, p.sinks[h]);
    }
  }
}

void AnswerEmptyBackward(const AttentionProblem& p, const BackwardTensors& tensors) {
  Zero(tensors.dq, DqElements(p), p.out_dtype);
  Zero(tensors.dk, DkElements(p), p.out_dtype);
  Zero(tensors.dv, DvElements(p), p.out_dtype);
  if (p.bias) Zero(tensors.dbias, DbiasElements(p), DType::kFp32);
  if (!p.has_sinks) return;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    tensors.dsink[h] = p.total_q == 0 ? 0.0f : SinkGradient(p, tensors, h);
  }
}

}  // namespace attn::cuda
