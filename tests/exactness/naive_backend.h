// A plain fp32 attention with faults to order: what the checker must pass, and what it must catch.
#ifndef ATTN_TESTS_EXACTNESS_NAIVE_BACKEND_H_
#define ATTN_TESTS_EXACTNESS_NAIVE_BACKEND_H_

#include <string>
#include <vector>

#include "kernels/api/backend.h"

namespace attn::exactness {

enum class Mutation : uint8_t {
  kNone,
  kRoundedOperands,  // no fault: P and dS rounded to the input dtype, as on tensor cores
  kSeesNextKey,      // window_right (causal: 0) one too large
  kMissesOwnKey,     // window_right one too small
  kWindowLeftLong,   // window_left one too large
  kDropsLastKey,     // key length one too small
  kTopLeft,          // bottom-right taken for top-left
  kNoScale,
  kLowAccumulator,  // out accumulated in the input dtype
  kTf32,            // operands of products rounded to 10 bits
  kCoarseExp,       // exp with a relative error of 1e-4, as a cubic polynomial has
  kTanhApprox,      // tanh with a relative error of 2^-11
  kNoCapGradient,
  kCapAfterBias,
  kFiniteLse,  // a large number instead of -inf
  kLseBase2,
  kSinkNotInLse,
  kAlibiByKey,  // slope * j: same out, shifted lse
  kWrongKvHead,
  kDropoutUnscaled,
  kDropoutInLse,
  kDropoutByTile,  // the mask restarts every 64 keys
  kBlockTransposed,
  kNoRowDot,
  kNoDlse,
  kReadsPaddedDout,
  kGroupNotSummed,  // dk, dv of the last query head of the group only
  kDbiasNotSummed,  // dbias of the last batch and head only
  kDsinkSign,
  kPaddingUntouched,  // dk of keys beyond the length not written
  kWritesPastEnd,
};
std::string Name(Mutation mutation);

class NaiveBackend : public Backend {
 public:
  explicit NaiveBackend(Mutation mutation) : mutation_(mutation) {}

  PathId path() const override { return PathId::kStandardCpu; }
  void AppendRejections(const AttentionProblem&, Pass, std::vector<Rejection>*) const override {}
  std::string KernelId(const AttentionProblem&, Pass) const override { return "naive"; }
  int64_t WorkspaceBytes(const AttentionProblem&, Pass) const override { return 0; }
  TileModel Model(const AttentionProblem&, Pass) const override { return {}; }
  absl::Status Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                       const RunContext& context) const override;
  absl::Status Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                        const RunContext& context) const override;

 private:
  const Mutation mutation_;
};

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_NAIVE_BACKEND_H_
