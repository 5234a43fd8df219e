#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <sstream>
#include <string>

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
  metrics.SetDeviceInfo(DeviceKind::kCpu, 0, "a \"name\" with \\ and\nnewline", "avx2");
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
  metrics.CountExecution(Pass::kForward, PathId::kFlashCpu, DType::kBf16, 1000,
                         std::chrono::milliseconds(500));
  metrics.CountRejection(PathId::kFlashSm90, Reason::kNotBuilt);
  metrics.CountBytes(ByteLevel::kTile, 77);
  EXPECT_EQ(metrics.RequestCount(Method::kForward, absl::StatusCode::kOk), 1);
  EXPECT_EQ(metrics.RequestCount(Method::kForward, absl::StatusCode::kCancelled), 0);
  EXPECT_EQ(metrics.ExecutionCount(Pass::kForward, PathId::kFlashCpu, DType::kBf16), 1);
  EXPECT_EQ(metrics.ExecutionCount(Pass::kBackward, PathId::kFlashCpu, DType::kBf16), 0);
  EXPECT_EQ(metrics.RejectionCount(PathId::kFlashSm90, Reason::kNotBuilt), 1);
  const std::string text = metrics.Scrape();
  EXPECT_THAT(text, HasSubstr("attn_errors_total{code=\"CANCELLED\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_bytes_total{level=\"tile\"} 77"));
  EXPECT_THAT(text,
              HasSubstr("attn_kernel_seconds_total{pass=\"forward\",path=\"flash_cpu\"} 0.5"));
}

}  // namespace
}  // namespace attn::server
