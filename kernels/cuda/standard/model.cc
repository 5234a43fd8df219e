#include <algorithm>
#include <limits>

#include "kernels/api/traffic.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/standard/plan.h"

namespace attn::cuda::standard {
namespace {

using Wide = unsigned __int128;
constexpr Wide kMax = std::numeric_limits<uint64_t>::max();

struct Bytes {
  Wide loaded = 0, stored = 0;

  void Add(const Bytes& more, Wide times = 1) {
    loaded = std::min(kMax, loaded + std::min(kMax, more.loaded) * times);
    stored = std::min(kMax, stored + std::min(kMax, more.stored) * times);
  }
};

// One query head of one sequence, without what its row kernel reads of the scores.
Bytes ForwardHead(const AttentionProblem& p, const Sequence& s) {
  const Wide n = s.len_q, m = s.len_k, size = SizeOf(p.dtype);
  const Wide score = SizeOf(ProbabilityType(p, Pass::kForward, s));  // of P and dS
  Bytes total;
  total.Add({n * p.head_dim * size + m * p.head_dim * size, n * m * 4});  // S = Q K^T
  total.Add({0, n * m * score + 2 * n * 4});                              // P, lse, factors
  // out = P V in fp32, then times a factor per row; with a split P the product is two.
  const Wide out = n * p.head_dim_v, weights = m * p.head_dim_v * size;
  total.Add({n * m * score + weights, out * 4});
  if (SplitsProbabilities(p, s))
    total.Add({n * m * size + weights + out * 4, n * m * size + out * 4});
  total.Add({out * 4 + n * 4, out * SizeOf(p.out_dtype)});
  return total;
}

Bytes BackwardHead(const AttentionProblem& p, const Sequence& s) {
  const Wide n = s.len_q, m = s.len_k, size = SizeOf(p.dtype);
  const Wide score = SizeOf(ProbabilityType(p, Pass::kBackward, s));  // of P and dS
  const Wide d = p.head_dim, dv = p.head_dim_v;
  const Wide dout = SizeOf(p.bwd_dout_dtype), out_size = SizeOf(p.out_dtype);
  Bytes total;
  total.Add(
      {n * dv * (dout + SizeOf(p.bwd_out_dtype)) + (p.has_dlse ? n * 4 : 0), n * 4});  // delta
  total.Add({n * d * size + m * d * size, n * m * 4});                                 // S = Q K^T
  total.Add({n * dv * dout + m * dv * size, n * m * 4});        // dP = dO V^T
  total.Add({2 * n * 4, 2 * n * m * score});                    // P, dS
  total.Add({n * m * score + n * dv * dout, 0});                // dV = P^T dO
  total.Add({n * m * score + n * d * size, 0});                 // dK = dS^T Q
  total.Add({n * m * score + m * d * size, n * d * out_size});  // dQ = dS K
  if (p.has_sinks) total.Add({2 * n * 4, 8});
  if (p.bias) {
    if (!DbiasSumsBatch(p) && !DbiasSumsHeads(p)) {
      total.Add({0, n * m * 4});
    } else {
      const bool kept = ScoreMatrices(p, Pass::kBackward) == 3;
      total.Add({n * m * (kept ? 4 : score), kept ? n * m * 4 : 0});
    }
  }
  return total;
}

// dk and dv of one kv head: written once, or added to for each query head and rounded at the end.
Bytes BackwardKvHead(const AttentionProblem& p, const Sequence& s) {
  const Wide elements = Wide(s.len_k) * (p.head_dim + p.head_dim_v);
  const Wide group = p.group();
  const Wide out_size = SizeOf(p.out_dtype);
  if (!NeedsAccumulators(p))
    return {(group - 1) * elements * out_size, group * elements * out_size};
  return {group * elements * 4, group * elements * 4 + elements * out_size};
}

}  // namespace

TileModel Model(const AttentionProblem& p, Pass pass) {
  TileModel model;
  model.tile_q = 1;
  model.tile_k = std::min(p.seqlen_k, kMaxRowInRegisters);
  model.on_chip_elements = model.tile_k * (pass == Pass::kForward ? 1 : 2);

  Bytes total;
  for (const SequenceRun& run : FindRuns(p)) {
    const Sequence& s = p.sequences[run.first];
    if (pass == Pass::kForward) {
      total.Add(ForwardHead(p, s), Wide(p.num_heads) * run.count);
    } else {
      total.Add(BackwardHead(p, s), Wide(p.num_heads) * run.count);
      total.Add(BackwardKvHead(p, s), Wide(p.num_kv_heads) * run.count);
    }
  }
  // The row kernels read what is visible: S, dP in backward, bias; long rows of forward twice.
  const Wide pairs = VisiblePairs(p);
  const bool twice = pass == Pass::kForward && p.seqlen_k > kMaxRowInRegisters;
  const Wide bias = p.bias ? SizeOf(p.bias->dtype) : 0;
  // Backward reads them for row_dot too, where it sums that itself.
  const Wide per_pair =
      pass == Pass::kBackward ? (8 + bias) * (SumsRowDot(p) ? 2 : 1) : (4 + bias) * (twice ? 2 : 1);
  total.Add({pairs * per_pair, 0});
  if (HasIdleRows(p)) {  // outputs are zeroed first
    if (pass == Pass::kForward) {
      total.Add({0, Wide(OutElements(p)) * SizeOf(p.out_dtype) + Wide(LseElements(p)) * 4});
    } else {
      total.Add({0, (Wide(DqElements(p)) + DkElements(p) + DvElements(p)) * SizeOf(p.out_dtype)});
    }
  }
  if (pass == Pass::kBackward && p.bias) total.Add({0, Wide(DbiasElements(p)) * 4});
  if (pass == Pass::kBackward && p.has_sinks) {
    total.Add({Wide(p.batch) * p.num_heads * 8, Wide(p.num_heads) * 4});
  }
  model.loaded_bytes = static_cast<uint64_t>(std::min(kMax, total.loaded));
  model.stored_bytes = static_cast<uint64_t>(std::min(kMax, total.stored));
  return model;
}

}  // namespace attn::cuda::standard
