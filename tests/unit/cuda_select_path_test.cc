// Which path a host with a GPU takes, and why not a faster one. The paths are the real ones, the
// devices are made up: choosing needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/api/path.h"
#include "kernels/cuda/backends.h"
#include "tests/exactness/call.h"
#include "tests/unit/api_test_util.h"
#include "tests/unit/cuda_fake_driver.h"

namespace attn::cuda {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

#ifdef ATTN_HAVE_SM90
constexpr PathId kFastest = PathId::kFlashSm90;
#else  // CMAKE_CUDA_ARCHITECTURES has no 90
constexpr PathId kFastest = PathId::kFlashSm80;
#endif

class CudaSelectPathTest : public ::testing::Test {
 protected:
  void SetUp() override { MakeHost(9, 0, int64_t{1} << 40); }
  void MakeHost(int major, int minor, int64_t memory_limit) {
    backends_.clear();
    driver_ = std::make_unique<FakeDriver>(1);
    driver_->set_capability(0, major, minor);
    const auto set =
        DeviceSet::Create({.memory_limit_bytes = memory_limit, .lanes = 1}, driver_.get());
    ASSERT_TRUE(set.ok()) << set.status();
    backends_ = MakeCudaBackends(*set);
    candidates_.clear();
    for (const auto& backend : backends_) {
      candidates_.push_back({.path = backend->path(), .backend = backend.get(), .standing = {}});
    }
  }
  PathChoice Choose(const AttentionSpec& spec, Pass pass = Pass::kForward,
                    const PathPolicy& policy = {}) {
    const auto problem = Validate(spec, pass);
    EXPECT_TRUE(problem.ok()) << problem.status();
    // The limit of host memory is 0: it does not concern devices.
    return SelectPath(*problem, pass, policy, candidates_, 0);
  }
  static std::vector<Reason> Reasons(const PathChoice& choice) {
    std::vector<Reason> reasons;
    for (const Rejection& r : choice.rejections) reasons.push_back(r.reason);
    return reasons;
  }

  std::unique_ptr<FakeDriver> driver_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<PathCandidate> candidates_;
};

AttentionSpec Spec(DType dtype, int64_t head_dim = 64) {
  return BshdSpec({.seqlen_q = 100, .seqlen_k = 100, .head_dim = head_dim, .head_dim_v = head_dim},
                  dtype);
}

TEST_F(CudaSelectPathTest, SixteenBitsGoToFlash) {
  for (DType dtype : {DType::kFp16, DType::kBf16}) {
    const PathChoice choice = Choose(Spec(dtype), Pass::kForward, {PolicyMode::kRequireFlash});
    EXPECT_EQ(choice.path, kFastest);
    EXPECT_TRUE(choice.rejections.empty());
  }
}

#ifdef ATTN_HAVE_SM90

TEST_F(CudaSelectPathTest, OnlyHopperHasFlashSm90) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {10, 0}, {12, 0}}) {
    MakeHost(major, minor, int64_t{1} << 40);
    const PathChoice choice = Choose(Spec(DType::kBf16));
    EXPECT_EQ(choice.path, PathId::kFlashSm80);
    ASSERT_EQ(choice.rejections.size(), 1u);
    EXPECT_EQ(choice.rejections[0].path, PathId::kFlashSm90);
    EXPECT_EQ(choice.rejections[0].reason, Reason::kArchUnsupported);
    EXPECT_THAT(choice.rejections[0].detail, HasSubstr("not 9.0"));
  }
}

TEST_F(CudaSelectPathTest, BackwardGoesToFlashSm80WithTheReason) {
  AttentionSpec spec = Spec(DType::kBf16);
  spec.out = spec.dout = spec.q;
  spec.lse = TensorSpec{.dtype = DType::kFp32, .shape = {2, spec.num_heads, 100}, .strides = {}};
  const PathChoice choice = Choose(spec, Pass::kBackward);
  EXPECT_EQ(choice.path, PathId::kFlashSm80);
  EXPECT_THAT(Reasons(choice), ::testing::ElementsAre(Reason::kNotBuilt));
  const PathPolicy named{.mode = PolicyMode::kNamed, .path = PathId::kFlashSm90};
  const PathChoice refused = Choose(spec, Pass::kBackward, named);
  EXPECT_EQ(refused.backend, nullptr);
  const absl::Status error = UnmetPolicyError(named, refused);
  EXPECT_EQ(error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(error.message()), HasSubstr("flash_sm90: NOT_BUILT (pass backward"));
}

#endif  // ATTN_HAVE_SM90

TEST_F(CudaSelectPathTest, WhatFlashCannotTakeGoesToStandardWithTheReason) {
  const PathChoice odd = Choose(Spec(DType::kBf16, 20));
  EXPECT_EQ(odd.path, PathId::kStandardCuda);
  EXPECT_THAT(Reasons(odd), Each(Reason::kHeadDimUnsupported));
  EXPECT_FALSE(odd.rejections.empty());
  const PathChoice refused =
      Choose(Spec(DType::kBf16, 264), Pass::kForward, {PolicyMode::kRequireFlash});
  EXPECT_EQ(refused.backend, nullptr);
  EXPECT_THAT(std::string(UnmetPolicyError({PolicyMode::kRequireFlash}, refused).message()),
              HasSubstr("flash_sm80: HEAD_DIM_UNSUPPORTED"));
}

// Rows that no kernel could load are repacked on the device, so nothing is refused for them.
TEST_F(CudaSelectPathTest, NoStrideIsRefused) {
  AttentionSpec spec = Spec(DType::kBf16);
  spec.q.strides = {100 * 4 * 67, 4 * 67, 67, 1};
  spec.k.strides = {100 * 131, 131, 65, 1};
  const PathChoice choice = Choose(spec);
  EXPECT_EQ(choice.path, kFastest) << ::testing::PrintToString(Reasons(choice).size());
}

TEST_F(CudaSelectPathTest, OldDevicesHaveNoPath) {
  MakeHost(7, 0, int64_t{1} << 40);
  const PathChoice choice = Choose(Spec(DType::kBf16));
  EXPECT_EQ(choice.backend, nullptr);
  EXPECT_THAT(Reasons(choice), Each(Reason::kArchUnsupported));
  EXPECT_FALSE(choice.rejections.empty());
}

TEST_F(CudaSelectPathTest, DeviceMemoryLimitsACall) {
  MakeHost(9, 0, int64_t{1} << 20);
  const PathChoice small = Choose(Spec(DType::kBf16));
  EXPECT_EQ(small.path, kFastest);
  const PathChoice large = Choose(
      BshdSpec({.batch = 8, .seqlen_q = 1000, .seqlen_k = 1000, .head_dim = 64, .head_dim_v = 64},
               DType::kBf16));
  EXPECT_EQ(large.backend, nullptr);
  EXPECT_THAT(Reasons(large), Each(Reason::kWorkspaceLimit));
  EXPECT_THAT(large.rejections[0].detail, HasSubstr("> 1048576 bytes of device memory"));
}

// Planning any valid call, empty ones too, works and gives either a path or reasons for all.
TEST_F(CudaSelectPathTest, EveryValidCallCanBePlanned) {
  std::vector<exactness::Case> cases = exactness::RandomCases(600, 99);
  for (const auto& [batch, rows, keys] :
       std::vector<std::array<int64_t, 3>>{{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {2, 0, 0}}) {
    for (DType dtype : {DType::kFp32, DType::kBf16}) {
      exactness::Case c;
      c.batch = batch;
      c.seqlen_q = rows;
      c.seqlen_k = keys;
      c.dtype = dtype;
      cases.push_back(c);
    }
  }
  int chosen = 0;
  for (const exactness::Case& c : cases) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      SCOPED_TRACE(exactness::Name(c));
      const auto problem = exactness::Call(c).Problem(pass);
      ASSERT_TRUE(problem.ok()) << problem.status();
      const PathChoice choice = SelectPath(*problem, pass, {}, candidates_, 0);
      if (choice.backend == nullptr) {
        EXPECT_GE(choice.rejections.size(), candidates_.size());
        continue;
      }
      ++chosen;
      EXPECT_FALSE(choice.backend->KernelId(*problem, pass).empty());
      EXPECT_GE(choice.backend->WorkspaceBytes(*problem, pass), 0);
      choice.backend->Model(*problem, pass);
    }
  }
  EXPECT_EQ(chosen, static_cast<int>(2 * cases.size())) << "standard_cuda takes every valid call";
}

}  // namespace
}  // namespace attn::cuda
