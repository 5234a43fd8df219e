// On 1,000 random requests, the path that SelectPath() names is the first that may run, and it
// runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

constexpr uint64_t kSeed = 424242;

// As a host has them that has the paths of this program only.
std::vector<PathCandidate> Candidates() {
  std::vector<PathCandidate> candidates;
  for (PathId path : kAllPaths) {
    PathCandidate c{.path = path, .backend = nullptr, .standing = {}};
    for (const Backend* backend : Paths()) {
      if (backend->path() == path) c.backend = backend;
    }
    if (c.backend == nullptr) {
      c.standing.push_back({path,
                            DeviceOf(path) == DeviceKind::kCuda ? Reason::kNoCudaDevice
                                                                : Reason::kCpuFallbackDisabled,
                            ""});
    }
    candidates.push_back(c);
  }
  return candidates;
}

bool PolicyAllows(const PathPolicy& policy, PathId path) {
  switch (policy.mode) {
    case PolicyMode::kAuto:
      return true;
    case PolicyMode::kRequireFlash:
      return ClassOf(path) == PathClass::kFlash;
    case PolicyMode::kForceStandard:
      return ClassOf(path) == PathClass::kStandard;
    case PolicyMode::kNamed:
      return path == policy.path;
  }
  return false;
}

// What SelectPath() should say, worked out here.
const Backend* FirstThatMayRun(const AttentionProblem& p, Pass pass, const PathPolicy& policy,
                               const std::vector<PathCandidate>& candidates, int64_t limit) {
  for (const PathCandidate& c : candidates) {
    if (c.backend == nullptr || !PolicyAllows(policy, c.path)) continue;
    std::vector<Rejection> rejections;
    c.backend->AppendRejections(p, pass, &rejections);
    const bool fits = c.backend->WorkspaceOnDevice() || c.backend->WorkspaceBytes(p, pass) <= limit;
    if (rejections.empty() && fits) return c.backend;
  }
  return nullptr;
}

// Every candidate ranked above the chosen one has a reason, in order of rank.
void ExpectReasons(const PathChoice& choice, const std::vector<PathCandidate>& candidates) {
  for (const PathCandidate& c : candidates) {
    if (c.path == choice.path) break;
    EXPECT_TRUE(std::any_of(choice.rejections.begin(), choice.rejections.end(),
                            [&c](const Rejection& r) { return r.path == c.path; }))
        << Name(c.path) << " was passed over without a reason";
  }
  EXPECT_TRUE(std::is_sorted(choice.rejections.begin(), choice.rejections.end(),
                             [](const auto& a, const auto& b) { return a.path < b.path; }));
}

TEST(SelectPathTest, NamedPathRunsOnRandomRequests) {
  const std::vector<PathCandidate> candidates = Candidates();
  std::map<std::string, int> chosen;
  uint64_t n = 0;
  for (Case c : RandomCases(1000, kSeed)) {
    const auto below = [&n](uint64_t limit) { return Mix(kSeed + n++) % limit; };
    if (below(10) == 0) c.dim = 264;  // for standard_cpu only
    const PathPolicy policy{.mode = static_cast<PolicyMode>(below(4)),
                            .path = kAllPaths[below(kAllPaths.size())]};
    const int64_t limit = below(4) == 0 ? int64_t{1} << (8 + below(16)) : int64_t{1} << 40;
    const Pass pass = below(2) == 0 ? Pass::kForward : Pass::kBackward;
    const Call call(c);
    const absl::StatusOr<AttentionProblem> problem = call.Problem(pass);
    ASSERT_TRUE(problem.ok()) << problem.status() << " " << c;
    const PathChoice choice = SelectPath(*problem, pass, policy, candidates, limit);
    ASSERT_EQ(choice.backend, FirstThatMayRun(*problem, pass, policy, candidates, limit)) << c;
    ExpectReasons(choice, candidates);
    if (choice.backend == nullptr) {
      EXPECT_EQ(UnmetPolicyError(policy, choice).code(), absl::StatusCode::kFailedPrecondition);
      ++chosen["none"];
      continue;
    }
    EXPECT_EQ(choice.path, choice.backend->path());
    ++chosen[std::string(Name(choice.backend->path()))];
    const absl::StatusOr<ForwardOutputs> forward = RunForward(*choice.backend, call);
    ASSERT_TRUE(forward.ok()) << forward.status() << " " << c;
    if (pass == Pass::kForward) continue;
    const absl::StatusOr<BackwardOutputs> backward = RunBackward(*choice.backend, call, *forward);
    ASSERT_TRUE(backward.ok()) << backward.status() << " " << c;
  }
  EXPECT_GT(chosen["none"], 50);
  for (const Backend* backend : Paths()) {
    EXPECT_GT(chosen[std::string(Name(backend->path()))], 50) << Name(backend->path());
  }
}

}  // namespace
}  // namespace attn::exactness
