#include "server/execution/self_test.h"

#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>

#include "kernels/api/problem.h"
#include "kernels/api/text.h"
#include "server/execution/test_problem.h"

namespace attn::server {
namespace {

// Odd, over one tile of 64, and three rows more than keys: rows 0 to 2 see nothing.
constexpr int64_t kRows = 70;
constexpr int64_t kKeys = 67;
constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 64;
constexpr int64_t kProbeKey = 34;

// Causal, bottom-right: row i sees keys 0 to i + kKeys - kRows.
int64_t Visible(int64_t row) { return std::max<int64_t>(0, row + 1 + kKeys - kRows); }

int64_t KvHead(int64_t head) { return head * kKvHeads / kHeads; }

// Unit roundoff of the exactness rule.
double Unit(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return 0x1p-11;
    case DType::kBf16:
      return 0x1p-8;
    default:
      return 0x1p-22;
  }
}

// Smallest step that counts: half a subnormal step for FP16.
double Eta(DType dtype) { return dtype == DType::kFp16 ? 0x1p-25 : 0x1p-100; }

absl::Status Compare(std::string_view tensor, int64_t token, int64_t head, int64_t d, double got,
                     double want, double tolerance) {
  if (got == want || std::abs(got - want) <= tolerance) return absl::OkStatus();
  return absl::InternalError(Cat(tensor, "[0, ", token, ", ", head, ", ", d, "] is ", got,
                                 "; expected ", want, " within ", tolerance));
}

// A forward case: what to put into q, k and v, and the exact softmax weight of each key before
// normalisation.
struct ForwardCase {
  std::string_view name;
  std::function<float(int64_t d)> q;
  std::function<float(int64_t key, int64_t d)> k;
  std::function<float(int64_t key, int64_t kv_head)> v;  // the same in every component
  std::function<double(int64_t key)> weight;
  double max_logit;
};

std::vector<ForwardCase> ForwardCases() {
  // q is 2^-3 in each of 64 components, k is 2^-3 times the level: q.k is the level, exactly.
  const auto level = [](int64_t key) { return static_cast<double>(key % 4); };
  return {
      {"counting", [](int64_t) { return 0.0f; }, [](int64_t, int64_t) { return 0.5f; },
       [](int64_t key, int64_t kv) { return static_cast<float>(key + 64 * kv); },
       [](int64_t) { return 1.0; }, 0.0},
      {"weights", [](int64_t) { return 0.125f; },
       [level](int64_t key, int64_t) { return static_cast<float>(0.125 * level(key)); },
       [](int64_t key, int64_t kv) { return static_cast<float>((key % 7) - 3 + kv); },
       [level](int64_t key) { return std::exp(level(key)); }, 3.0},
      {"probe", [](int64_t) { return 0.0f; }, [](int64_t, int64_t) { return 0.0f; },
       [](int64_t key, int64_t) { return key == kProbeKey ? 1.0f : 0.0f; },
       [](int64_t) { return 1.0; }, 0.0},
  };
}

absl::Status CheckForwardRow(const ForwardCase& test, const CallTensors& tensors, DType dtype,
                             int64_t row, int64_t head) {
  const int64_t n = Visible(row);
  double sum = 0, weighted = 0, magnitude = 0, values = 0;
  for (int64_t key = 0; key < n; ++key) {
    const double v = test.v(key, KvHead(head));
    sum += test.weight(key);
    weighted += test.weight(key) * v;
    magnitude += test.weight(key) * std::abs(v);
    values += std::abs(v);
  }
  const double lse = n == 0 ? -std::numeric_limits<double>::infinity() : std::log(sum);
  const double out = n == 0 ? 0 : weighted / sum;
  const double c = 0x1p-20 * test.max_logit;
  const double u = Unit(dtype);
  // Nothing but zeros was added up in rows without the probe: exactly 0 is due.
  const double tolerance =
      magnitude == 0 ? 0
                     : u * std::abs(out) + (u + c) * magnitude / sum + Eta(dtype) * (1 + values);
  if (absl::Status s = Compare("lse", row, head, 0, tensors.Lse(row, head), lse,
                               n == 0 ? 0 : 1e-5 * std::max(1.0, std::abs(lse)) + c);
      !s.ok()) {
    return s;
  }
  for (int64_t d = 0; d < kDim; ++d) {
    const double got = tensors.Out(row, head, d);
    if (absl::Status s = Compare("out", row, head, d, got, out, tolerance); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status TestForward(const Backend& backend, DType dtype, int device) {
  absl::StatusOr<AttentionProblem> problem = SelfTestProblem(Pass::kForward, dtype);
  if (!problem.ok()) return problem.status();
  CallTensors tensors(*problem);
  for (const ForwardCase& test : ForwardCases()) {
    for (int64_t d = 0; d < kDim; ++d) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t row = 0; row < kRows; ++row) tensors.SetQ(row, head, d, test.q(d));
      }
      for (int64_t kv = 0; kv < kKvHeads; ++kv) {
        for (int64_t key = 0; key < kKeys; ++key) {
          tensors.SetK(key, kv, d, test.k(key, d));
          tensors.SetV(key, kv, d, test.v(key, kv));
        }
      }
    }
    const auto run = tensors.Run(backend, Pass::kForward, device);
    if (!run.ok()) return run.status();
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t row = 0; row < kRows; ++row) {
        if (absl::Status s = CheckForwardRow(test, tensors, dtype, row, head); !s.ok()) {
          return absl::InternalError(Cat(test.name, ": ", s.message()));
        }
      }
    }
  }
  return absl::OkStatus();
}

// Backward. q is 1 in component 1 alone, k is key/64 in component 0 alone: logits are 0, P = 1/n.
// v is the key's number in component 0 alone and dout is 1 there, so dp_ij = j, row_dot_i = (n -
// 1)/2 and ds_ij = (j - (n - 1)/2)/n.
struct BackwardSums {
  double want = 0;       // the closed form
  double tolerance = 0;  // the exactness rule's sum
};

double Ds(int64_t n, int64_t key) {
  return (static_cast<double>(key) - static_cast<double>(n - 1) / 2) / static_cast<double>(n);
}

// w_ij of the exactness rule; logits are 0, so c_i = 0.
double W(int64_t n, int64_t key, DType dtype) {
  const double u = Unit(dtype);
  const double p = 1.0 / static_cast<double>(n);
  const double a = static_cast<double>(n - 1) / 2;  // sum over d of |dout||out|
  return u * (std::abs(Ds(n, key)) + p * a) + 0x1p-22 * p * static_cast<double>(key) + Eta(dtype);
}

BackwardSums ExpectedDq(int64_t row, DType dtype) {
  const double u = Unit(dtype);
  const int64_t n = Visible(row);
  // scale * sum_j ds_ij * j/64: the variance of 0 … n-1 is (n*n - 1)/12.
  BackwardSums sums;
  sums.want = n == 0 ? 0 : static_cast<double>(n * n - 1) / 12 / 64;
  for (int64_t key = 0; key < n; ++key) sums.tolerance += W(n, key, dtype) * key / 64.0;
  sums.tolerance += u * std::abs(sums.want) + Eta(dtype);
  return sums;
}

BackwardSums ExpectedDk(int64_t key, DType dtype) {
  const double u = Unit(dtype);
  BackwardSums sums;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t n = Visible(row);
    if (key >= n) continue;
    sums.want += Ds(n, key) * kHeads / kKvHeads;
    sums.tolerance += W(n, key, dtype) * kHeads / kKvHeads;
  }
  sums.tolerance += u * std::abs(sums.want) + Eta(dtype);
  return sums;
}

BackwardSums ExpectedDv(int64_t key, DType dtype) {
  const double u = Unit(dtype);
  BackwardSums sums;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t n = Visible(row);
    if (key >= n) continue;
    sums.want += 1.0 / static_cast<double>(n) * kHeads / kKvHeads;
    sums.tolerance += (u / static_cast<double>(n) + Eta(dtype)) * kHeads / kKvHeads;
  }
  sums.tolerance += u * std::abs(sums.want);
  return sums;
}

absl::Status CheckBackward(const CallTensors& tensors, DType dtype) {
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t row = 0; row < kRows; ++row) {
      const BackwardSums dq = ExpectedDq(row, dtype);
      for (int64_t d = 0; d < kDim; ++d) {
        absl::Status s = Compare("dq", row, head, d, tensors.Dq(row, head, d), d == 0 ? dq.want : 0,
                                 d == 0 ? dq.tolerance : 0);
        if (!s.ok()) return s;
      }
    }
  }
  for (int64_t kv = 0; kv < kKvHeads; ++kv) {
    for (int64_t key = 0; key < kKeys; ++key) {
      const BackwardSums dk = ExpectedDk(key, dtype);
      const BackwardSums dv = ExpectedDv(key, dtype);
      for (int64_t d = 0; d < kDim; ++d) {
        absl::Status s = Compare("dk", key, kv, d, tensors.Dk(key, kv, d), d == 1 ? dk.want : 0,
                                 d == 1 ? dk.tolerance : 0);
        if (!s.ok()) return s;
        s = Compare("dv", key, kv, d, tensors.Dv(key, kv, d), d == 0 ? dv.want : 0,
                    d == 0 ? dv.tolerance : 0);
        if (!s.ok()) return s;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status TestBackward(const Backend& backend, DType dtype, int device) {
  absl::StatusOr<AttentionProblem> problem = SelfTestProblem(Pass::kBackward, dtype);
  if (!problem.ok()) return problem.status();
  CallTensors tensors(*problem);
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t row = 0; row < kRows; ++row) {
      tensors.SetQ(row, head, 1, 1.0f);
      tensors.SetDout(row, head, 0, 1.0f);
    }
  }
  for (int64_t kv = 0; kv < kKvHeads; ++kv) {
    for (int64_t key = 0; key < kKeys; ++key) {
      tensors.SetK(key, kv, 0, static_cast<float>(key) / 64.0f);
      tensors.SetV(key, kv, 0, static_cast<float>(key));
    }
  }
  if (const auto run = tensors.Run(backend, Pass::kForward, device); !run.ok()) return run.status();
  if (const auto run = tensors.Run(backend, Pass::kBackward, device); !run.ok())
    return run.status();
  return CheckBackward(tensors, dtype);
}

bool Takes(const Backend& backend, DType dtype, Pass pass) {
  absl::StatusOr<AttentionProblem> problem = SelfTestProblem(pass, dtype);
  std::vector<Rejection> rejections;
  if (problem.ok()) backend.AppendRejections(*problem, pass, &rejections);
  return rejections.empty();  // a problem that does not validate fails the test itself
}

}  // namespace

absl::StatusOr<AttentionProblem> SelfTestProblem(Pass pass, DType dtype) {
  return MakeProblem(kRows, kKeys, kHeads, kKvHeads, kDim, dtype, /*causal=*/true, pass);
}

absl::Status SelfTestOnce(const Backend& backend, Pass pass, DType dtype, int device) {
  return pass == Pass::kForward ? TestForward(backend, dtype, device)
                                : TestBackward(backend, dtype, device);
}

std::vector<SelfTestResult> SelfTest(const Backend& backend, int device) {
  std::vector<SelfTestResult> results;
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
      if (!Takes(backend, dtype, pass)) continue;
      results.push_back(
          {backend.path(), pass, dtype, SelfTestOnce(backend, pass, dtype, device), device});
    }
  }
  return results;
}

std::vector<SelfTestResult> SelfTestOn(const Backend& backend,
                                       const std::vector<int>& cuda_devices) {
  const bool each = DeviceOf(backend.path()) == DeviceKind::kCuda && !cuda_devices.empty();
  std::vector<SelfTestResult> all;
  for (int device : each ? cuda_devices : std::vector<int>{-1}) {
    for (SelfTestResult& result : SelfTest(backend, device)) all.push_back(std::move(result));
  }
  return all;
}

std::vector<SelfTestResult> SelfTestAll(PathTable* paths, const std::vector<int>& cuda_devices) {
  std::vector<SelfTestResult> all;
  const PathTable::Snapshot snapshot = paths->candidates();
  for (const PathCandidate& candidate : *snapshot) {
    if (candidate.backend == nullptr || !candidate.standing.empty()) continue;
    std::vector<SelfTestResult> results = SelfTestOn(*candidate.backend, cuda_devices);
    for (const SelfTestResult& result : results) {
      if (result.status.ok()) continue;
      paths->Disable(candidate.path, Reason::kSelfTestFailed, FailureDetail(result));
      break;  // one reason is enough; the log has them all
    }
    std::move(results.begin(), results.end(), std::back_inserter(all));
  }
  return all;
}

std::string FailureDetail(const SelfTestResult& result) {
  return Cat(Name(result.pass), " ", Name(result.dtype),
             result.device < 0 ? "" : Cat(" on CUDA device ", result.device));
}

}  // namespace attn::server
