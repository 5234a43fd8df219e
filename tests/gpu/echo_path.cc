#include "tests/gpu/echo_path.h"

#include <cstring>

#include "kernels/api/text.h"
#include "kernels/cuda/call_layout.h"

namespace attn::cuda {
namespace {

// One output of a pass, whoever computes it.
struct Output {
  EchoKind kind;
  int heads, dim;
  int64_t max_rows;
  void* data;
  int size;
  int64_t token_stride, batch_stride;
};

Output Rows(const AttentionProblem& p, EchoKind kind, int64_t heads, int64_t dim, void* data) {
  const int64_t rows = kind == EchoKind::kKey ? p.seqlen_k : p.seqlen_q;
  return {kind,
          static_cast<int>(heads),
          static_cast<int>(dim),
          rows,
          data,
          static_cast<int>(SizeOf(p.out_dtype)),
          heads * dim,
          p.layout == Layout::kBshd ? rows * heads * dim : 0};
}

std::vector<Output> Outputs(const AttentionProblem& p, const ForwardTensors& t) {
  return {Rows(p, EchoKind::kQuery, p.num_heads, p.head_dim_v, t.out),
          Rows(p, EchoKind::kLse, p.num_heads, 1, t.lse)};
}

std::vector<Output> Outputs(const AttentionProblem& p, const BackwardTensors& t) {
  return {Rows(p, EchoKind::kQuery, p.num_heads, p.head_dim, t.dq),
          Rows(p, EchoKind::kKey, p.num_kv_heads, p.head_dim, t.dk),
          Rows(p, EchoKind::kKey, p.num_kv_heads, p.head_dim_v, t.dv)};
}

absl::Status Enqueue(const EchoCall& call, const std::vector<Output>& outputs,
                     cudaStream_t stream) {
  for (const Output& o : outputs) {
    const cudaError_t error = LaunchEcho(call, o.kind, o.heads, o.dim, o.max_rows, o.data, o.size,
                                         o.token_stride, o.batch_stride, stream);
    if (error != cudaSuccess) return ToStatus(error, "echo");
  }
  return absl::OkStatus();
}

void Evaluate(const AttentionProblem& p, const EchoCall& call, const std::vector<Output>& outputs) {
  for (const Output& o : outputs) {
    for (int b = 0; b < p.batch; ++b) {
      const DeviceSequence s = EchoSequence(call.sequences, b);
      const int64_t rows = o.kind == EchoKind::kKey ? s.rows_k : s.rows_q;
      const int64_t first = o.kind == EchoKind::kKey ? s.k_token : s.q_token;
      for (int64_t n = 0; n < rows * o.heads * o.dim; ++n) {
        const int d = static_cast<int>(n % o.dim);
        const int h = static_cast<int>(n / o.dim % o.heads);
        const int64_t i = n / o.dim / o.heads;
        const int64_t at = s.batch * o.batch_stride + (first + i) * o.token_stride + h * o.dim + d;
        if (o.kind == EchoKind::kLse) {
          Put(o.data, 4, s.lse + h * call.lse_head + i, EchoQuery(call, b, h, i, 0));
        } else if (o.kind == EchoKind::kQuery) {
          Put(o.data, o.size, at, EchoQuery(call, b, h, i, d));
        } else {
          Put(o.data, o.size, at, EchoKey(call, b, h, i, d));
        }
      }
    }
  }
}

}  // namespace

void EchoPath::AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties&,
                                std::vector<Rejection>* rejections) const {
  for (int i = 0; i < kNumStrided; ++i) {
    const StridedTensor t = StridedInput(p, pass, static_cast<Slot>(i));
    if ((t.strides.batch | t.strides.token | t.strides.head) * t.element_bytes % kRowAlignment !=
        0) {
      rejections->push_back({path(), Reason::kAlignment, Cat("input ", i)});
    }
  }
}

absl::Status EchoPath::Forward(const AttentionProblem& p, const ForwardTensors& t,
                               const Launch& launch) const {
  if (fault_ == Fault::kIllegalAddress) return ToStatus(LaunchFault(launch.stream), "fault");
  std::vector<Output> outputs = Outputs(p, t);
  if (fault_ == Fault::kForgetLse) outputs.pop_back();
  return Enqueue(MakeEchoCall(p, t, launch.sequences), outputs, launch.stream);
}

absl::Status EchoPath::Backward(const AttentionProblem& p, const BackwardTensors& t,
                                const Launch& launch) const {
  if (absl::Status s = Enqueue(MakeEchoCall(p, t, launch.sequences), Outputs(p, t), launch.stream);
      !s.ok()) {
    return s;
  }
  cudaError_t error = cudaSuccess;
  if (p.bias) {
    error = cudaMemcpyAsync(t.dbias, t.lse, std::min<int64_t>(DbiasElements(p), LseElements(p)) * 4,
                            cudaMemcpyDeviceToDevice, launch.stream);
  }
  if (p.bias && error == cudaSuccess && DbiasElements(p) > LseElements(p)) {
    error = cudaMemsetAsync(t.dbias + LseElements(p), 1, (DbiasElements(p) - LseElements(p)) * 4,
                            launch.stream);
  }
  if (p.has_sinks && error == cudaSuccess) {
    error =
        cudaMemcpyAsync(t.dsink, p.sinks, p.num_heads * 4, cudaMemcpyDeviceToDevice, launch.stream);
  }
  return ToStatus(error, "echo");
}

absl::Status EchoBackend::Forward(const AttentionProblem& p, const ForwardTensors& t,
                                  const RunContext&) const {
  const std::vector<DeviceSequence> sequences = MakeSequences(p);
  Evaluate(p, MakeEchoCall(p, t, sequences.data()), Outputs(p, t));
  return absl::OkStatus();
}

absl::Status EchoBackend::Backward(const AttentionProblem& p, const BackwardTensors& t,
                                   const RunContext&) const {
  const std::vector<DeviceSequence> sequences = MakeSequences(p);
  Evaluate(p, MakeEchoCall(p, t, sequences.data()), Outputs(p, t));
  if (p.bias) {
    const int64_t common = std::min(DbiasElements(p), LseElements(p));
    std::memcpy(t.dbias, t.lse, common * 4);
    std::memset(t.dbias + common, 1, (DbiasElements(p) - common) * 4);
  }
  if (p.has_sinks) std::memcpy(t.dsink, p.sinks, p.num_heads * 4);
  return absl::OkStatus();
}

}  // namespace attn::cuda
