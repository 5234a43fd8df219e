#include <cstddef>

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/standard/passes.h"

namespace attn::cuda::standard {
namespace {

// Outputs of the keys of a chunk: where its products add up, and where the sums go.
struct KeyGradient {
  void* output;
  float* accumulator;  // null: the output itself
  int64_t dim;
  TensorStrides strides;  // of the output
};

class BackwardPass {
 public:
  BackwardPass(const Call& call, const BackwardTensors& tensors)
      : call_(call),
        p_(call.p),
        t_(tensors),
        stream_(call.launch.stream),
        delta_(At<float>(call.plan.delta_at())),
        parts_(At<double>(call.plan.sinks_at())) {}

  absl::Status Run() {
    if (absl::Status status = Clear(); !status.ok()) return status;
    for (const SequenceRun& run : FindRuns(p_)) {
      if (absl::Status status = RunDelta(run); !status.ok()) return status;
      if (p_.sequences[run.first].len_k == 0) continue;
      for (const Chunk& chunk : call_.plan.Chunks(run)) {
        if (absl::Status status = RunChunk(run, chunk); !status.ok()) return status;
      }
    }
    if (!p_.has_sinks) return absl::OkStatus();
    return ToStatus(LaunchSinkSum(parts_, p_.batch, p_.num_heads, t_.dsink, stream_),
                    "standard dsink kernel");
  }

 private:
  template <class T>
  T* At(int64_t offset) const {
    return reinterpret_cast<T*>(call_.launch.workspace + offset);
  }

  absl::Status Zero(void* to, int64_t elements, int64_t size) const {
    if (elements == 0) return absl::OkStatus();
    return ToStatus(cudaMemsetAsync(to, 0, static_cast<size_t>(elements * size), stream_),
                    "zeroing a gradient");
  }

  // What nothing computes, and what is added to.
  absl::Status Clear() const {
    const int64_t size = SizeOf(p_.out_dtype);
    absl::Status status;
    if (HasIdleRows(p_)) {
      status.Update(Zero(t_.dq, DqElements(p_), size));
      status.Update(Zero(t_.dk, DkElements(p_), size));
      status.Update(Zero(t_.dv, DvElements(p_), size));
    }
    status.Update(Zero(t_.dbias, DbiasElements(p_), 4));
    if (p_.has_sinks) status.Update(Zero(parts_, p_.batch * p_.num_heads, 8));
    return status;
  }

  absl::Status RunDelta(const SequenceRun& run) const {
    const RunOffsets out = QueryOffsets(p_, run, ToDevice(p_.bwd_out));
    const RunOffsets dout = QueryOffsets(p_, run, ToDevice(p_.bwd_dout));
    const RunOffsets lse = LseOffsets(p_, run);
    const DeltaParams params = {
        .out = t_.out,
        .dout = t_.dout,
        .out_dtype = p_.bwd_out_dtype,
        .dout_dtype = p_.bwd_dout_dtype,
        .out0 = out.first,
        .out_step = out.step,
        .out_token = p_.bwd_out.token,
        .out_head = p_.bwd_out.head,
        .dout0 = dout.first,
        .dout_step = dout.step,
        .dout_token = p_.bwd_dout.token,
        .dout_head = p_.bwd_dout.head,
        .dlse = t_.dlse,
        .lse = t_.lse,
        .delta = delta_,
        .lse0 = lse.first,
        .lse_step = lse.step,
        .lse_head = LseHeadStride(p_),
        .rows = static_cast<int32_t>(p_.sequences[run.first].len_q),
        .head_dim_v = static_cast<int32_t>(p_.head_dim_v),
        .batch = static_cast<int32_t>(run.count),
        .num_heads = static_cast<int32_t>(p_.num_heads),
        .sinks = p_.has_sinks ? p_.sinks : nullptr,
        .parts = p_.has_sinks ? parts_ + run.first * p_.num_heads : nullptr};
    absl::Status status = ToStatus(LaunchDelta(params, stream_), "standard row_dot kernel");
    if (!status.ok() || !p_.has_sinks) return status;
    return ToStatus(LaunchSinkParts(params, stream_), "standard dsink kernel");
  }

  // S = Q K^T, dP = dO V^T; P and dS in place of them; dV = P^T dO, dK = dS^T Q, dQ = dS K.
  absl::Status RunChunk(const SequenceRun& run, const Chunk& chunk) const {
    const Plan& plan = call_.plan;
    // The accumulators first: they stay where they are while the heads of a group go by in chunks.
    const int64_t scores_at = plan.chunk_at() + plan.DkBytes(chunk) + plan.DvBytes(chunk);
    const int64_t score_bytes = plan.ScoreBytes(chunk);
    auto* scores = At<float>(scores_at);
    auto* gradients = At<float>(scores_at + score_bytes);
    float* kept = nullptr;
    if (ScoreMatrices(p_, Pass::kBackward) == 3) kept = At<float>(scores_at + 2 * score_bytes);
    KeyGradient dk = {t_.dk, nullptr, p_.head_dim,
                      ContiguousStrides(p_, p_.seqlen_k, p_.num_kv_heads, p_.head_dim)};
    KeyGradient dv = {t_.dv, nullptr, p_.head_dim_v,
                      ContiguousStrides(p_, p_.seqlen_k, p_.num_kv_heads, p_.head_dim_v)};
    if (NeedsAccumulators(p_)) {
      dk.accumulator = At<float>(plan.chunk_at());
      dv.accumulator = At<float>(plan.chunk_at() + plan.DkBytes(chunk));
    }

    const auto query = [&](const void* data, DType dtype, const Strides& strides) {
      return QueryOperand(p_, run, chunk, data, dtype, ToDevice(strides), false);
    };
    const auto key = [&](const void* data, const Strides& strides, bool transposed) {
      return KeyOperand(p_, run, chunk, data, p_.dtype, ToDevice(strides), transposed);
    };
    const Operand q = query(t_.q, p_.dtype, p_.q);
    const Operand dout = query(t_.dout, p_.bwd_dout_dtype, p_.bwd_dout);
    absl::Status status = ScoreProduct(call_, chunk, q, key(t_.k, p_.k, true), p_.head_dim, scores);
    if (!status.ok()) return status;
    status = ScoreProduct(call_, chunk, dout, key(t_.v, p_.v, true), p_.head_dim_v, gradients);
    if (!status.ok()) return status;
    if (status = RunRows(run, chunk, scores, gradients, kept); !status.ok()) return status;
    if (status = AddProduct(run, chunk, scores, dout, 1.0f, dv); !status.ok()) return status;
    if (status = AddProduct(run, chunk, gradients, q, p_.softmax_scale, dk); !status.ok()) {
      return status;
    }
    return QueryGradient(run, chunk, gradients, key(t_.k, p_.k, false));
  }

  absl::Status RunRows(const SequenceRun& run, const Chunk& chunk, float* scores, float* gradients,
                       float* kept) const {
    const DType probability_type = ProbabilityType(p_, Pass::kBackward, p_.sequences[run.first]);
    RowsParams rows = MakeRowsParams(p_, run, chunk, scores);
    rows.gradients = gradients;
    rows.kept = kept;
    rows.lse = const_cast<float*>(t_.lse);
    rows.delta = delta_;
    rows.own_row_dot = SumsRowDot(p_);
    rows.dlse = p_.has_dlse ? t_.dlse : nullptr;
    const bool shared = DbiasSumsBatch(p_) || DbiasSumsHeads(p_);
    if (p_.bias && !shared) rows.dbias = t_.dbias;
    absl::Status status = ToStatus(LaunchSoftmaxGradient(rows, probability_type, stream_),
                                   "standard softmax gradient kernel");
    if (!status.ok() || !shared) return status;
    const DType dtype = kept != nullptr ? DType::kFp32 : probability_type;
    const BiasGradientParams params = {.ds = kept != nullptr ? kept : gradients,
                                       .dtype = dtype,
                                       .ld = rows.ld * (dtype == DType::kFp32 ? 1 : 2),
                                       .sum_batch = DbiasSumsBatch(p_),
                                       .sum_heads = DbiasSumsHeads(p_),
                                       .dbias = t_.dbias,
                                       .rows = rows};
    return ToStatus(LaunchBiasGradient(params, stream_), "standard dbias kernel");
  }

  // weights^T right, summed over the heads of a group: dv = P^T dO, dk = dS^T Q.
  absl::Status AddProduct(const SequenceRun& run, const Chunk& chunk, const float* weights,
                          const Operand& right, float alpha, const KeyGradient& to) const {
    const Sequence& s = p_.sequences[chunk.batch0];
    Product product = ChunkProduct(chunk, s.len_k, to.dim, s.len_q);
    product.a = ScoreOperand(p_, chunk, weights, ProbabilityType(p_, Pass::kBackward, s), true);
    product.b = right;
    product.alpha = alpha;
    product.sum_group = true;
    product.beta = chunk.group0 > 0 ? 1.0f : 0.0f;
    const Operand output = KeyOperand(p_, run, chunk, to.output, p_.out_dtype, to.strides, false);
    SetTarget(output, &product);
    if (to.accumulator != nullptr) {
      product.c = to.accumulator;
      product.c_dtype = DType::kFp32;
      product.ldc = to.dim;
      product.c_batch[1] = s.len_k * to.dim;
      product.c_batch[0] = chunk.kv_heads * product.c_batch[1];
    }
    absl::Status status = standard::Run(product, call_.blas, stream_);
    const bool complete = chunk.group0 + chunk.group_heads == p_.group();
    if (!status.ok() || to.accumulator == nullptr || !complete) return status;
    const RoundParams params = {.from = to.accumulator,
                                .factors = nullptr,
                                .to = const_cast<void*>(output.data),
                                .dtype = p_.out_dtype,
                                .batch = static_cast<int32_t>(chunk.batch),
                                .heads = static_cast<int32_t>(chunk.kv_heads),
                                .rows = static_cast<int32_t>(s.len_k),
                                .dim = static_cast<int32_t>(to.dim),
                                .from_batch = chunk.kv_heads * s.len_k * to.dim,
                                .from_head = s.len_k * to.dim,
                                .from_row = to.dim,
                                .to_batch = output.batch[0],
                                .to_head = output.batch[1],
                                .to_row = output.ld};
    return ToStatus(LaunchRound(params, stream_), "standard rounding kernel");
  }

  absl::Status QueryGradient(const SequenceRun& run, const Chunk& chunk, const float* ds,
                             const Operand& k) const {
    const Sequence& s = p_.sequences[chunk.batch0];
    Product product = ChunkProduct(chunk, s.len_q, p_.head_dim, s.len_k);
    product.a = ScoreOperand(p_, chunk, ds, ProbabilityType(p_, Pass::kBackward, s), false);
    product.b = k;
    product.alpha = p_.softmax_scale;
    const TensorStrides strides = ContiguousStrides(p_, p_.seqlen_q, p_.num_heads, p_.head_dim);
    SetTarget(QueryOperand(p_, run, chunk, t_.dq, p_.out_dtype, strides, false), &product);
    return standard::Run(product, call_.blas, stream_);
  }

  const Call& call_;
  const AttentionProblem& p_;
  const BackwardTensors& t_;
  const cudaStream_t stream_;
  float* const delta_;   // lse-shaped
  double* const parts_;  // [batch, num_heads]
};

}  // namespace

absl::Status Backward(const Call& call, const BackwardTensors& tensors) {
  return BackwardPass(call, tensors).Run();
}

}  // namespace attn::cuda::standard
