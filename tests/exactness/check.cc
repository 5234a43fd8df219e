#include "tests/exactness/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"

namespace attn::exactness {
namespace {

struct Compared {
  double worst = 0;  // the largest error / bound so far
  int64_t tensors = 0;
};

// By path, then tensor. Tests run on one thread.
std::map<std::string, std::map<std::string, Compared>>& Ratios() {
  static auto* const kRatios = new std::map<std::string, std::map<std::string, Compared>>;
  return *kRatios;
}

void CheckTensor(const reference::Tensor& want, const GuardedBuffer& got, DType dtype,
                 const std::string& who, const char* tensor, std::vector<Fault>& faults) {
  const int64_t bytes = static_cast<int64_t>(want.value.size()) * SizeOf(dtype);
  if (got.bytes() != bytes) {
    faults.push_back({absl::StrCat(who, " ", tensor),
                      absl::StrCat("has ", got.bytes(), " bytes, want ", bytes)});
    return;
  }
  const reference::Verdict verdict = reference::Compare(want, got.data(), dtype);
  if (want.empty()) return;
  Compared& compared = Ratios()[who.substr(0, who.find(' '))][tensor];
  compared.worst = std::max(compared.worst, verdict.ratio);
  ++compared.tensors;
  if (!verdict.ok()) faults.push_back({absl::StrCat(who, " ", tensor), verdict.ToString()});
}

std::string Reasons(const std::vector<Rejection>& rejections) {
  std::string s;
  for (const Rejection& r : rejections) absl::StrAppend(&s, Sentence(r), " ");
  return s;
}

}  // namespace

bool MayReject(const Rejection& r, const AttentionProblem& p, Pass pass) {
  const bool sm90 = r.path == PathId::kFlashSm90;
  const bool tensor_cores = sm90 || r.path == PathId::kFlashSm80;
  if (r.reason == Reason::kDtypeUnsupported) return tensor_cores && p.dtype == DType::kFp32;
  if (r.reason == Reason::kNotBuilt) return sm90 && pass == Pass::kBackward;
  if (r.reason == Reason::kAlignment) {
    // One head stored for all, and only one of k and v had to be packed, which stores each.
    const auto aligned = [&p](int64_t dim) { return dim * SizeOf(p.dtype) % 16 == 0; };
    return sm90 && p.k.head == 0 && p.v.head == 0 && aligned(p.head_dim) != aligned(p.head_dim_v);
  }
  if (r.reason == Reason::kHeadDimUnsupported) {
    return p.head_dim > 256 || p.head_dim_v > 256 ||
           (tensor_cores && (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0));
  }
  if (r.reason == Reason::kOptionUnsupported) {
    return (p.block_mask && (p.block_mask->block_q % 64 != 0 || p.block_mask->block_k % 64 != 0)) ||
           (sm90 && pass == Pass::kForward && p.seqlen_q <= 16) ||
           (r.path == PathId::kFlashSm80 && pass == Pass::kBackward && p.bwd_dout_dtype != p.dtype);
  }
  return false;
}

namespace {

bool AllMayReject(const std::vector<Rejection>& rejections, const AttentionProblem& p, Pass pass) {
  return std::all_of(rejections.begin(), rejections.end(),
                     [&](const Rejection& r) { return MayReject(r, p, pass); });
}

void Append(std::vector<Fault> from, std::vector<Fault>& to) {
  to.insert(to.end(), from.begin(), from.end());
}

class RatioPrinter : public ::testing::EmptyTestEventListener {
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    for (const auto& [path, tensors] : Ratios()) {
      std::printf("max(error / bound) of %s:", path.c_str());
      int64_t count = 0;
      for (const auto& [tensor, compared] : tensors) {
        std::printf(" %s %.3f", tensor.c_str(), compared.worst);
        count += compared.tensors;
      }
      std::printf("\ntensors compared on %s: %lld\n", path.c_str(), static_cast<long long>(count));
    }
  }
};

}  // namespace

std::vector<Fault> CheckForward(const reference::Result& want, const ForwardOutputs& got,
                                const std::string& who) {
  std::vector<Fault> faults;
  CheckTensor(want.out, got.out, got.dtype, who, "out", faults);
  CheckTensor(want.lse, got.lse, DType::kFp32, who, "lse", faults);
  return faults;
}

std::vector<Fault> CheckBackward(const reference::Result& want, const BackwardOutputs& got,
                                 const std::string& who) {
  std::vector<Fault> faults;
  CheckTensor(want.dq, got.dq, got.dtype, who, "dq", faults);
  CheckTensor(want.dk, got.dk, got.dtype, who, "dk", faults);
  CheckTensor(want.dv, got.dv, got.dtype, who, "dv", faults);
  CheckTensor(want.dbias, got.dbias, DType::kFp32, who, "dbias", faults);
  CheckTensor(want.dsink, got.dsink, DType::kFp32, who, "dsink", faults);
  return faults;
}

std::vector<const Backend*> Takers(const AttentionProblem& problem, Pass pass,
                                   std::span<const Backend* const> backends) {
  std::vector<const Backend*> takers;
  for (const Backend* backend : backends) {
    std::vector<Rejection> rejections;
    backend->AppendRejections(problem, pass, &rejections);
    if (rejections.empty()) takers.push_back(backend);
  }
  return takers;
}

const Backend* BackwardOf(const Backend& forward, const AttentionProblem& problem,
                          std::span<const Backend* const> backends) {
  const Backend* const own[] = {&forward};
  if (!Takers(problem, Pass::kBackward, own).empty()) return &forward;
  const std::vector<const Backend*> others = Takers(problem, Pass::kBackward, backends);
  return others.empty() ? nullptr : others.front();
}

std::string BackwardName(const Backend& backward, const Backend& forward) {
  std::string name = absl::StrCat(std::string(Name(backward.path())), " backward");
  if (&forward != &backward) {
    absl::StrAppend(&name, " (out, lse of ", std::string(Name(forward.path())), ")");
  }
  return name;
}

std::vector<Fault> CheckCall(const Call& call, std::span<const Backend* const> backends) {
  const absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kBackward);
  if (!problem.ok()) return {{"Validate", problem.status().ToString()}};
  std::vector<Fault> faults;
  std::vector<std::pair<const Backend*, ForwardOutputs>> forwards;
  const reference::Result want = reference::Compute(call.spec(), call.data(), {.backward = true});
  for (const Backend* backend : backends) {
    const std::string path(Name(backend->path()));
    std::vector<Rejection> rejections;
    backend->AppendRejections(*problem, Pass::kForward, &rejections);
    for (const Rejection& r : rejections) {
      if (!MayReject(r, *problem, Pass::kForward))
        faults.push_back({path + " rejects the call", Sentence(r)});
    }
    if (!rejections.empty()) continue;
    absl::StatusOr<ForwardOutputs> forward = RunForward(*backend, call);
    if (!forward.ok()) {
      faults.push_back({path + " forward", forward.status().ToString()});
      continue;
    }
    Append(CheckForward(want, *forward, path + " forward"), faults);
    forwards.emplace_back(backend, *std::move(forward));
  }
  if (forwards.empty()) faults.push_back({"no backend ran the call", ""});
  for (const auto& [backend, own] : forwards) {
    const std::string path(Name(backend->path()));
    std::vector<Rejection> rejections;
    backend->AppendRejections(*problem, Pass::kBackward, &rejections);
    if (!rejections.empty()) {
      if (!AllMayReject(rejections, *problem, Pass::kBackward)) {
        faults.push_back({path + " takes forward but not backward", Reasons(rejections)});
      }
      continue;
    }
    for (const auto& [source, forward] : forwards) {
      const std::string who = BackwardName(*backend, *source);
      const absl::StatusOr<BackwardOutputs> backward = RunBackward(*backend, call, forward);
      if (!backward.ok()) {
        faults.push_back({who, backward.status().ToString()});
        continue;
      }
      Append(CheckBackward(want, *backward, who), faults);
    }
  }
  return faults;
}

void ExpectExact(const Case& c, std::span<const Backend* const> backends, const Values& values) {
  const Call call(c, values);
  const std::vector<Fault> faults = CheckCall(call, backends);
  if (faults.empty()) return;
  const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
  for (const Fault& fault : faults) {
    ADD_FAILURE() << fault.what << ": " << fault.details << "\n  case " << c
                  << "\n  repro: " << ::testing::internal::GetArgvs()[0]
                  << " --gtest_filter=" << info->test_suite_name() << "." << info->name();
  }
}

void PrintRatiosAtEnd() {
  ::testing::UnitTest::GetInstance()->listeners().Append(new RatioPrinter);
}

}  // namespace attn::exactness
