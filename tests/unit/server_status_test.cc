#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "server/rpc/status_calls.h"
#include "server/rpc/status_json.h"
#include "server/rpc/status_plans.h"
#include "server/status/history.h"
#include "server/status/page.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kHostile[] =
    "\"></script><script>alert(1)</script>\\\n\x01\xff\xc3 \xe2\x80\xa8 \xf0\x9f";

// A context with what the page reads.
class StatusTest : public testing::Test {
 protected:
  StatusTest() {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashCpu));
    backends.push_back(std::make_unique<FakeBackend>(PathId::kStandardCpu));
    Use(std::move(backends));
    context_.config.executor_workers = 1;
    context_.clock = &clock_;
    context_.metrics = &metrics_;
    context_.buffers = buffers_;
    context_.admission = &admission_;
    context_.executor = &executor_;
    context_.rates = &rates_;
    context_.started = clock_.Now();
  }
  ~StatusTest() override { executor_.Shutdown(); }

  void Use(std::vector<std::unique_ptr<Backend>> backends) {
    auto paths = PathTable::Create(std::move(backends), {}, /*cpu_fallback=*/false);
    ASSERT_TRUE(paths.ok()) << paths.status();
    paths_ = std::make_unique<PathTable>(*std::move(paths));
    context_.paths = paths_.get();
  }

  Json Read() {
    clock_.Advance(StatusJson::kMaxAge);
    text_ = status_.Json();
    return Json::parse(text_);
  }

  FakeClock clock_;
  Metrics metrics_;
  std::shared_ptr<BufferPool> buffers_ = std::make_shared<BufferPool>(1 << 20);
  Admission admission_{{.max_requests = 4, .max_bytes = 1 << 20, .max_request_bytes = 1 << 20},
                       &clock_};
  Executor executor_{1, &clock_};
  Rates rates_;
  std::unique_ptr<PathTable> paths_;
  ServiceContext context_;
  ServingState state_;
  History history_{&metrics_, &clock_};
  StatusJson status_{&context_, &state_, &history_};
  std::string text_;
};

CallRecord Served(PathId path, int64_t seqlen, uint64_t kernel_ns) {
  CallRecord record;
  record.request_id = "id";
  record.handler = std::chrono::nanoseconds(2 * kernel_ns);
  record.shape = {.batch = 1,
                  .seqlen_q = seqlen,
                  .seqlen_k = seqlen,
                  .num_heads = 4,
                  .num_kv_heads = 4,
                  .head_dim = 64,
                  .head_dim_v = 64};
  ::attention::v1::ExecutionReport report;
  report.set_path(std::string(Name(path)));
  report.set_path_class(ClassOf(path) == PathClass::kFlash ? ::attention::v1::PATH_CLASS_FLASH
                                                           : ::attention::v1::PATH_CLASS_STANDARD);
  report.mutable_times()->set_kernel_ns(kernel_ns);
  report.mutable_traffic()->set_tile_bytes(10);
  report.mutable_traffic()->set_standard_bytes(100);
  record.report = report.SerializeAsString();
  return record;
}

TEST_F(StatusTest, EmptyServerIsWhole) {
  const Json json = Read();
  EXPECT_EQ(json["calls"], Json::array());
  EXPECT_EQ(json["shapes"], Json::array());
  EXPECT_EQ(json["devices"], Json::array());
  EXPECT_TRUE(json["canary"].is_null());
  EXPECT_EQ(json["totals"]["requests"], 0);
  EXPECT_EQ(json["history"]["calls"], Json::array());
  EXPECT_FALSE(json["server"]["serving"]);
  EXPECT_EQ(json["paths"].size(), kAllPaths.size());
}

TEST_F(StatusTest, HostileStringsStayStrings) {
  ::attention::v1::DeviceInfo device;
  device.set_kind(::attention::v1::DEVICE_KIND_CUDA);
  device.set_name("</script><img src=x>\"\\\x02");
  context_.devices.push_back(device);
  context_.device_hooks.status = [] {
    return std::vector<DeviceStatus>{{.healthy = false, .error = kHostile}};
  };
  CallRecord refused;
  refused.request_id = kHostile;
  refused.code = absl::StatusCode::kInvalidArgument;
  refused.error = kHostile;
  refused.rejections = kHostile;
  context_.recent.Add(refused);
  CallRecord served = Served(PathId::kFlashCpu, 8, 1000);
  ::attention::v1::ExecutionReport report = served.ParseReport();
  report.set_kernel("<b>\"");
  report.add_rejections()->set_detail("<b>\\");
  served.report = report.SerializeAsString();
  context_.recent.Add(served);
  status_.NoteSelfTest(
      {{PathId::kFlashCpu, Pass::kForward, DType::kBf16, absl::InternalError(kHostile)}});

  const Json json = Read();  // parses
  EXPECT_EQ(json["devices"][0]["name"], "</script><img src=x>\"\\\x02");
  EXPECT_FALSE(json["devices"][0]["healthy"]);
  EXPECT_EQ(json["calls"][0]["report"]["kernel"], "<b>\"");
  EXPECT_EQ(json["calls"][0]["report"]["rejections"][0]["detail"], "<b>\\");
  const std::string error = json["calls"][1]["error"];
  EXPECT_THAT(error, HasSubstr("\"></script><script>alert(1)</script>\\\n\x01"));
  EXPECT_THAT(error, HasSubstr("\xef\xbf\xbd"));  // what is no UTF-8 is replaced
  EXPECT_EQ(json["paths"][3]["self_test_failed"].size(), 1u);
  EXPECT_THAT(text_, Not(HasSubstr("<")));
  for (const char c : text_) {
    ASSERT_TRUE(c >= 0x20 && c < 0x7f) << static_cast<int>(c);
  }
}

TEST_F(StatusTest, AnErrorCutWithinACharacterIsValid) {
  CallRecord record;
  for (int i = 0; i < 200; ++i) record.error += "é";  // cut at an odd number of bytes: within one
  record.error.insert(0, "x");
  context_.recent.Add(record);
  EXPECT_EQ(context_.recent.Snapshot()[0].error.size(), RecentCalls::kMaxErrorBytes);
  const std::string error = Read()["calls"][0]["error"];
  EXPECT_EQ(error.substr(error.size() - 3), "\xef\xbf\xbd");
}

TEST_F(StatusTest, MadeAtMostEveryHalfSecond) {
  EXPECT_EQ(Read()["calls"].size(), 0u);
  context_.recent.Add(Served(PathId::kFlashCpu, 8, 1000));
  EXPECT_EQ(Json::parse(status_.Json())["calls"].size(), 0u);
  clock_.Advance(StatusJson::kMaxAge);
  EXPECT_EQ(Json::parse(status_.Json())["calls"].size(), 1u);
}

TEST_F(StatusTest, ShapesAreGroupedMostFrequentFirst) {
  for (uint64_t ns : {100, 300}) context_.recent.Add(Served(PathId::kFlashCpu, 128, ns));
  context_.recent.Add(Served(PathId::kStandardCpu, 128, 5));
  context_.recent.Add(Served(PathId::kFlashCpu, 64, 7));
  CallRecord refused;
  refused.code = absl::StatusCode::kInternal;
  context_.recent.Add(refused);
  const Json shapes = ShapesJson(context_.recent.Snapshot());
  ASSERT_EQ(shapes.size(), 3u);
  EXPECT_EQ(shapes[0]["calls"], 2);
  EXPECT_EQ(shapes[0]["kernel_ns"], 200);
  EXPECT_EQ(shapes[0]["standard_bytes"], 100);
  EXPECT_EQ(shapes[0]["shape"]["seqlen_q"], 128);
  std::vector<std::string> paths = {shapes[1]["path"], shapes[2]["path"]};
  EXPECT_THAT(paths, testing::UnorderedElementsAre("standard_cpu", "flash_cpu"));
}

TEST_F(StatusTest, PlansFollowThePathTable) {
  Json plans = Read()["plans"];
  EXPECT_THAT(plans["devices"], ElementsAre("cpu"));
  const size_t cells = plans["shapes"].size() * 2 * 3;  // each representative is a valid problem
  EXPECT_EQ(plans["cells"].size(), cells);
  int wide = 0;
  for (const Json& cell : plans["cells"]) {
    const bool is_wide = plans["shapes"][cell["shape"].get<size_t>()]["name"] == "wide heads";
    wide += is_wide ? 1 : 0;
    EXPECT_EQ(cell["path"], is_wide ? "standard_cpu" : "flash_cpu");
    EXPECT_TRUE(cell["takes_calls"]);
    const Json& reasons = plans["reasons"][cell["reasons"].get<size_t>()];
    EXPECT_EQ(reasons.back()["reason"], is_wide ? "HEAD_DIM_UNSUPPORTED" : "NOT_BUILT");
  }
  EXPECT_EQ(wide, 6);
  ASSERT_TRUE(paths_->SetDisabled({"flash_cpu"}).ok());
  plans = Read()["plans"];
  for (const Json& cell : plans["cells"]) EXPECT_EQ(cell["path"], "standard_cpu");
}

TEST_F(StatusTest, PlansOfEachKindOfDevice) {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashSm80));
  backends.push_back(std::make_unique<FakeBackend>(PathId::kStandardCuda));
  backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashCpu));
  Use(std::move(backends));
  const Json plans = PlansJson(context_);
  EXPECT_THAT(plans["devices"], ElementsAre("cuda", "cpu"));
  for (const Json& cell : plans["cells"]) {
    if (cell["device"] == "cuda") {
      EXPECT_TRUE(cell["takes_calls"]);
      EXPECT_THAT(cell["path"], testing::AnyOf("flash_sm80", "standard_cuda"));
    } else {  // without --cpu-fallback
      EXPECT_FALSE(cell["takes_calls"]);
      EXPECT_FALSE(cell.contains("path"));
      EXPECT_EQ(plans["reasons"][cell["reasons"].get<size_t>()][0]["reason"],
                "CPU_FALLBACK_DISABLED");
    }
  }
}

TEST_F(StatusTest, HistoryHoldsDifferences) {
  history_.Sample();  // no time has passed: nothing
  EXPECT_TRUE(history_.Snapshot().empty());
  metrics_.CountRequest(Method::kForward, absl::StatusCode::kOk);
  metrics_.CountRequest(Method::kForward, absl::StatusCode::kInternal);
  metrics_.CountExecution({.path = PathId::kFlashCpu,
                           .head_dim = 64,
                           .flops = 1000,
                           .compulsory_bytes = 30,
                           .tile_bytes = 50,
                           .standard_bytes = 90,
                           .kernel = std::chrono::milliseconds(10)});
  metrics_.ObserveStage(Stage::kHandler, Pass::kForward, std::chrono::milliseconds(20));
  clock_.Advance(std::chrono::seconds(2));
  history_.Sample();
  clock_.Advance(std::chrono::seconds(1));
  history_.Sample();
  const auto intervals = history_.Snapshot();
  ASSERT_EQ(intervals.size(), 2u);
  const Interval& first = intervals[0];
  EXPECT_EQ(first.seconds, 2);
  EXPECT_EQ(first.requests, 2);
  EXPECT_EQ(first.errors, 1);
  EXPECT_EQ(first.flash.flash_calls, 1);
  EXPECT_EQ(first.flash.flash_flops, 1000);
  EXPECT_EQ(first.tile_bytes, 50);
  EXPECT_DOUBLE_EQ(first.kernel_seconds, 0.01);
  EXPECT_DOUBLE_EQ(first.handler_mean, 0.02);
  EXPECT_GT(first.handler_p99, 0.01);  // within its bucket, 10 to 25 ms
  EXPECT_LE(first.handler_p99, 0.025);
  EXPECT_EQ(intervals[1].requests, 0);
  EXPECT_EQ(intervals[1].flash.calls, 0);
  EXPECT_EQ(intervals[1].handler_mean, 0);
}

TEST_F(StatusTest, HistoryColumnsAreShort) {
  metrics_.ObserveStage(Stage::kHandler, Pass::kForward, std::chrono::nanoseconds(1'234'567));
  metrics_.CountBytes(ByteLevel::kWireRequest, Pass::kForward, PathId::kFlashCpu, 987'654'321);
  clock_.Advance(std::chrono::milliseconds(1001));
  history_.Sample();
  const Json history = Read()["history"];
  EXPECT_EQ(history["seconds"].dump(), "[1.001]");
  EXPECT_EQ(history["handler_mean_s"].dump(), "[0.001235]");
  EXPECT_EQ(history["wire_in_bytes"][0], 987'700'000);
  for (const Json& column : history) EXPECT_EQ(column.size(), 1u);
}

TEST_F(StatusTest, HistoryIsBounded) {
  for (size_t i = 0; i < History::kCapacity + 5; ++i) {
    clock_.Advance(std::chrono::seconds(1));
    history_.Sample();
  }
  EXPECT_EQ(history_.Snapshot().size(), History::kCapacity);
  EXPECT_EQ(history_.Snapshot().back().end, clock_.Now());
}

TEST(QuantileTest, InterpolatesWithinABucket) {
  const double bounds[] = {1, 2, 4};
  EXPECT_EQ(Quantile(bounds, std::vector<double>{0, 0, 0, 0}, 0.5), 0);
  EXPECT_DOUBLE_EQ(Quantile(bounds, std::vector<double>{0, 10, 0, 0}, 0.5), 1.5);
  EXPECT_DOUBLE_EQ(Quantile(bounds, std::vector<double>{5, 5, 0, 0}, 0.5), 1);
  EXPECT_DOUBLE_EQ(Quantile(bounds, std::vector<double>{5, 0, 5, 0}, 0.75), 3);
  EXPECT_DOUBLE_EQ(Quantile(bounds, std::vector<double>{0, 0, 0, 3}, 0.99), 4);  // over all
}

TEST(StatusPageTest, EachPageHasANonceOfItsOwn) {
  const HttpServer::Document one = StatusPage(), two = StatusPage();
  EXPECT_NE(one.html, two.html);
  EXPECT_NE(one.security_policy, two.security_policy);
  EXPECT_THAT(one.html, Not(HasSubstr("@NONCE@")));
  EXPECT_THAT(one.html, HasSubstr("</html>"));
  const std::string nonce = one.html.substr(one.html.find("nonce=\"") + 7, 32);
  EXPECT_THAT(one.security_policy, HasSubstr("script-src 'nonce-" + nonce + "'"));
  EXPECT_THAT(one.security_policy, HasSubstr("default-src 'none'"));
}

}  // namespace
}  // namespace attn::server
