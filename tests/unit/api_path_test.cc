#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A backend that has the reasons it is given.
class FakeBackend : public Backend {
 public:
  explicit FakeBackend(PathId path, std::vector<std::pair<Reason, std::string>> reasons = {},
                       int64_t workspace_bytes = 0)
      : path_(path), reasons_(std::move(reasons)), workspace_bytes_(workspace_bytes) {}

  PathId path() const override { return path_; }
  void AppendRejections(const AttentionProblem&, Pass,
                        std::vector<Rejection>* rejections) const override {
    for (const auto& [reason, detail] : reasons_) rejections->push_back({path_, reason, detail});
  }
  std::string KernelId(const AttentionProblem&, Pass) const override { return "fake"; }
  int64_t WorkspaceBytes(const AttentionProblem&, Pass) const override { return workspace_bytes_; }
  TileModel Model(const AttentionProblem&, Pass) const override { return {}; }
  absl::Status Forward(const AttentionProblem&, const ForwardTensors&,
                       const RunContext&) const override {
    return absl::OkStatus();
  }
  absl::Status Backward(const AttentionProblem&, const BackwardTensors&,
                        const RunContext&) const override {
    return absl::OkStatus();
  }

 private:
  PathId path_;
  std::vector<std::pair<Reason, std::string>> reasons_;
  int64_t workspace_bytes_;
};

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class SelectPathTest : public ::testing::Test {
 protected:
  // A host without a GPU: the CUDA paths are candidates that cannot run.
  std::vector<PathCandidate> CpuHost() {
    std::vector<PathCandidate> candidates;
    for (PathId path : {PathId::kFlashSm90, PathId::kFlashSm80, PathId::kStandardCuda}) {
      candidates.push_back({path, nullptr, {{path, Reason::kNoCudaDevice, ""}}});
    }
    candidates.push_back({PathId::kFlashCpu, &flash_cpu_, {}});
    candidates.push_back({PathId::kStandardCpu, &standard_cpu_, {}});
    return candidates;
  }

  // A host with a GPU and cpu_fallback on.
  std::vector<PathCandidate> CudaHost() {
    return {{PathId::kFlashSm90, &flash_sm90_, {}},
            {PathId::kFlashSm80, &flash_sm80_, {}},
            {PathId::kStandardCuda, &standard_cuda_, {}},
            {PathId::kFlashCpu, &flash_cpu_, {}},
            {PathId::kStandardCpu, &standard_cpu_, {}}};
  }

  PathChoice Select(const PathPolicy& policy, const std::vector<PathCandidate>& candidates,
                    int64_t workspace_limit = kNoLimit) {
    return SelectPath(problem_, Pass::kForward, policy, candidates, workspace_limit);
  }

  AttentionProblem problem_ = *Validate(BshdSpec(), Pass::kForward);
  FakeBackend flash_sm90_{PathId::kFlashSm90};
  FakeBackend flash_sm80_{PathId::kFlashSm80};
  FakeBackend standard_cuda_{PathId::kStandardCuda};
  FakeBackend flash_cpu_{PathId::kFlashCpu};
  FakeBackend standard_cpu_{PathId::kStandardCpu};
};

std::vector<std::string> Texts(const PathChoice& choice) {
  std::vector<std::string> texts;
  for (const Rejection& rejection : choice.rejections) {
    texts.push_back(std::string(Name(rejection.path)) + ":" + std::string(Name(rejection.reason)));
  }
  return texts;
}

TEST_F(SelectPathTest, AutoTakesTheFirstThatCan) {
  const PathChoice choice = Select({}, CudaHost());
  EXPECT_EQ(choice.path, PathId::kFlashSm90);
  EXPECT_EQ(choice.backend, &flash_sm90_);
  EXPECT_THAT(choice.rejections, IsEmpty());
}

TEST_F(SelectPathTest, AutoOnACpuHostSaysWhyNoCudaPathRan) {
  const PathChoice choice = Select({}, CpuHost());
  EXPECT_EQ(choice.path, PathId::kFlashCpu);
  EXPECT_THAT(Texts(choice), ElementsAre("flash_sm90:NO_CUDA_DEVICE", "flash_sm80:NO_CUDA_DEVICE",
                                         "standard_cuda:NO_CUDA_DEVICE"));
}

TEST_F(SelectPathTest, EveryReasonOfAPathIsListed) {
  FakeBackend picky(PathId::kFlashCpu, {{Reason::kHeadDimUnsupported, "head_dim 264 > 256"},
                                        {Reason::kOptionUnsupported, "block_mask.block_q 32"}});
  const std::vector<PathCandidate> candidates = {
      {PathId::kFlashCpu, &picky, {{PathId::kFlashCpu, Reason::kSelfTestFailed, "case 3"}}},
      {PathId::kStandardCpu, &standard_cpu_, {}}};
  const PathChoice choice = Select({}, candidates);
  EXPECT_EQ(choice.path, PathId::kStandardCpu);
  EXPECT_THAT(
      choice.rejections,
      ElementsAre(
          Rejection{PathId::kFlashCpu, Reason::kSelfTestFailed, "case 3"},
          Rejection{PathId::kFlashCpu, Reason::kHeadDimUnsupported, "head_dim 264 > 256"},
          Rejection{PathId::kFlashCpu, Reason::kOptionUnsupported, "block_mask.block_q 32"}));
}

TEST_F(SelectPathTest, AStandingReasonExcludesAPathWithABackend) {
  std::vector<PathCandidate> candidates = CpuHost();
  candidates[3].standing = {{PathId::kFlashCpu, Reason::kDisabledByConfig, ""}};
  const PathChoice choice = Select({}, candidates);
  EXPECT_EQ(choice.path, PathId::kStandardCpu);
  EXPECT_EQ(Texts(choice).back(), "flash_cpu:DISABLED_BY_CONFIG");
}

TEST_F(SelectPathTest, NoBackendAndNoReasonIsNotBuilt) {
  const std::vector<PathCandidate> candidates = {{PathId::kFlashSm90, nullptr, {}},
                                                 {PathId::kFlashCpu, &flash_cpu_, {}}};
  EXPECT_THAT(Texts(Select({}, candidates)), ElementsAre("flash_sm90:NOT_BUILT"));
}

TEST_F(SelectPathTest, WorkspaceLimitNamesBothNumbers) {
  FakeBackend hungry(PathId::kStandardCuda, {}, 1001);
  const std::vector<PathCandidate> candidates = {{PathId::kStandardCuda, &hungry, {}},
                                                 {PathId::kFlashCpu, &flash_cpu_, {}}};
  EXPECT_EQ(Select({}, candidates, 1001).path, PathId::kStandardCuda);
  const PathChoice choice = Select({}, candidates, 1000);
  EXPECT_EQ(choice.path, PathId::kFlashCpu);
  EXPECT_THAT(choice.rejections,
              ElementsAre(Rejection{PathId::kStandardCuda, Reason::kWorkspaceLimit,
                                    "workspace 1001 bytes > 1000 bytes"}));
}

TEST_F(SelectPathTest, RequireFlashTakesCpuFlashOnlyWithoutGpus) {
  const PathPolicy policy{PolicyMode::kRequireFlash, {}};
  EXPECT_EQ(Select(policy, CpuHost()).path, PathId::kFlashCpu);
  EXPECT_EQ(Select(policy, CudaHost()).path, PathId::kFlashSm90);

  // The GPU's flash paths are off, CPU fallback is on: still no flash.
  std::vector<PathCandidate> candidates = CudaHost();
  candidates[0].standing = {{PathId::kFlashSm90, Reason::kDisabledByConfig, ""}};
  candidates[1].standing = {{PathId::kFlashSm80, Reason::kArchUnsupported, "sm_75"}};
  const PathChoice choice = Select(policy, candidates);
  EXPECT_EQ(choice.backend, nullptr);
  EXPECT_FALSE(choice.path.has_value());
  EXPECT_THAT(Texts(choice),
              ElementsAre("flash_sm90:DISABLED_BY_CONFIG", "flash_sm80:ARCH_UNSUPPORTED",
                          "standard_cuda:POLICY", "flash_cpu:POLICY", "standard_cpu:POLICY"));
}

TEST_F(SelectPathTest, CpuFallbackDisabledIsAStandingReason) {
  FakeBackend refusing(PathId::kFlashSm90, {{Reason::kDtypeUnsupported, "FP32"}});
  std::vector<PathCandidate> candidates = {{PathId::kFlashSm90, &refusing, {}}};
  for (const auto& [path, backend] : {std::pair{PathId::kFlashCpu, &flash_cpu_},
                                      std::pair{PathId::kStandardCpu, &standard_cpu_}}) {
    candidates.push_back({path, backend, {{path, Reason::kCpuFallbackDisabled, ""}}});
  }
  EXPECT_THAT(Texts(Select({}, candidates)),
              ElementsAre("flash_sm90:DTYPE_UNSUPPORTED", "flash_cpu:CPU_FALLBACK_DISABLED",
                          "standard_cpu:CPU_FALLBACK_DISABLED"));
  EXPECT_THAT(
      Texts(Select({PolicyMode::kRequireFlash, {}}, candidates)),
      ElementsAre("flash_sm90:DTYPE_UNSUPPORTED", "flash_cpu:CPU_FALLBACK_DISABLED",
                  "flash_cpu:POLICY", "standard_cpu:CPU_FALLBACK_DISABLED", "standard_cpu:POLICY"));
}

TEST_F(SelectPathTest, ForceStandardTakesTheFastestStandardPath) {
  const PathPolicy policy{PolicyMode::kForceStandard, {}};
  EXPECT_EQ(Select(policy, CudaHost()).path, PathId::kStandardCuda);
  const PathChoice choice = Select(policy, CpuHost());
  EXPECT_EQ(choice.path, PathId::kStandardCpu);
  EXPECT_EQ(Texts(choice).back(), "flash_cpu:POLICY");
}

TEST_F(SelectPathTest, NamedTakesThatPathOrNone) {
  for (PathId path : kAllPaths) {
    EXPECT_EQ(Select({PolicyMode::kNamed, path}, CudaHost()).path, path);
  }
  const PathPolicy policy{PolicyMode::kNamed, PathId::kFlashSm80};
  const PathChoice choice = Select(policy, CpuHost());
  EXPECT_EQ(choice.backend, nullptr);
  EXPECT_THAT(Texts(choice),
              ElementsAre("flash_sm90:NO_CUDA_DEVICE", "flash_sm90:POLICY",
                          "flash_sm80:NO_CUDA_DEVICE", "standard_cuda:NO_CUDA_DEVICE",
                          "standard_cuda:POLICY", "flash_cpu:POLICY", "standard_cpu:POLICY"));
}

TEST_F(SelectPathTest, UnmetPolicyErrorNamesThePolicyAndEveryReason) {
  const PathPolicy policy{PolicyMode::kNamed, PathId::kFlashSm90};
  const absl::Status status = UnmetPolicyError(policy, Select(policy, CpuHost()));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("path_policy NAMED flash_sm90 cannot be met: flash_sm90: "
                                      "NO_CUDA_DEVICE; flash_sm80: NO_CUDA_DEVICE"));
  EXPECT_THAT(Text(status), HasSubstr("flash_cpu: POLICY (the request names flash_sm90)"));

  FakeBackend hungry(PathId::kStandardCpu, {}, 10);
  const std::vector<PathCandidate> candidates = {{PathId::kStandardCpu, &hungry, {}}};
  EXPECT_THAT(Text(UnmetPolicyError({}, Select({}, candidates, 1))),
              HasSubstr("path_policy AUTO cannot be met: standard_cpu: WORKSPACE_LIMIT (workspace "
                        "10 bytes > 1 bytes)"));
  EXPECT_THAT(Text(UnmetPolicyError({}, Select({}, {}))), HasSubstr("this server has no path"));
}

TEST(PathNamesTest, NamesAreStableAndRoundTrip) {
  EXPECT_EQ(Name(PathId::kFlashSm90), "flash_sm90");
  EXPECT_EQ(Name(PathId::kFlashSm80), "flash_sm80");
  EXPECT_EQ(Name(PathId::kStandardCuda), "standard_cuda");
  EXPECT_EQ(Name(PathId::kFlashCpu), "flash_cpu");
  EXPECT_EQ(Name(PathId::kStandardCpu), "standard_cpu");
  for (PathId path : kAllPaths) EXPECT_EQ(PathFromName(Name(path)), path);
  EXPECT_EQ(PathFromName("flash"), std::nullopt);
  EXPECT_EQ(PathFromName(""), std::nullopt);
}

TEST(PathNamesTest, ClassAndDevice) {
  EXPECT_EQ(ClassOf(PathId::kFlashCpu), PathClass::kFlash);
  EXPECT_EQ(ClassOf(PathId::kStandardCuda), PathClass::kStandard);
  EXPECT_EQ(DeviceOf(PathId::kStandardCuda), DeviceKind::kCuda);
  EXPECT_EQ(DeviceOf(PathId::kFlashCpu), DeviceKind::kCpu);
  EXPECT_EQ(Name(PathClass::kFlash), "flash");
  EXPECT_EQ(Name(PathClass::kStandard), "standard");
  EXPECT_EQ(Name(DeviceKind::kCpu), "cpu");
  EXPECT_EQ(Name(DeviceKind::kCuda), "cuda");
}

TEST(PathNamesTest, EveryReasonHasItsOwnNameAndSentence) {
  std::set<std::string> names;
  std::set<std::string> sentences;
  for (Reason reason : kAllReasons) {
    names.insert(std::string(Name(reason)));
    sentences.insert(Sentence({PathId::kFlashSm90, reason, ""}));
  }
  EXPECT_EQ(names.size(), kAllReasons.size());
  EXPECT_EQ(sentences.size(), kAllReasons.size());
  EXPECT_EQ(names.count("UNKNOWN"), 0u);
  EXPECT_EQ(Sentence({PathId::kFlashCpu, Reason::kHeadDimUnsupported, "head_dim 264 > 256"}),
            "flash_cpu is not used because head_dim 264 > 256 (HEAD_DIM_UNSUPPORTED).");
}

}  // namespace
}  // namespace attn
