#include "client/cli/check.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

// The index of element `flat`: "[1, 0, 7]".
std::string IndexString(const std::vector<int64_t>& shape, int64_t flat) {
  std::vector<int64_t> index(shape.size());
  for (size_t axis = shape.size(); axis > 0; --axis) {
    index[axis - 1] = flat % shape[axis - 1];
    flat /= shape[axis - 1];
  }
  return ShapeString(index);
}

FileTensor AsFileTensor(const NamedTensor& named) {
  const FileDType dtype = ToFileDType(named.tensor.dtype);
  return {
      named.name,        dtype, std::string(Name(dtype)), named.tensor.shape, named.tensor.owner,
      named.tensor.bytes};
}

TensorCheck Compare(const NamedTensor& result, const FileTensor& expected, double tolerance) {
  TensorCheck check{.name = result.name, .tolerance = tolerance, .problem = {}};
  if (result.tensor.shape != expected.shape) {
    check.problem =
        Cat("shape ", ShapeString(result.tensor.shape), ", expected ", ShapeString(expected.shape));
    return check;
  }
  const FileTensor actual = AsFileTensor(result);
  const int64_t count = actual.NumElements();
  for (int64_t i = 0; i < count; ++i) {
    const double a = ElementAsDouble(actual, i);
    const double e = ElementAsDouble(expected, i);
    if (std::isfinite(a) && std::isfinite(e)) {
      check.max_abs_error = std::max(check.max_abs_error, std::abs(a - e));
      check.max_expected = std::max(check.max_expected, std::abs(e));
    } else if (!(a == e) && check.problem.empty()) {
      check.problem =
          absl::StrFormat("%s is %g, expected %g", IndexString(expected.shape, i), a, e);
    }
  }
  check.error =
      check.max_expected > 0 ? check.max_abs_error / check.max_expected : check.max_abs_error;
  check.passed = check.problem.empty() && check.error <= tolerance;
  return check;
}

}  // namespace

double DefaultTolerance(std::string_view name, client::v1::DType dtype) {
  if (name == "lse" || dtype == client::v1::DTYPE_FP32) return 1e-5;
  return dtype == client::v1::DTYPE_FP16 ? 2e-3 : 1.6e-2;
}

absl::StatusOr<std::vector<TensorCheck>> CheckResults(const std::vector<NamedTensor>& results,
                                                      const TensorMap& expected,
                                                      const std::string& prefix,
                                                      client::v1::DType dtype,
                                                      std::optional<double> tolerance) {
  std::vector<TensorCheck> checks;
  for (const NamedTensor& result : results) {
    auto found = expected.find(prefix + result.name);
    // A .npy file holds the first result, out or dq.
    if (found == expected.end() && result.name == results.front().name) found = expected.find("");
    if (found == expected.end()) continue;
    if (found->second.dtype == FileDType::kOther) {
      return absl::InvalidArgumentError(Cat(found->second.source, ": elements are ",
                                            found->second.dtype_name,
                                            ", which cannot be compared"));
    }
    checks.push_back(
        Compare(result, found->second, tolerance.value_or(DefaultTolerance(result.name, dtype))));
  }
  if (checks.empty()) {
    std::string names;
    for (const NamedTensor& result : results) names += Cat(names.empty() ? "" : ", ", result.name);
    return absl::InvalidArgumentError(Cat("has none of the results ", names));
  }
  return checks;
}

bool AllPassed(const std::vector<TensorCheck>& checks) {
  return std::all_of(checks.begin(), checks.end(), [](const TensorCheck& c) { return c.passed; });
}

std::string RenderChecks(const std::vector<TensorCheck>& checks, const Style& style) {
  Table table(2);
  table.Add({style.Dim("tensor"), style.Dim("max |error|"), style.Dim("/ max |expected|"),
             style.Dim("tolerance"), ""});
  for (const TensorCheck& check : checks) {
    const std::string verdict = check.passed ? style.Green("ok") : style.Red("FAILED");
    table.Add({check.name, absl::StrFormat("%.3g", check.max_abs_error),
               absl::StrFormat("%.3g", check.error), absl::StrFormat("%.3g", check.tolerance),
               check.problem.empty() ? verdict : Cat(verdict, ": ", check.problem)});
  }
  return Cat(style.Bold("check"), "\n", table.ToString());
}

}  // namespace attn::cli
