#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "server/metrics/metrics.h"

namespace attn::server {
namespace {

using testing::HasSubstr;

TEST(MetricsTest, EverySeriesExistsAtZeroFromTheStart) {
  const Metrics metrics;
  const std::string text = metrics.Scrape();
  for (PathId path : kAllPaths) {
    for (Reason reason : kAllReasons) {
      EXPECT_THAT(text, HasSubstr("attn_rejections_total{path=\"" + std::string(Name(path)) +
                                  "\",reason=\"" + std::string(Name(reason)) + "\"} 0"));
    }
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
        EXPECT_EQ(metrics.ExecutionCount(pass, path, dtype), 0);
      }
    }
  }
  EXPECT_THAT(
      text,
      HasSubstr("attn_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"ForwardStream\"} 0"));
  EXPECT_THAT(text, HasSubstr("attn_errors_total{code=\"UNAUTHENTICATED\"} 0"));
  EXPECT_THAT(text, testing::Not(HasSubstr("attn_errors_total{code=\"OK\"}")));
  EXPECT_THAT(text, HasSubstr("attn_build_info{"));
  EXPECT_THAT(
      text,
      HasSubstr("attn_stage_seconds_bucket{pass=\"backward\",stage=\"handler\",le=\"1e-05\"} 0"));
  EXPECT_THAT(text, HasSubstr("le=\"60\"} 0"));
}

// The text format, version 0.0.4: every line is HELP, TYPE or a sample of a family that was
// announced, once.
TEST(MetricsTest, ExpositionIsValid) {
  Metrics metrics;
  metrics.SetDeviceInfo(DeviceKind::kCpu, 0, "a \"name\" with \\ and\nnewline", "avx2", 1e11, 1e10);
  metrics.SetSelfTestPassed(PathId::kFlashCpu, true);
  metrics.AddLive("attn_live", "A live gauge.", [] { return 2.5; });
  metrics.ObserveStage(Stage::kKernel, Pass::kForward, std::chrono::microseconds(20));
  const std::string text = metrics.Scrape();
  const std::regex help("# HELP ([a-z_]+) .+"), type("# TYPE ([a-z_]+) (counter|gauge|histogram)"),
      sample(R"re(([a-z_]+)(\{([a-z_]+="([^"\\]|\\.)*",?)*\})? [-+0-9.eInfNa]+)re");
  std::set<std::string> families, series;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, help)) continue;
    if (std::regex_match(line, match, type)) {
      EXPECT_TRUE(families.insert(match[1]).second) << "twice: " << line;
      continue;
    }
    ASSERT_TRUE(std::regex_match(line, match, sample)) << line;
    std::string name = match[1];
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      const size_t at = name.rfind(suffix);
      if (at != std::string::npos && at + std::string(suffix).size() == name.size() &&
          families.count(name) == 0) {
        name.resize(at);
      }
    }
    EXPECT_EQ(families.count(name), 1u) << line;
    EXPECT_EQ(name.rfind("attn_", 0), 0u) << line;
    EXPECT_TRUE(series.insert(line.substr(0, line.rfind(' '))).second) << "twice: " << line;
  }
  EXPECT_THAT(text, HasSubstr("attn_live 2.5"));
}

TEST(MetricsTest, CountsGoWhereTheyBelong) {
  Metrics metrics;
  metrics.CountRequest(Method::kForward, absl::StatusCode::kOk);
  metrics.CountRequest(Method::kBackward, absl::StatusCode::kCancelled);
  metrics.CountExecution({.pass = Pass::kForward,
                          .path = PathId::kFlashCpu,
                          .dtype = DType::kBf16,
                          .head_dim = 64,
                          .batch = 3,
                          .flops = 1000,
                          .compulsory_bytes = 70,
                          .tile_bytes = 77,
                          .standard_bytes = 90,
                          .kernel = std::chrono::milliseconds(500),
                          .roofline_seconds = 0.125});
  metrics.CountRejection(PathId::kFlashSm90, Reason::kNotBuilt);
  metrics.CountBytes(ByteLevel::kWireRequest, Pass::kBackward, PathId::kStandardCpu, 5);
  EXPECT_EQ(metrics.RequestCount(Method::kForward, absl::StatusCode::kOk), 1);
  EXPECT_EQ(metrics.RequestCount(Method::kForward, absl::StatusCode::kCancelled), 0);
  EXPECT_EQ(metrics.ExecutionCount(Pass::kForward, PathId::kFlashCpu, DType::kBf16), 1);
  EXPECT_EQ(metrics.ExecutionCount(Pass::kBackward, PathId::kFlashCpu, DType::kBf16), 0);
  EXPECT_EQ(metrics.RejectionCount(PathId::kFlashSm90, Reason::kNotBuilt), 1);
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_errors_total{code=\"CANCELLED\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_bytes_total{level=\"tile\",pass=\"forward\","
                              "path=\"flash_cpu\"} 77"));
  EXPECT_THAT(text, HasSubstr("attn_bytes_total{level=\"wire_request\",pass=\"backward\","
                              "path=\"standard_cpu\"} 5"));
  const std::string labels =
      "{dtype=\"bf16\",flash=\"true\",head_dim=\"33-64\",pass=\"forward\",path=\"flash_cpu\"}";
  EXPECT_THAT(text, HasSubstr("attn_executions_total" + labels + " 1"));
  EXPECT_THAT(text, HasSubstr("attn_flops_total" + labels + " 1000"));
  EXPECT_THAT(text, HasSubstr("attn_kernel_seconds_total" + labels + " 0.5"));
  EXPECT_THAT(text, HasSubstr("attn_roofline_seconds_total" + labels + " 0.125"));
  EXPECT_THAT(text, HasSubstr("attn_batch_requests_bucket{pass=\"forward\",le=\"2\"} 0"));
  EXPECT_THAT(text, HasSubstr("attn_batch_requests_bucket{pass=\"forward\",le=\"4\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_batch_requests_sum{pass=\"forward\"} 3"));
}

TEST(MetricsTest, HistogramsCountUpToAndIncludingTheBound) {
  Metrics metrics;
  for (int us : {10, 11, 25, 90'000'000}) {
    metrics.ObserveStage(Stage::kQueue, Pass::kForward, std::chrono::microseconds(us));
  }
  const std::string text = metrics.Scrape();
  const std::string bucket = "attn_stage_seconds_bucket{pass=\"forward\",stage=\"queue\",le=";
  EXPECT_THAT(text, HasSubstr(bucket + "\"1e-05\"} 1"));
  EXPECT_THAT(text, HasSubstr(bucket + "\"2.5e-05\"} 3"));
  EXPECT_THAT(text, HasSubstr(bucket + "\"60\"} 3"));
  EXPECT_THAT(text, HasSubstr(bucket + "\"+Inf\"} 4"));
  EXPECT_THAT(text, HasSubstr("attn_stage_seconds_count{pass=\"forward\",stage=\"queue\"} 4"));
}

TEST(MetricsTest, HeadDimsFallIntoFewRanges) {
  EXPECT_EQ(HeadDimLabel(HeadDimRange(1)), "1-32");
  EXPECT_EQ(HeadDimLabel(HeadDimRange(32)), "1-32");
  EXPECT_EQ(HeadDimLabel(HeadDimRange(33)), "33-64");
  EXPECT_EQ(HeadDimLabel(HeadDimRange(128)), "65-128");
  EXPECT_EQ(HeadDimLabel(HeadDimRange(kMaxHeadDim)), "257-512");
  EXPECT_EQ(HeadDimRange(kMaxHeadDim + 1), kHeadDimBounds.size() - 1);
  EXPECT_EQ(kHeadDimBounds.back(), kMaxHeadDim);
}

// Beside a GPU the CPU's fused path is a fallback.
TEST(MetricsTest, FlashCpuIsFlashOnlyWhereThereIsNoCuda) {
  for (bool has_cuda : {false, true}) {
    Metrics metrics(has_cuda);
    metrics.CountExecution({.path = PathId::kFlashCpu, .flops = 30});
    metrics.CountExecution({.path = PathId::kStandardCpu, .flops = 10});
    EXPECT_EQ(metrics.flash_totals().calls, 2);
    EXPECT_EQ(metrics.flash_totals().flops, 40);
    EXPECT_EQ(metrics.flash_totals().flash_calls, has_cuda ? 0 : 1);
    EXPECT_EQ(metrics.flash_totals().flash_flops, has_cuda ? 0 : 30);
    EXPECT_EQ(metrics.FallbackCount(Pass::kForward, std::nullopt), has_cuda ? 2 : 1);
    EXPECT_EQ(CountsAsFlash(PathId::kFlashSm80, has_cuda), true);
    EXPECT_EQ(CountsAsFlash(PathId::kStandardCuda, has_cuda), false);
  }
}

TEST(MetricsTest, FallbackReasonIsThatOfTheLastFlashPath) {
  const std::vector<Rejection> rejections = {{PathId::kFlashSm90, Reason::kNotBuilt, ""},
                                             {PathId::kFlashSm80, Reason::kDtypeUnsupported, ""},
                                             {PathId::kFlashSm80, Reason::kHeadDimUnsupported, ""},
                                             {PathId::kStandardCuda, Reason::kWorkspaceLimit, ""},
                                             {PathId::kFlashCpu, Reason::kCpuFallbackDisabled, ""}};
  EXPECT_EQ(FallbackReason(rejections, true), Reason::kDtypeUnsupported);
  EXPECT_EQ(FallbackReason(rejections, false), Reason::kCpuFallbackDisabled);
  EXPECT_EQ(FallbackReason({}, false), std::nullopt);
  Metrics metrics(true);
  metrics.CountExecution(
      {.pass = Pass::kBackward, .path = PathId::kStandardCuda, .rejections = rejections});
  metrics.CountExecution({.path = PathId::kFlashSm80, .rejections = rejections});
  EXPECT_EQ(metrics.FallbackCount(Pass::kBackward, Reason::kDtypeUnsupported), 1);
  EXPECT_EQ(metrics.FallbackCount(Pass::kForward, Reason::kDtypeUnsupported), 0);
}

TEST(MetricsTest, WorkCountsForItsDevice) {
  Metrics metrics(true);
  metrics.SetDeviceInfo(DeviceKind::kCuda, 0, "GPU", "sm_90", 9e14, 4e12);
  metrics.SetDeviceInfo(DeviceKind::kCuda, 2, "GPU", "sm_90", 9e14, 4e12);
  metrics.SetDeviceInfo(DeviceKind::kCpu, 0, "CPU", "avx2", 0, 0);
  metrics.CountExecution({.path = PathId::kFlashSm80, .device = 2, .flops = 8});
  metrics.CountExecution({.path = PathId::kFlashSm80, .device = -1, .flops = 16});  // none needed
  metrics.CountExecution({.path = PathId::kFlashCpu, .device = -1, .flops = 32});
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_device_flops_total{index=\"0\",kind=\"cuda\"} 0"));
  EXPECT_THAT(text, HasSubstr("attn_device_flops_total{index=\"2\",kind=\"cuda\"} 8"));
  EXPECT_THAT(text, HasSubstr("attn_device_flops_total{index=\"0\",kind=\"cpu\"} 32"));
  EXPECT_THAT(text,
              HasSubstr("attn_device_roofline_flops_per_second{index=\"2\",kind=\"cuda\"} 9"));
}

TEST(MetricsTest, ALiveSeriesWithoutAValueIsAbsent) {
  Metrics metrics;
  metrics.AddLive("attn_some", "Some.",
                  {{{{"which", "one"}}, [] { return std::optional<double>(1); }},
                   {{{"which", "two"}}, [] { return std::optional<double>(); }}});
  metrics.AddLive("attn_none", "None.", [] { return std::optional<double>(); });
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_some{which=\"one\"} 1"));
  EXPECT_THAT(text, testing::Not(HasSubstr("which=\"two\"")));
  EXPECT_THAT(text, testing::Not(HasSubstr("attn_none")));
}

TEST(MetricsTest, CanaryAndRefusals) {
  Metrics metrics;
  metrics.CountCanary(Pass::kForward, PathId::kFlashCpu, CanaryResult::kOk,
                      std::chrono::milliseconds(2));
  metrics.CountCanary(Pass::kForward, std::nullopt, CanaryResult::kLate, std::chrono::seconds(20));
  metrics.CountRefusal(Refusal::kFull);
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_canary_runs_total{pass=\"forward\",path=\"flash_cpu\","
                              "result=\"ok\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_canary_runs_total{pass=\"forward\",path=\"none\","
                              "result=\"late\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_canary_seconds_count{pass=\"forward\"} 2"));
  EXPECT_THAT(text, HasSubstr("attn_admission_refusals_total{cause=\"full\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_admission_refusals_total{cause=\"too_large\"} 0"));
}

}  // namespace
}  // namespace attn::server
