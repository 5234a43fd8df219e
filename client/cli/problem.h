// From flags to an attention call: opens or makes the tensors and fills the request header.
#ifndef ATTN_CLIENT_CLI_PROBLEM_H_
#define ATTN_CLIENT_CLI_PROBLEM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/flags.h"
#include "client/cli/tensor_io.h"
#include "client/lib/client.h"

namespace attn::cli {

// What the tensors are for.
enum class Purpose {
  kForward,
  kBackward,
  kPlanForward,  // shapes alone; only a block mask has contents
  kPlanBackward,
};

// A call, its tensors outside of its header.
struct Problem {
  // Everything but the tensors; a forward header is the same less out, lse, dout and dlse.
  client::v1::BackwardRequestHeader header;
  client::AttentionInputs inputs;
  client::HostTensor out, lse, dout, dlse;  // empty where not given

  // The tensors that are not empty, by name.
  std::vector<NamedTensor> Tensors() const;
};

// Errors: INVALID_ARGUMENT and those of opening files; the message names the flag or the file. What
// the server checks (Validate) is left to the server, except what would have to be guessed here.
absl::StatusOr<Problem> MakeProblem(const ProblemFlags& flags, Purpose purpose);

client::ForwardCall ToForward(const Problem& problem);
client::BackwardCall ToBackward(const Problem& problem);
// The tensors in the header have dtype and shape; the block mask, if any, is payload 0.
client::v1::PlanRequest ToPlan(const Problem& problem, client::v1::Pass pass);

// "BSHD bf16, batch 2, 1024 queries × 2048 keys, 8 heads (2 kv), head_dim 64, causal, window
// 128:0".
std::string Summary(const Problem& problem, const Style& style);

// How long sequences are: seqlen_q × seqlen_k, or for THD the pair of the longest (largest
// product).
struct Extent {
  int64_t queries = 0;
  int64_t keys = 0;
  size_t sequence = 0;  // which
};
Extent LargestSequence(const Problem& problem);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_PROBLEM_H_
