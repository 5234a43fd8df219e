// A server that believes it has CUDA devices: what it reports of them, and what happens when they
// fail. No GPU is needed: the backend is a fake.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "attention/v1/attention.grpc.pb.h"
#include "kernels/api/mutex.h"
#include "server/rpc/server.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

namespace v1 = ::attention::v1;
using testing::HasSubstr;
using testing::Not;

// Two devices, of which the test makes one or both fail.
struct FakeDevices {
  Mutex mutex;
  std::vector<DeviceStatus> status ATTN_GUARDED_BY(mutex) = {{.index = 0}, {.index = 1}};
  std::function<void()> callback ATTN_GUARDED_BY(mutex);
  int trims ATTN_GUARDED_BY(mutex) = 0;

  DeviceHooks Hooks() {
    DeviceHooks hooks;
    hooks.status = [this] {
      MutexLock lock(mutex);
      return status;
    };
    hooks.on_unhealthy = [this](std::function<void()> f) {
      MutexLock lock(mutex);
      callback = std::move(f);
    };
    hooks.trim = [this] {
      MutexLock lock(mutex);
      ++trims;
    };
    return hooks;
  }
  void Fail(int index) {
    std::function<void()> f;
    {
      MutexLock lock(mutex);
      status[index].healthy = false;
      status[index].error = "cudaErrorIllegalAddress";
      f = callback;
    }
    f();
  }
};

// Runs on "device 1" and says so. Fails where told.
class FakeCudaBackend : public FakeBackend {
 public:
  explicit FakeCudaBackend(const absl::Status* failure)
      : FakeBackend(PathId::kFlashSm80, nullptr, int64_t{1} << 50), failure_(failure) {}
  bool WorkspaceOnDevice() const override { return true; }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const RunContext& context) const override {
    EXPECT_TRUE(context.workspace.empty());
    if (!failure_->ok()) return *failure_;
    *context.device_times = {.device_index = 1,
                             .queue_ns = 1'000,
                             .host_to_device_ns = 2'000,
                             .kernel_ns = 4'000,
                             .device_to_host_ns = 3'000,
                             .host_to_device_bytes = 500,
                             .device_to_host_bytes = 600};
    return FakeBackend::Forward(p, t, context);
  }

 private:
  const absl::Status* const failure_;
};

// A faster path that has forward passes only, and takes none of few queries.
class ForwardOnlyBackend : public FakeBackend {
 public:
  ForwardOnlyBackend() : FakeBackend(PathId::kFlashSm90) {}
  void AppendRejections(const AttentionProblem& p, Pass pass,
                        std::vector<Rejection>* r) const override {
    if (pass == Pass::kBackward) r->push_back({path(), Reason::kNotBuilt, "pass backward"});
    if (p.seqlen_q <= 100) r->push_back({path(), Reason::kOptionUnsupported, "seqlen_q <= 100"});
    FakeBackend::AppendRejections(p, pass, r);
  }
  absl::Status Backward(const AttentionProblem&, const BackwardTensors&,
                        const RunContext&) const override {
    return absl::InternalError("there is none");
  }
};

class ServerDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    Config config;
    config.listen = {"127.0.0.1:0"};
    config.metrics_listen = "";
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::make_unique<ForwardOnlyBackend>());
    backends.push_back(std::make_unique<FakeCudaBackend>(&failure_));
    backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashCpu));
    ServerOptions options{.config = config,
                          .backends = std::move(backends),
                          .absent = {{PathId::kStandardCuda, Reason::kNoCudaDevice, "why not"}},
                          .devices = std::vector<v1::DeviceInfo>(2),
                          .device_hooks = devices_.Hooks()};
    for (int i = 0; i < 2; ++i) {
      options.devices[i].set_kind(v1::DEVICE_KIND_CUDA);
      options.devices[i].set_index(i);
      options.devices[i].set_matrix_tflops(100 * i);  // device 1: 1e5 FLOPs in a nanosecond
      options.devices[i].set_copy_gb_per_s(10'000);
    }
    options.self_test = false;
    options.measure_rates = false;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Attention::NewStub(
        grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
  }

  grpc::Status Forward(v1::ForwardResponse* response) {
    v1::ForwardRequest request;
    v1::ForwardRequestHeader& header = *request.mutable_header();
    header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
    header.mutable_shape()->set_num_heads(1);
    header.mutable_shape()->set_num_kv_heads(1);
    uint32_t index = 0;
    for (v1::Tensor* tensor : {header.mutable_q(), header.mutable_k(), header.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_FP16);
      for (int64_t extent : {1, 100, 1, 50}) tensor->add_shape(extent);
      tensor->set_payload(index++);
      request.add_payload(std::string(100 * 50 * 2, '\0'));
    }
    grpc::ClientContext context;
    return stub_->Forward(&context, request, response);
  }
  v1::PlanResponse Plan(v1::Pass pass, int64_t seqlen_q, int64_t head_dim) {
    v1::PlanRequest request;
    request.set_pass(pass);
    auto& header = *request.mutable_header();
    header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
    header.mutable_shape()->set_num_heads(1);
    header.mutable_shape()->set_num_kv_heads(1);
    for (v1::Tensor* tensor : {header.mutable_q(), header.mutable_k(), header.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_FP16);
      const int64_t rows = tensor == header.mutable_q() ? seqlen_q : 200;
      for (int64_t extent : {int64_t{1}, rows, int64_t{1}, head_dim}) tensor->add_shape(extent);
    }
    grpc::ClientContext context;
    v1::PlanResponse plan;
    const grpc::Status status = stub_->Plan(&context, request, &plan);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return plan;
  }
  v1::GetServerInfoResponse Info() {
    v1::GetServerInfoResponse info;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
    return info;
  }
  std::string Scrape() { return server_->metrics().Scrape(); }

  FakeDevices devices_;
  absl::Status failure_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

TEST_F(ServerDeviceTest, TheReportTellsWhatTheDeviceDid) {
  v1::ForwardResponse response;
  const grpc::Status status = Forward(&response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::ExecutionReport& report = response.report();
  EXPECT_EQ(report.device_kind(), v1::DEVICE_KIND_CUDA);
  EXPECT_EQ(report.device_index(), 1);
  EXPECT_EQ(report.times().device_queue_ns(), 1'000u);
  EXPECT_EQ(report.times().host_to_device_ns(), 2'000u);
  EXPECT_EQ(report.times().kernel_ns(), 4'000u);
  EXPECT_EQ(report.times().device_to_host_ns(), 3'000u);
  EXPECT_EQ(report.traffic().host_to_device_bytes(), 500u);
  EXPECT_EQ(report.traffic().device_to_host_bytes(), 600u);
  // 2 * 100 * 100 * (50 + 50) FLOPs take 20 ns at 100 TFLOP/s; 40,400 bytes 4.04 ns at 10 TB/s.
  EXPECT_EQ(report.flops(), 2'000'000u);
  EXPECT_NEAR(report.fraction_of_roofline(), 20.0 / 4'000, 1e-9);
  EXPECT_NEAR(report.achieved_tflops(), 0.5, 1e-9);
  const std::string text = Scrape();
  EXPECT_THAT(
      text,
      HasSubstr(
          "attn_bytes_total{level=\"host_to_device\",pass=\"forward\",path=\"flash_sm80\"} 500"));
  EXPECT_THAT(
      text,
      HasSubstr(
          "attn_bytes_total{level=\"device_to_host\",pass=\"forward\",path=\"flash_sm80\"} 600"));
  EXPECT_THAT(text,
              HasSubstr("attn_stage_seconds_count{pass=\"forward\",stage=\"device_to_host\"} 1"));
}

TEST_F(ServerDeviceTest, AFasterPathWithoutTheCallsPassIsPassedOverWithItsReason) {
  EXPECT_EQ(Plan(v1::PASS_FORWARD, 200, 64).path(), "flash_sm90");
  const v1::PlanResponse backward = Plan(v1::PASS_BACKWARD, 200, 64);
  EXPECT_EQ(backward.path(), "flash_sm80");
  ASSERT_EQ(backward.rejections_size(), 1);
  EXPECT_EQ(backward.rejections(0).reason(), v1::REASON_NOT_BUILT);
  EXPECT_EQ(backward.rejections(0).detail(), "pass backward");
}

TEST_F(ServerDeviceTest, AdviceIsOfTheFlashPathThatIsNearestToTakingTheCall) {
  // Flash takes it: nothing to change, whatever a faster path says.
  const v1::PlanResponse few = Plan(v1::PASS_FORWARD, 4, 64);
  EXPECT_EQ(few.path(), "flash_sm80");
  EXPECT_EQ(few.advice_size(), 0);
  const v1::PlanResponse wide = Plan(v1::PASS_BACKWARD, 4, 264);
  EXPECT_EQ(wide.path(), "");
  ASSERT_EQ(wide.advice_size(), 1);
  EXPECT_THAT(wide.advice(0), HasSubstr("for flash_sm80: "));
  EXPECT_THAT(wide.advice(0), HasSubstr("head_dim 264 > 256"));
}

TEST_F(ServerDeviceTest, HealthEndsWithTheLastHealthyDevice) {
  EXPECT_THAT(Scrape(), HasSubstr("attn_healthy 1"));
  devices_.Fail(0);
  std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("attn_healthy 1"));
  EXPECT_THAT(text, HasSubstr("attn_devices{health=\"healthy\"} 1"));
  EXPECT_THAT(text, HasSubstr("attn_devices{health=\"unhealthy\"} 1"));
  EXPECT_EQ(Info().devices(0).error(), "cudaErrorIllegalAddress");
  EXPECT_EQ(Info().devices(1).error(), "");
  devices_.Fail(1);
  text = Scrape();
  EXPECT_THAT(text, HasSubstr("attn_healthy 0"));
  EXPECT_THAT(text, HasSubstr("attn_devices{health=\"healthy\"} 0"));
}

TEST_F(ServerDeviceTest, AFailedCallHasNoTensor) {
  failure_ = absl::InternalError("CUDA device 1: cudaErrorIllegalAddress");
  v1::ForwardResponse response;
  const grpc::Status status = Forward(&response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_EQ(response.payload_size(), 0);
  EXPECT_EQ(server_->metrics().ExecutionCount(Pass::kForward, PathId::kFlashSm80, DType::kFp16), 0);
}

TEST_F(ServerDeviceTest, PathsWithoutADeviceSayWhy) {
  const v1::GetServerInfoResponse info = Info();
  for (const v1::PathInfo& path : info.paths()) {
    if (path.path() != "standard_cuda") continue;
    ASSERT_EQ(path.rejections_size(), 1);
    EXPECT_EQ(path.rejections(0).reason(), v1::REASON_NO_CUDA_DEVICE);
    EXPECT_EQ(path.rejections(0).detail(), "why not");
  }
}

TEST_F(ServerDeviceTest, TheServerLetsGoOfTheDevices) {
  server_.reset();
  MutexLock lock(devices_.mutex);
  EXPECT_EQ(devices_.callback, nullptr);
}

}  // namespace
}  // namespace attn::server
