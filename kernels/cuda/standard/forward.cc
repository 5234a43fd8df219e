#include <cstddef>
#include <limits>

#include "kernels/cuda/standard/passes.h"

namespace attn::cuda::standard {
namespace {

// out = P V, summed in fp32, times the factor of each row. `rows` as the softmax had it.
absl::Status OutProduct(const Call& call, const ForwardTensors& t, const SequenceRun& run,
                        const Chunk& chunk, const RowsParams& rows, DType probability_type) {
  const AttentionProblem& p = call.p;
  const Sequence& s = p.sequences[chunk.batch0];
  const cudaStream_t stream = call.launch.stream;
  const TensorStrides strides = ContiguousStrides(p, p.seqlen_q, p.num_heads, p.head_dim_v);
  const Operand out = QueryOperand(p, run, chunk, t.out, p.out_dtype, strides, false);
  Operand sums = out;
  if (p.out_dtype != DType::kFp32) {
    sums.data = call.launch.workspace + call.plan.chunk_at();
    sums.dtype = DType::kFp32;
    sums.ld = p.head_dim_v;
    sums.batch[2] = s.len_q * sums.ld;
    sums.batch[1] = chunk.group_heads * sums.batch[2];
    sums.batch[0] = chunk.kv_heads * sums.batch[1];
  }
  Product product = ChunkProduct(chunk, s.len_q, p.head_dim_v, s.len_k);
  product.a = ScoreOperand(p, chunk, rows.scores, probability_type, false);
  product.b = KeyOperand(p, run, chunk, t.v, p.dtype, ToDevice(p.v), false);
  SetTarget(sums, &product);
  if (absl::Status status = Run(product, call.blas, stream); !status.ok()) return status;
  if (rows.split) {  // and what rounding P left over
    product.a.data =
        static_cast<const std::byte*>(product.a.data) + rows.ld * SizeOf(probability_type);
    product.beta = 1.0f;
    if (absl::Status status = Run(product, call.blas, stream); !status.ok()) return status;
  }
  // The query heads of a chunk follow each other: it has whole groups, or part of one.
  const RoundParams params = {.from = static_cast<const float*>(sums.data),
                              .factors = rows.factors,
                              .to = const_cast<void*>(out.data),
                              .dtype = p.out_dtype,
                              .batch = static_cast<int32_t>(chunk.batch),
                              .heads = static_cast<int32_t>(chunk.kv_heads * chunk.group_heads),
                              .rows = static_cast<int32_t>(s.len_q),
                              .dim = static_cast<int32_t>(p.head_dim_v),
                              .from_batch = sums.batch[0],
                              .from_head = sums.batch[2],
                              .from_row = sums.ld,
                              .to_batch = out.batch[0],
                              .to_head = out.batch[2],
                              .to_row = out.ld};
  return ToStatus(LaunchRound(params, stream), "standard rounding kernel");
}

// S = Q K^T; P = softmax(S), in place; out = P V.
absl::Status ForwardChunk(const Call& call, const ForwardTensors& t, const SequenceRun& run,
                          const Chunk& chunk) {
  const AttentionProblem& p = call.p;
  const Sequence& s = p.sequences[chunk.batch0];
  const int64_t factors_at = call.plan.chunk_at() + call.plan.OutBytes(chunk);
  auto* factors = reinterpret_cast<float*>(call.launch.workspace + factors_at);
  auto* scores =
      reinterpret_cast<float*>(call.launch.workspace + factors_at + call.plan.FactorBytes(chunk));
  if (s.len_k > 0) {
    absl::Status status = ScoreProduct(
        call, chunk, QueryOperand(p, run, chunk, t.q, p.dtype, ToDevice(p.q), false),
        KeyOperand(p, run, chunk, t.k, p.dtype, ToDevice(p.k), true), p.head_dim, scores);
    if (!status.ok()) return status;
  }
  const DType probability_type = ProbabilityType(p, Pass::kForward, s);
  RowsParams rows = MakeRowsParams(p, run, chunk, scores);
  rows.lse = t.lse;
  rows.factors = factors;
  rows.split = SplitsProbabilities(p, s);
  absl::Status status = ToStatus(LaunchSoftmax(rows, probability_type, call.launch.stream),
                                 "standard softmax kernel");
  if (!status.ok() || s.len_k == 0) return status;
  return OutProduct(call, t, run, chunk, rows, probability_type);
}

}  // namespace

absl::Status Forward(const Call& call, const ForwardTensors& t) {
  const AttentionProblem& p = call.p;
  const cudaStream_t stream = call.launch.stream;
  if (HasIdleRows(p)) {
    const size_t bytes = static_cast<size_t>(OutElements(p) * SizeOf(p.out_dtype));
    absl::Status status = ToStatus(cudaMemsetAsync(t.out, 0, bytes, stream), "zeroing out");
    if (!status.ok()) return status;
    constexpr float kNegInf = -std::numeric_limits<float>::infinity();
    status = ToStatus(LaunchFill(t.lse, LseElements(p), kNegInf, stream), "filling lse");
    if (!status.ok()) return status;
  }
  for (const SequenceRun& run : FindRuns(p)) {
    for (const Chunk& chunk : call.plan.Chunks(run)) {
      if (absl::Status status = ForwardChunk(call, t, run, chunk); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace attn::cuda::standard
