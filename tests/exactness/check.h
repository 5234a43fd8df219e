// Holds backends against the float64 reference, element by element.
#ifndef ATTN_TESTS_EXACTNESS_CHECK_H_
#define ATTN_TESTS_EXACTNESS_CHECK_H_

#include <span>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "tests/exactness/call.h"
#include "tests/exactness/case.h"
#include "tests/reference/compare.h"
#include "tests/reference/reference.h"

namespace attn::exactness {

// One tensor of one run that breaks the rule, or an error status.
struct Fault {
  std::string what;     // "flash_cpu backward dq", with " (out, lse of standard_cpu)" where so
  std::string details;  // the verdict, or the status
};

// Forward outputs against the reference.
std::vector<Fault> CheckForward(const reference::Result& want, const ForwardOutputs& got,
                                const std::string& who);
std::vector<Fault> CheckBackward(const reference::Result& want, const BackwardOutputs& got,
                                 const std::string& who);

// Runs the call on each backend that takes it: forward, backward on its own out and lse, backward
// on those of every other backend; compares all with the reference. A backend that rejects the
// problem must say why; at least one must take it. Returns all faults.
std::vector<Fault> CheckCall(const Call& call, std::span<const Backend* const> backends);

// CheckCall() as GoogleTest failures, each with the case, its seed and the command that runs it
// alone.
void ExpectExact(const Case& c, std::span<const Backend* const> backends,
                 const Values& values = {});

// Those that take the problem.
std::vector<const Backend*> Takers(const AttentionProblem& problem, Pass pass,
                                   std::span<const Backend* const> backends);

// What runs the backward pass after this forward pass: the same backend or, where it declines (a
// path that has forward passes only), the fastest that takes the problem. Null: none does.
const Backend* BackwardOf(const Backend& forward, const AttentionProblem& problem,
                          std::span<const Backend* const> backends);

// "flash_sm80 backward (out, lse of flash_sm90)": how a run of it is called.
std::string BackwardName(const Backend& backward, const Backend& forward);

// Whether a path documents that it declines such a call for this reason.
bool MayReject(const Rejection& rejection, const AttentionProblem& problem, Pass pass);

// Registers the listener that prints the largest error / bound per tensor and path at the end.
// Call once, before RUN_ALL_TESTS().
void PrintRatiosAtEnd();

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_CHECK_H_
