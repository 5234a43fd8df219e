// --check: results against expected tensors.
#ifndef ATTN_CLIENT_CLI_CHECK_H_
#define ATTN_CLIENT_CLI_CHECK_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/format.h"
#include "client/cli/tensor_io.h"

namespace attn::cli {

// How one tensor compares. The error of a tensor is max |result - expected| / max |expected| over
// its finite elements (the absolute error where every expected element is 0). Infinities must be
// equal, and a NaN on either side never passes.
struct TensorCheck {
  std::string name;
  double max_abs_error = 0;
  double max_expected = 0;
  double error = 0;
  double tolerance = 0;
  bool passed = false;
  std::string problem;  // what no number can say: shapes that differ, NaN, a missing infinity
};

// Tolerance of results of a call whose q has `dtype`: a few roundings of the dtype. fp32 1e-5, fp16
// 2e-3, bf16 1.6e-2; lse is always computed in fp32: 1e-5.
double DefaultTolerance(std::string_view name, client::v1::DType dtype);

// Checks every result that `expected` has a tensor for (named prefix + name). Errors:
// INVALID_ARGUMENT where there is none at all, or one is not numeric.
absl::StatusOr<std::vector<TensorCheck>> CheckResults(const std::vector<NamedTensor>& results,
                                                      const TensorMap& expected,
                                                      const std::string& prefix,
                                                      client::v1::DType dtype,
                                                      std::optional<double> tolerance);

bool AllPassed(const std::vector<TensorCheck>& checks);
std::string RenderChecks(const std::vector<TensorCheck>& checks, const Style& style);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_CHECK_H_
