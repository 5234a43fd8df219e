// The start-up self-test: every path against results known in closed form.
#ifndef ATTN_SERVER_EXECUTION_SELF_TEST_H_
#define ATTN_SERVER_EXECUTION_SELF_TEST_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "server/execution/path_table.h"

namespace attn::server {

// One path and pass and dtype.
struct SelfTestResult {
  PathId path;
  Pass pass;
  DType dtype;
  absl::Status status;  // INTERNAL: which tensor and element, its value and the one expected
  int device = -1;      // of a CUDA path, as the CUDA runtime counts
};

// The problem of the self-test, one for each pass and dtype.
absl::StatusOr<AttentionProblem> SelfTestProblem(Pass pass, DType dtype);

// Runs one pass and dtype, as SelfTest() describes, on a path that takes SelfTestProblem(). Errors:
// what the path answers; INTERNAL: the result is wrong.
absl::Status SelfTestOnce(const Backend& backend, Pass pass, DType dtype, int device = -1);

// Runs every pass and dtype of a path that the path supports. Causal, bottom-right, two KV heads
// for four query heads, odd lengths with rows that see no key, three cases:
//   counting:  Q = 0, V_j = j: out is the mean visible index, lse = ln(number of visible keys);
//   weights:   q.k in {0, 1, 2, 3} over all of head_dim: softmax weights are powers of e;
//   probe:     V = 1 only on one key: out is exactly 0 in rows that do not see it, not 0 in others.
// Backward: logits are equal, so P = 1/n and dq, dk, dv are sums of 1/n in closed form. Tolerances
// are those of the project's exactness rule. Takes some milliseconds per path. `device`: where a
// CUDA path runs, as RunContext has it.
std::vector<SelfTestResult> SelfTest(const Backend& backend, int device = -1);

// What failed, short: "backward BF16 on CUDA device 1".
std::string FailureDetail(const SelfTestResult& result);

// SelfTest() on each of `cuda_devices` where the path is one of CUDA.
std::vector<SelfTestResult> SelfTestOn(const Backend& backend,
                                       const std::vector<int>& cuda_devices);

// Tests every path that has a backend and no standing reason against it, CUDA paths on each of
// `cuda_devices`, and disables those that fail, on whichever device, with SELF_TEST_FAILED. Returns
// all results.
std::vector<SelfTestResult> SelfTestAll(PathTable* paths,
                                        const std::vector<int>& cuda_devices = {});

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_SELF_TEST_H_
