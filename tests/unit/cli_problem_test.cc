#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "client/cli/npy.h"
#include "client/cli/problem.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Problem Make(const std::vector<std::string>& arguments, Purpose purpose = Purpose::kForward) {
  absl::StatusOr<Problem> problem = MakeProblem(MustParse(arguments).problem, purpose);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return problem.ok() ? *std::move(problem) : Problem{};
}

std::string ErrorOf(const std::vector<std::string>& arguments,
                    Purpose purpose = Purpose::kForward) {
  absl::StatusOr<Problem> problem = MakeProblem(MustParse(arguments).problem, purpose);
  EXPECT_FALSE(problem.ok());
  return problem.ok() ? "" : std::string(problem.status().message());
}

TEST(ProblemTest, EveryOptionReachesTheHeader) {
  const Problem problem = Make({"forward",
                                "--random",
                                "--batch",
                                "2",
                                "--seqlen-q",
                                "5",
                                "--seqlen-k",
                                "7",
                                "--num-heads",
                                "4",
                                "--num-kv-heads",
                                "2",
                                "--head-dim",
                                "8",
                                "--head-dim-v",
                                "16",
                                "--dtype",
                                "bf16",
                                "--softmax-scale",
                                "0.5",
                                "--causal",
                                "--alignment",
                                "top-left",
                                "--window-left",
                                "3",
                                "--seqlens-q",
                                "5,1",
                                "--seqlens-k",
                                "7,2",
                                "--softcap",
                                "30",
                                "--dropout-p",
                                "0.25",
                                "--dropout-seed",
                                "18446744073709551615",
                                "--dropout-offset",
                                "9",
                                "--deterministic",
                                "--out-dtype",
                                "fp32",
                                "--policy",
                                "flash_cpu",
                                "--report-level",
                                "full",
                                "--bias",
                                "random",
                                "--alibi-slopes",
                                "standard",
                                "--sinks",
                                "random",
                                "--block-mask",
                                "random",
                                "--block-q",
                                "2",
                                "--block-k",
                                "4"});
  const v1::AttentionOptions& options = problem.header.options();
  EXPECT_EQ(problem.header.shape().layout(), v1::LAYOUT_BSHD);
  EXPECT_EQ(problem.header.shape().num_heads(), 4);
  EXPECT_EQ(problem.header.shape().num_kv_heads(), 2);
  EXPECT_EQ(options.softmax_scale(), 0.5f);
  EXPECT_TRUE(options.causal());
  EXPECT_EQ(options.alignment(), v1::ALIGNMENT_TOP_LEFT);
  EXPECT_EQ(options.window_left(), 3);
  EXPECT_FALSE(options.has_window_right());
  EXPECT_THAT(options.seqlens_q(), ElementsAre(5, 1));
  EXPECT_THAT(options.seqlens_k(), ElementsAre(7, 2));
  EXPECT_EQ(options.softcap(), 30);
  EXPECT_EQ(options.dropout().p(), 0.25f);
  EXPECT_EQ(options.dropout().seed(), ~uint64_t{0});
  EXPECT_EQ(options.dropout().offset(), 9u);
  EXPECT_EQ(options.block_mask().block_q(), 2);
  EXPECT_EQ(options.block_mask().block_k(), 4);
  EXPECT_TRUE(options.deterministic());
  EXPECT_EQ(options.out_dtype(), v1::DTYPE_FP32);
  EXPECT_EQ(problem.header.path_policy().mode(), v1::PATH_POLICY_NAMED);
  EXPECT_EQ(problem.header.path_policy().path(), "flash_cpu");
  EXPECT_EQ(problem.header.report_level(), v1::REPORT_LEVEL_FULL);
  EXPECT_THAT(problem.inputs.q.shape, ElementsAre(2, 5, 4, 8));
  EXPECT_THAT(problem.inputs.k.shape, ElementsAre(2, 7, 2, 8));
  EXPECT_THAT(problem.inputs.v.shape, ElementsAre(2, 7, 2, 16));
  EXPECT_EQ(problem.inputs.q.dtype, v1::DTYPE_BF16);
  EXPECT_THAT(problem.inputs.bias.shape, ElementsAre(1, 4, 5, 7));
  EXPECT_THAT(problem.inputs.alibi_slopes.shape, ElementsAre(4));
  EXPECT_THAT(problem.inputs.sinks.shape, ElementsAre(4));
  EXPECT_THAT(problem.inputs.block_mask.shape, ElementsAre(1, 4, 3, 2));

  const client::ForwardCall call = ToForward(problem);
  EXPECT_EQ(call.header.options().softcap(), 30);
  EXPECT_EQ(call.header.shape().num_kv_heads(), 2);
  EXPECT_EQ(call.header.path_policy().path(), "flash_cpu");
}

// Fields whose zero means something stay unset unless they are given.
TEST(ProblemTest, WhatIsNotGivenIsNotSet) {
  const Problem problem = Make({"forward", "--random", "--seqlen-q", "4"});
  const v1::AttentionOptions& options = problem.header.options();
  EXPECT_FALSE(options.has_softmax_scale() || options.has_window_left() ||
               options.has_window_right() || options.has_softcap() || options.has_dropout() ||
               options.has_block_mask());
  EXPECT_EQ(options.out_dtype(), v1::DTYPE_UNSPECIFIED);
  EXPECT_EQ(problem.header.path_policy().mode(), v1::PATH_POLICY_AUTO);
  EXPECT_THAT(problem.inputs.q.shape, ElementsAre(1, 4, 8, 64));
}

TEST(ProblemTest, RandomTensorsFollowTheSeed) {
  const auto bytes = [](const std::string& seed) {
    const Problem p = Make({"forward", "--random", "--seqlen-q", "64", "--seed", seed});
    return std::string(reinterpret_cast<const char*>(p.inputs.q.bytes.data()),
                       p.inputs.q.bytes.size());
  };
  EXPECT_EQ(bytes("7"), bytes("7"));
  EXPECT_NE(bytes("7"), bytes("8"));
  const std::string text = bytes("7");
  const float* values = reinterpret_cast<const float*>(text.data());
  const int count = static_cast<int>(text.size() / 4);
  double sum = 0, squares = 0;
  for (int i = 0; i < count; ++i) {
    sum += values[i];
    squares += static_cast<double>(values[i]) * values[i];
  }
  // Five standard errors of 32,768 Gaussian values.
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(2.0 / count));
}

TEST(ProblemTest, OneTensorsValuesDoNotHangOnAnothers) {
  const Problem a = Make({"forward", "--random", "--seqlen-q", "4", "--seqlen-k", "8"});
  const Problem b = Make({"forward", "--random", "--seqlen-q", "9", "--seqlen-k", "8"});
  ASSERT_EQ(a.inputs.v.bytes.size(), b.inputs.v.bytes.size());
  EXPECT_EQ(0,
            std::memcmp(a.inputs.v.bytes.data(), b.inputs.v.bytes.data(), a.inputs.v.bytes.size()));
  EXPECT_NE(0,
            std::memcmp(a.inputs.k.bytes.data(), a.inputs.v.bytes.data(), a.inputs.v.bytes.size()));
}

TEST(ProblemTest, PacksSequences) {
  const Problem equal =
      Make({"forward", "--random", "--layout", "thd", "--batch", "3", "--seqlen-q", "5"});
  EXPECT_THAT(equal.header.shape().cu_seqlens_q(), ElementsAre(0, 5, 10, 15));
  EXPECT_THAT(equal.inputs.q.shape, ElementsAre(15, 8, 64));
  const Problem given =
      Make({"forward", "--random", "--cu-seqlens-q", "0,2,9", "--cu-seqlens-k", "0,30,31"});
  EXPECT_EQ(given.header.shape().layout(), v1::LAYOUT_THD);
  EXPECT_THAT(given.inputs.k.shape, ElementsAre(31, 8, 64));
  const Extent extent = LargestSequence(given);  // 2 x 30 over 7 x 1
  EXPECT_EQ(extent.queries, 2);
  EXPECT_EQ(extent.keys, 30);
}

TEST(ProblemTest, ReadsOneFileWithEverything) {
  TempFolder folder;
  const std::string x = Raw(std::vector<float>(2 * 3 * 4, 1.0f));  // [2, 3, 4]
  const std::string cu = Raw<int32_t>({0, 2}), lse = Raw(std::vector<float>(6, 0.0f));
  const std::string path =
      folder.Write("in.safetensors",
                   SafetensorsFile({{"l0.q", FileDType::kF32, "", {2, 3, 4}, AsBytes(x)},
                                    {"l0.k", FileDType::kF32, "", {2, 3, 4}, AsBytes(x)},
                                    {"l0.v", FileDType::kF32, "", {2, 3, 4}, AsBytes(x)},
                                    {"l0.out", FileDType::kF32, "", {2, 3, 4}, AsBytes(x)},
                                    {"l0.dout", FileDType::kF32, "", {2, 3, 4}, AsBytes(x)},
                                    {"l0.lse", FileDType::kF32, "", {3, 2}, AsBytes(lse)},
                                    {"l0.cu_seqlens_q", FileDType::kI32, "", {2}, AsBytes(cu)},
                                    {"l0.cu_seqlens_k", FileDType::kI32, "", {2}, AsBytes(cu)}}));
  const Problem problem =
      Make({"backward", "--input", path, "--prefix", "l0."}, Purpose::kBackward);
  EXPECT_EQ(problem.header.shape().layout(), v1::LAYOUT_THD);
  EXPECT_THAT(problem.header.shape().cu_seqlens_k(), ElementsAre(0, 2));
  EXPECT_THAT(problem.lse.shape, ElementsAre(3, 2));
  EXPECT_FALSE(problem.dout.empty());
  EXPECT_TRUE(problem.dlse.empty());
  EXPECT_EQ(problem.Tensors().size(), 6u);
  // bf16 on request; out, which forward returned, keeps what FP32 holds.
  const Problem bf16 =
      Make({"backward", "--input", path, "--prefix", "l0.", "--dtype", "bf16"}, Purpose::kBackward);
  EXPECT_EQ(bf16.inputs.q.dtype, v1::DTYPE_BF16);
  EXPECT_EQ(bf16.dout.dtype, v1::DTYPE_BF16);
  EXPECT_EQ(bf16.out.dtype, v1::DTYPE_FP32);
  EXPECT_THAT(ErrorOf({"forward", "--input", path}),
              HasSubstr("in.safetensors: has no tensor 'q'"));
}

TEST(ProblemTest, SaysWhatIsMissing) {
  TempFolder folder;
  const std::vector<int64_t> shape = {1, 2, 1, 4};
  const std::string q =
      folder.Write("q.npy", NpyPrefix(FileDType::kF32, shape) + Raw(std::vector<float>(8, 1.0f)));
  EXPECT_THAT(ErrorOf({"forward"}), HasSubstr("no tensors"));
  EXPECT_THAT(ErrorOf({"forward", "--q", q, "--v", q}), HasSubstr("missing: --k"));
  EXPECT_THAT(ErrorOf({"forward", "--q", q, "--random"}), HasSubstr("--random"));
  EXPECT_THAT(ErrorOf({"forward", "--input", q}), HasSubstr("holds one tensor"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--dtype", "fp8"}), HasSubstr("--dtype fp8"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--out-dtype", "x"}), HasSubstr("--out-dtype x"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--dropout-p", "0.1"}), HasSubstr("--dropout-seed"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--block-q", "64"}), HasSubstr("--block-mask"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--seqlens-q", "1,x"}),
              HasSubstr("--seqlens-q 1,x: 'x' is neither"));
  EXPECT_THAT(ErrorOf({"forward", "--random", "--num-heads", "-1"}), HasSubstr("--num-heads -1"));
  EXPECT_THAT(
      ErrorOf({"forward", "--random", "--batch", "1099511627776", "--seqlen-q", "1099511627776"}),
      HasSubstr("2^62"));
  EXPECT_THAT(ErrorOf({"backward", "--q", q, "--k", q, "--v", q}, Purpose::kBackward),
              HasSubstr("backward needs dout"));
  EXPECT_THAT(ErrorOf({"backward", "--q", q, "--k", q, "--v", q, "--dout", "ones", "--out", q},
                      Purpose::kBackward),
              HasSubstr("lse is missing"));
  EXPECT_THAT(ErrorOf({"forward", "--q", q, "--k", q, "--v", q, "--layout", "thd"}),
              HasSubstr("q has shape [1, 2, 1, 4]"));
}

TEST(ProblemTest, PlansNeedNoMemory) {
  // 2^40 queries: 2 PiB of q.
  const Problem problem =
      Make({"plan", "--seqlen-q", "1099511627776", "--seqlen-k", "2", "--sinks", "random"},
           Purpose::kPlanBackward);
  const v1::PlanRequest request = ToPlan(problem, v1::PASS_BACKWARD);
  EXPECT_EQ(request.header().q().shape(1), int64_t{1} << 40);
  EXPECT_EQ(request.header().options().sinks().shape(0), 8);
  EXPECT_EQ(request.payload_size(), 0);
  const Problem masked =
      Make({"plan", "--seqlen-q", "256", "--block-mask", "random"}, Purpose::kPlanForward);
  const v1::PlanRequest with_mask = ToPlan(masked, v1::PASS_FORWARD);
  ASSERT_EQ(with_mask.payload_size(), 1);
  EXPECT_EQ(with_mask.payload(0).size(), 1u * 8 * 2 * 2);
}

TEST(FlagsTest, ErrorsAndHelp) {
  Flags flags;
  EXPECT_THAT(std::string(ParseFlags({"forward", "--foo"}, &flags).message()), HasSubstr("--foo"));
  EXPECT_EQ(ParseFlags({}, &flags).code(), absl::StatusCode::kCancelled);
  for (const std::vector<std::string>& help :
       std::vector<std::vector<std::string>>{{"--help"},
                                             {"forward", "--help"},
                                             {"plan", "--help"},
                                             {"status", "--help"},
                                             {"merge", "--help"}}) {
    const absl::Status status = ParseFlags(help, &flags);
    ASSERT_EQ(status.code(), absl::StatusCode::kCancelled);
    const std::string text(status.message());
    EXPECT_THAT(text, HasSubstr("Exit status:"));
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      EXPECT_LE(DisplayWidth(text.substr(at, end - at)), kPageWidth) << text.substr(at, end - at);
      at = end + 1;
    }
  }
}

TEST(FlagsTest, ConnectionOptions) {
  const Flags flags =
      MustParse({"status", "--server", "unix:/x", "--tls-ca", "ca.pem", "--deadline", "250ms",
                 "--retries", "0", "--streaming", "always", "--connect-timeout", "1s"});
  EXPECT_EQ(flags.connection.channel.target, "unix:/x");
  EXPECT_EQ(flags.connection.channel.tls_ca, "ca.pem");
  EXPECT_EQ(flags.connection.channel.max_retries, 0);
  EXPECT_EQ(ChannelOptionsOf(flags.connection)->connect_timeout.count(), 1000);
  absl::StatusOr<client::CallOptions> options = CallOptionsOf(flags.connection);
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->deadline->count(), 250'000'000);
  EXPECT_EQ(options->streaming, true);
}

TEST(FlagsTest, ServerFromTheEnvironment) {
  setenv("ATTN_SERVER", "far:1", 1);
  EXPECT_EQ(MustParse({"status"}).connection.channel.target, "far:1");
  for (const char* command : {"forward", "backward", "plan", "status", "load"}) {
    EXPECT_EQ(MustParse({command, "--server", "near:2"}).connection.channel.target, "near:2");
  }
  unsetenv("ATTN_SERVER");
}

}  // namespace
}  // namespace attn::cli
