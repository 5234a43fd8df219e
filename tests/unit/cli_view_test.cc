// What people see: the plan page, the report, the status page, and the command's own exits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/cli/npy.h"
#include "client/cli/plan_view.h"
#include "client/cli/problem.h"
#include "client/cli/report_view.h"
#include "client/cli/scores_picture.h"
#include "client/cli/status_view.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const Style kUnicode{.unicode = true, .color = false};
const Style kAscii{.unicode = false, .color = false};

Problem Planned(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "plan");
  absl::StatusOr<Problem> problem =
      MakeProblem(MustParse(arguments).problem, Purpose::kPlanForward);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return problem.ok() ? *std::move(problem) : Problem{};
}

v1::Rejection Rejected(const std::string& path, v1::Reason reason, const std::string& detail) {
  v1::Rejection rejection;
  rejection.set_path(path);
  rejection.set_reason(reason);
  rejection.set_detail(detail);
  return rejection;
}

// N = 1024, d = 64, M = 20,480: 2N² + 4Nd = 2,359,296; 4Nd + 2N²d²/M = 262,144 + 419,430.4.
v1::PlanResponse SamplePlan() {
  v1::PlanResponse plan;
  plan.set_path("flash_cpu");
  plan.set_path_class(v1::PATH_CLASS_FLASH);
  plan.set_device_kind(v1::DEVICE_KIND_CPU);
  plan.set_kernel("flash_cpu_fwd_fp32_d64_avx3");
  *plan.add_rejections() = Rejected("flash_sm90", v1::REASON_NO_CUDA_DEVICE, "no device");
  *plan.add_rejections() = Rejected("flash_sm90", v1::REASON_DTYPE_UNSUPPORTED, "FP32");
  plan.mutable_traffic()->set_wire_request_bytes(6 << 20);
  plan.mutable_traffic()->set_wire_response_bytes(2129920);
  plan.mutable_traffic()->set_compulsory_bytes(8421376);
  plan.mutable_traffic()->set_tile_bytes(16 << 20);
  plan.mutable_traffic()->set_standard_bytes(142639104);
  plan.set_flops(uint64_t{1} << 30);
  plan.set_score_entries_per_head(1024 * 1024);
  plan.set_on_chip_elements(20480);
  plan.set_tile_q(128);
  plan.set_tile_k(128);
  plan.set_standard_elements_per_head(2359296);
  plan.set_flash_elements_per_head(681574.4);
  plan.set_workspace_bytes(1 << 20);
  plan.set_predicted_compute_ns(12'000'000);
  plan.set_predicted_memory_ns(3'000'000);
  plan.set_predicted_ns(12'000'000);
  plan.add_advice("send bf16 or fp16 to a server with a GPU");
  return plan;
}

void ExpectFits(const std::string& page) {
  for (size_t at = 0; at < page.size();) {
    const size_t end = std::min(page.find('\n', at), page.size());
    const std::string line = page.substr(at, end - at);
    EXPECT_LE(DisplayWidth(line), kPageWidth) << line;
    EXPECT_TRUE(line.empty() || line.back() != ' ') << "[" << line << "]";
    at = end + 1;
  }
}

TEST(PlanViewTest, GoldenPage) {
  v1::GetServerInfoResponse info;
  v1::DeviceInfo* device = info.add_devices();
  device->set_kind(v1::DEVICE_KIND_CPU);
  device->set_copy_gb_per_s(10);
  const std::string page =
      RenderPlan(Planned({"--causal"}), v1::PASS_FORWARD, SamplePlan(), info, kAscii);
  EXPECT_EQ(page, R"(forward: BSHD fp32, batch 1, 1,024 queries x 1,024 keys, 8 heads, head_dim 64,
causal
--------------------------------------------------------------------------------
path        flash_cpu  (flash, CPU)
kernel      flash_cpu_fwd_fp32_d64_avx3
workspace   1.00 MiB
not taken   flash_sm90  NO_CUDA_DEVICE     no device
                        DTYPE_UNSUPPORTED  FP32

scores of one head, queries x keys
         1,024 keys ->
        +----------------------------+  1,048,576 scores, 4.00 MiB per head
1,024   |::                          |  in fp32
queries |++::                        |  # the tile on chip: 128 x 128, with
        |++++::                      |    its q, k, v and out 20,480
        |++++++::                    |    elements
        |++++++++::                  |  = done and forgotten; each row keeps
        |++++++++++::                |    its maximum and sum
        |++++++++++++::              |  + visible, computed in turn, never
        |=======####+++::            |    stored
        |=======####+++++::          |  : partly visible
        |++++++++++++++++++::        |  blank: hidden, so skipped tile by
        |++++++++++++++++++++::      |  tile
        |++++++++++++++++++++++::    |
        |++++++++++++++++++++++++::  |
        |++++++++++++++++++++++++++::|
        +----------------------------+

memory levels, fastest first
        +-----------+
        |   cache   |        16.0 MiB asked for, tile by tile
     +--+-----------+--+     20,480 elements fit at a time
     |  memory (DRAM)  |     8.03 MiB at least:
  +--+-----------------+--+  every input read once, every output written once
  |       the wire        |  6.00 MiB in, 2.03 MiB out
  +-----------------------+  over the network, once per call

bytes moved
  standard  ##################################   136 MiB
  flash     ####                                16.0 MiB  8.50x less
  least     ##                                  8.03 MiB  inputs, outputs once

elements read and written per head, forward: N = 1,024, d = 64, M = 20,480 on
chip
  standard  2N^2 + 4Nd         ####################      2,359,296
  flash     4Nd + 2N^2d^2/M    ######                      681,574  3.46x less

time, from the rates this server measured
  computing           ####################       12.0 ms  1.07 GFLOP
  moving bytes        #####                      3.00 ms
  moving, if standard ########################   14.3 ms
  predicted 12.0 ms; computing takes 4.00x as long as moving the bytes:
  compute-bound, nothing waits

to get the fastest flash path
  - send bf16 or fp16 to a server with a GPU
)");
}

TEST(PlanViewTest, EveryPageFitsTheTerminal) {
  v1::PlanResponse refused = SamplePlan();
  refused.clear_path();
  refused.clear_path_class();
  v1::PlanResponse standard = SamplePlan();
  standard.set_path_class(v1::PATH_CLASS_STANDARD);
  standard.set_device_kind(v1::DEVICE_KIND_CUDA);
  standard.clear_predicted_compute_ns();
  standard.clear_predicted_memory_ns();
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"--seqlen-q", "1"},
           {"--seqlen-q", "0"},
           {"--seqlen-q", "3", "--seqlen-k", "1"},
           {"--seqlen-q",
            "1000000",
            "--seqlen-k",
            "7",
            "--bias",
            "random",
            "--sinks",
            "random",
            "--alibi-slopes",
            "random",
            "--softcap",
            "3",
            "--deterministic",
            "--dropout-p",
            "0.5",
            "--dropout-seed",
            "1",
            "--window-left",
            "12345678",
            "--num-kv-heads",
            "2"},
           {"--seqlen-q", "2", "--seqlen-k", "1099511627776"},
           {"--cu-seqlens-q", "0,0", "--cu-seqlens-k", "0,3"},
           {"--seqlen-q", "300", "--block-mask", "random", "--block-q", "64", "--block-k", "64"}}) {
    for (const Style& style : {kUnicode, kAscii, Style{.unicode = true, .color = true}}) {
      for (const v1::PlanResponse& plan : {SamplePlan(), refused, standard}) {
        ExpectFits(RenderPlan(Planned(arguments), v1::PASS_BACKWARD, plan, {}, style));
      }
    }
  }
  EXPECT_THAT(RenderPlan(Planned({}), v1::PASS_FORWARD, refused, {}, kAscii),
              HasSubstr("the policy cannot be met"));
  EXPECT_THAT(RenderPlan(Planned({}), v1::PASS_FORWARD, standard, {}, kAscii),
              AllOf(HasSubstr("every score is written to"), HasSubstr("no rates measured"),
                    Not(HasSubstr("tile on chip"))));
}

// The picture's own rules must be those of attention.proto.
TEST(ScoresPictureTest, VisibilityFollowsTheContract) {
  const auto keys = [](std::vector<std::string> arguments, int64_t row) {
    arguments.insert(arguments.end(), {"--seqlen-q", "4", "--seqlen-k", "6"});
    const Problem problem = Planned(arguments);
    const Visibility::Range range = Visibility(problem, LargestSequence(problem)).Keys(row);
    return range.begin < range.end ? std::vector<int64_t>{range.begin, range.end}
                                   : std::vector<int64_t>{};
  };
  EXPECT_THAT(keys({}, 0), ElementsAre(0, 6));
  EXPECT_THAT(keys({"--causal"}, 0), ElementsAre(0, 3));  // bottom-right: off = 2
  EXPECT_THAT(keys({"--causal"}, 3), ElementsAre(0, 6));
  EXPECT_THAT(keys({"--causal", "--alignment", "top-left"}, 0), ElementsAre(0, 1));
  EXPECT_THAT(keys({"--window-left", "1", "--window-right", "0"}, 1), ElementsAre(2, 4));
  EXPECT_THAT(keys({"--seqlens-q", "2"}, 2), ElementsAre());
  EXPECT_THAT(keys({"--seqlens-k", "5", "--seqlens-q", "2", "--causal"}, 0), ElementsAre(0, 4));
  EXPECT_THAT(keys({"--seqlens-k", "0", "--causal"}, 3), ElementsAre());
}

TEST(ScoresPictureTest, DrawsMasksAndTheTile) {
  const Problem problem = Planned({"--seqlen-q", "8", "--seqlen-k", "8", "--causal"});
  const Extent extent = LargestSequence(problem);
  const std::vector<std::string> picture =
      DrawScores(Visibility(problem, extent), extent, 0, 0, kAscii);
  ASSERT_EQ(picture.size(), 16u);
  EXPECT_EQ(picture[1], "|++++                        |");   // row 0 sees key 0
  EXPECT_EQ(picture[14], "|++++++++++++++++++++++++++++|");  // row 7 sees all
  const std::vector<std::string> tiled =
      DrawScores(Visibility(problem, extent), extent, 100, 100, kAscii);
  EXPECT_EQ(tiled[7], "|############################|");  // a tile over everything
}

v1::ExecutionReport SampleReport() {
  v1::ExecutionReport report;
  report.set_pass(v1::PASS_FORWARD);
  report.set_path_class(v1::PATH_CLASS_FLASH);
  report.set_device_kind(v1::DEVICE_KIND_CPU);
  report.set_path("flash_cpu");
  report.set_kernel("flash_cpu_fwd_fp32_d64_avx3");
  *report.add_rejections() = Rejected("flash_sm90", v1::REASON_NOT_BUILT, "not in this binary");
  report.set_fused_batch(1);
  report.mutable_times()->set_parse_ns(10'000);
  report.mutable_times()->set_gather_ns(90'000);
  report.mutable_times()->set_queue_ns(50'000);
  report.mutable_times()->set_kernel_ns(800'000);
  report.mutable_times()->set_reply_ns(40'000);
  report.mutable_times()->set_handler_ns(1'000'000);
  report.mutable_traffic()->set_wire_request_bytes(3 << 20);
  report.mutable_traffic()->set_wire_response_bytes(1 << 20);
  report.mutable_traffic()->set_compulsory_bytes(4 << 20);
  report.mutable_traffic()->set_tile_bytes(8 << 20);
  report.mutable_traffic()->set_standard_bytes(32 << 20);
  report.set_flops(134'000'000);
  report.set_achieved_tflops(0.1675);
  report.set_achieved_gb_per_s(5.24);
  report.set_request_id("ab-1");
  return report;
}

TEST(ReportViewTest, GoldenReport) {
  const CallFacts facts{std::chrono::nanoseconds(2'000'000), true, 2};
  EXPECT_EQ(RenderReport(SampleReport(), facts, kAscii), R"(path        flash_cpu  (flash, CPU 0)
kernel      flash_cpu_fwd_fp32_d64_avx3
request     ab-1, ran alone
not taken   flash_sm90  NOT_BUILT  not in this binary

time
  wire        1.00 ms   50.0%  ####################
  parse       10.0 us    0.5%  #
  gather      90.0 us    4.5%  ##
  queue       50.0 us    2.5%  #
  kernel       800 us   40.0%  ################
  reply       40.0 us    2.0%  #
  between     10.0 us    0.5%  #
  client      2.00 ms  100.0%  latency; streamed, attempt 2

bytes
  wire       4.00 MiB  ###                   in 3.00 MiB, out 1.00 MiB
  compulsory 4.00 MiB  ###                   inputs read once, outputs written
  tiles      8.00 MiB  #####                 what this path's loops move
  standard   32.0 MiB  ####################  standard: 4.00x the tiles

work        134 MFLOP at 168 GFLOP/s, 5.24 GB/s of compulsory bytes
)");
}

TEST(ReportViewTest, ADeviceAddsItsStagesAndBytes) {
  v1::ExecutionReport report = SampleReport();
  report.set_path("flash_sm80");
  report.set_device_kind(v1::DEVICE_KIND_CUDA);
  report.set_device_index(1);
  report.mutable_times()->set_kernel_ns(200'000);
  report.mutable_times()->set_device_queue_ns(10'000);
  report.mutable_times()->set_host_to_device_ns(400'000);
  report.mutable_times()->set_device_to_host_ns(150'000);
  report.mutable_traffic()->set_host_to_device_bytes(3 << 20);
  report.mutable_traffic()->set_device_to_host_bytes(1 << 20);
  report.set_fraction_of_roofline(0.625);
  const std::string text =
      RenderReport(report, {std::chrono::nanoseconds(2'000'000), false, 1}, kAscii);
  EXPECT_THAT(text, AllOf(HasSubstr("(flash, CUDA 1)"), HasSubstr("  for lane    10.0 us"),
                          HasSubstr("  to device    400 us"), HasSubstr("  to host      150 us"),
                          HasSubstr("  between     50.0 us")));
  EXPECT_THAT(text, HasSubstr("  bus        4.00 MiB  ###                   "
                              "to the device 3.00 MiB, back 1.00 MiB"));
  EXPECT_THAT(text, HasSubstr("of compulsory bytes, 62.5% of the device's roofline"));
}

TEST(ReportViewTest, JsonKeepsItsKeys) {
  const nlohmann::ordered_json empty = ToJson(v1::ExecutionReport());
  for (const char* key : {"path", "pathClass", "kernel", "rejections", "fusedBatch", "flops",
                          "achievedTflops", "requestId"}) {
    EXPECT_TRUE(empty.contains(key)) << key;
  }
  const nlohmann::ordered_json full = ToJson(SampleReport());
  EXPECT_EQ(full["times"]["kernelNs"], "800000");
  EXPECT_EQ(full["rejections"][0]["reason"], "REASON_NOT_BUILT");
  const CallFacts facts{std::chrono::nanoseconds(2'000'000), false, 1};
  EXPECT_EQ(ToJson(SampleReport(), facts)["wireNs"], 1'000'000);
  // A server whose clock runs ahead does not make the wire's time negative.
  EXPECT_EQ(ToJson(SampleReport(), CallFacts{std::chrono::nanoseconds(1), false, 1})["wireNs"], 0);
}

TEST(StatusViewTest, ShowsHealthPathsAndLimits) {
  v1::GetServerInfoResponse info;
  info.set_version("0.1.0");
  v1::PathInfo* path = info.add_paths();
  path->set_path("flash_cpu");
  path->set_path_class(v1::PATH_CLASS_FLASH);
  path->set_device_kind(v1::DEVICE_KIND_CPU);
  path->set_available(true);
  path = info.add_paths();
  path->set_path("standard_cuda");
  *path->add_rejections() = Rejected("standard_cuda", v1::REASON_NOT_BUILT, "");
  info.mutable_limits()->set_max_unary_bytes(64 << 20);
  const std::string page = RenderStatus("host:1", false, info, kAscii);
  ExpectFits(page);
  EXPECT_THAT(page, AllOf(HasSubstr("attnd 0.1.0 at host:1  NOT SERVING"), HasSubstr("ready"),
                          HasSubstr("NOT_BUILT"), HasSubstr("64.0 MiB")));
}

TEST(CommandTest, ExitsWithoutAServer) {
  EXPECT_EQ(RunCommand({"--help"}).exit_code, 0);
  EXPECT_EQ(RunCommand({"version"}).exit_code, 0);
  EXPECT_THAT(RunCommand({"version", "--json"}).out, HasSubstr("\"contract\": \"attention.v1\""));
  EXPECT_EQ(RunCommand({"forward"}).exit_code, 2);
  EXPECT_EQ(RunCommand({"nonsense"}).exit_code, 2);
  EXPECT_EQ(RunCommand({"forward", "--random", "--deadline", "soon"}).exit_code, 2);
  const Ran missing = RunCommand({"forward", "--q", "/no/q.npy", "--k", "x.npy", "--v", "x.npy"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_EQ(missing.err, "attn: /no/q.npy: No such file or directory\n");
  EXPECT_EQ(missing.out, "");
  TempFolder folder;
  const Ran unreachable = RunCommand({"forward", "--random", "--seqlen-q", "2", "--server",
                                      "unix:" + (folder / "none"), "--connect-timeout", "100ms"});
  EXPECT_EQ(unreachable.exit_code, 3);
  EXPECT_THAT(unreachable.err, HasSubstr("cannot reach a server at unix:"));
  const Ran no_ca =
      RunCommand({"status", "--tls-ca", folder / "none.pem", "--connect-timeout", "1s"});
  EXPECT_EQ(no_ca.exit_code, 2);
  EXPECT_THAT(no_ca.err, HasSubstr("none.pem"));
}

// Nothing is asked of the server when its answer could not be kept.
TEST(CommandTest, OutputIsCheckedFirst) {
  const Ran ran = RunCommand({"backward", "--random", "--seqlen-q", "2", "--output", "grads.npy"});
  EXPECT_EQ(ran.exit_code, 2);
  EXPECT_THAT(ran.err, HasSubstr("holds one tensor"));
}

}  // namespace
}  // namespace attn::cli
