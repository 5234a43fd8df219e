// Small calls that the server makes of itself: the start-up self-test and rate measurement.
#ifndef ATTN_SERVER_EXECUTION_TEST_PROBLEM_H_
#define ATTN_SERVER_EXECUTION_TEST_PROBLEM_H_

#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "kernels/api/problem.h"

namespace attn::server {

// Inputs and outputs of one call, as bytes of the problem's dtypes. Inputs are written by Set…();
// what is not written is 0. Outputs are NaN before each run, so an element that a path forgets
// shows.
class CallTensors {
 public:
  explicit CallTensors(const AttentionProblem& problem);

  // Element (b = 0) of token, head, component.
  void SetQ(int64_t token, int64_t head, int64_t d, float value);
  void SetK(int64_t token, int64_t head, int64_t d, float value);
  void SetV(int64_t token, int64_t head, int64_t d, float value);
  void SetDout(int64_t token, int64_t head, int64_t d, float value);

  // Fills q, k, v and dout with values in [-1, 1], q with an eighth of that.
  void FillRandom();

  // Runs the pass; backward uses out and lse of the latest forward. `device` is that of RunContext.
  // Returns the time in the backend, on a device the time of its kernels.
  absl::StatusOr<std::chrono::nanoseconds> Run(const Backend& backend, Pass pass, int device = -1);

  float Out(int64_t token, int64_t head, int64_t d) const;
  float Lse(int64_t token, int64_t head) const;
  float Dq(int64_t token, int64_t head, int64_t d) const;
  float Dk(int64_t token, int64_t head, int64_t d) const;
  float Dv(int64_t token, int64_t head, int64_t d) const;

 private:
  const AttentionProblem problem_;
  std::vector<std::byte> q_, k_, v_, dout_, out_, dq_, dk_, dv_;
  std::vector<float> lse_;
};

// batch 1, BSHD, contiguous. Asserts nothing: the arguments are the server's own.
absl::StatusOr<AttentionProblem> MakeProblem(int64_t seqlen_q, int64_t seqlen_k, int64_t num_heads,
                                             int64_t num_kv_heads, int64_t head_dim, DType dtype,
                                             bool causal, Pass pass);

// A dense call with values in [-1, 1], for timing.
class SyntheticCall {
 public:
  SyntheticCall(int64_t seqlen, int64_t num_heads, int64_t head_dim, DType dtype = DType::kFp32);
  absl::StatusOr<std::chrono::nanoseconds> Run(const Backend& backend, Pass pass) const;
  uint64_t flops(Pass pass) const;

 private:
  int64_t seqlen_, num_heads_, head_dim_;
  DType dtype_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_TEST_PROBLEM_H_
