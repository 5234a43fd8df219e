// A whole server in this process, on a port of the system's choice, through the stub that protoc
// generates.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/v1/attention.grpc.pb.h"
#include "kernels/cpu/backends.h"
#include "proto/wire/framing.h"
#include "server/rpc/server.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

namespace v1 = ::attention::v1;
using testing::AllOf;
using testing::HasSubstr;

// Zeros of batch 1, `seqlen` queries and keys, 2 heads.
v1::ForwardRequest Request(int64_t seqlen, int64_t head_dim = 64) {
  v1::ForwardRequest request;
  v1::ForwardRequestHeader& header = *request.mutable_header();
  header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  header.mutable_shape()->set_num_heads(2);
  header.mutable_shape()->set_num_kv_heads(2);
  uint32_t index = 0;
  for (v1::Tensor* tensor : {header.mutable_q(), header.mutable_k(), header.mutable_v()}) {
    tensor->set_dtype(v1::DTYPE_FP32);
    for (int64_t extent : {int64_t{1}, seqlen, int64_t{2}, head_dim}) tensor->add_shape(extent);
    tensor->set_payload(index++);
    request.add_payload(std::string(static_cast<size_t>(seqlen * 2 * head_dim * 4), '\0'));
  }
  return request;
}

// Over the limit under which calls run on gRPC's own thread, so that it goes through the queue.
v1::ForwardRequest QueuedRequest() { return Request(128); }

std::string Trailer(const grpc::ClientContext& context, const std::string& key) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto it = trailers.find(key);
  return it == trailers.end() ? "" : std::string(it->second.data(), it->second.size());
}

// One asynchronous Forward.
struct PendingCall {
  grpc::ClientContext context;
  v1::ForwardRequest request = QueuedRequest();
  v1::ForwardResponse response;
  std::promise<grpc::Status> done;

  void Start(v1::Attention::Stub& stub) {
    stub.async()->Forward(&context, &request, &response,
                          [this](grpc::Status status) { done.set_value(status); });
  }
  grpc::Status Await() { return done.get_future().get(); }
};

class ServerTest : public testing::Test {
 protected:
  static Config TestConfig() {
    Config config;
    config.listen = {"127.0.0.1:0"};
    config.metrics_listen = "";
    config.executor_workers = 1;
    return config;
  }

  void StartFake(Config config = TestConfig(), Gate* gate = nullptr) {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::make_unique<FakeBackend>(PathId::kFlashCpu, gate));
    backends.push_back(std::make_unique<FakeBackend>(PathId::kStandardCpu, gate));
    Start(config, std::move(backends), /*self_test=*/false);
  }

  void StartReal() {
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(MakeFlashCpuBackend(&pool_));
    backends.push_back(MakeStandardCpuBackend(&pool_));
    Start(TestConfig(), std::move(backends), /*self_test=*/true);
  }

  void Start(Config config, std::vector<std::unique_ptr<Backend>> backends, bool self_test) {
    ServerOptions options{
        .config = std::move(config), .backends = std::move(backends), .devices = {}};
    options.self_test = self_test;
    options.measure_rates = false;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials());
    stub_ = v1::Attention::NewStub(channel_);
  }

  grpc::Status Forward(const v1::ForwardRequest& request, v1::ForwardResponse* response = nullptr) {
    v1::ForwardResponse ignored;
    context_ = std::make_unique<grpc::ClientContext>();
    return stub_->Forward(context_.get(), request, response != nullptr ? response : &ignored);
  }

  // Sends these and reads to the end.
  grpc::Status Stream(const std::vector<v1::ForwardStreamRequest>& messages,
                      std::vector<v1::ForwardStreamResponse>* responses = nullptr) {
    grpc::ClientContext context;
    auto stream = stub_->ForwardStream(&context);
    for (const auto& message : messages) {
      if (!stream->Write(message)) break;
    }
    stream->WritesDone();
    v1::ForwardStreamResponse response;
    while (stream->Read(&response)) {
      if (responses != nullptr) responses->push_back(response);
    }
    return stream->Finish();
  }

  // grpc.health.v1.Health/Check, by hand: field 1 is the service's name, field 1 of the answer its
  // status (1: SERVING, 2: NOT_SERVING).
  int Health(const std::string& service) {
    const grpc::Slice slice(wire::FieldPrefix(1, service.size()) + service);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                           grpc::internal::RpcMethod::NORMAL_RPC);
    const grpc::Status status =
        grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
            channel_.get(), method, &context, request, &response);
    if (!status.ok()) return -static_cast<int>(status.error_code());
    grpc::Slice bytes;
    if (!response.DumpToSingleSlice(&bytes).ok() || bytes.size() != 2) return 0;
    return bytes.begin()[1];
  }

  std::string Gauge(const std::string& name) {
    const std::string text = server_->metrics().Scrape();
    const size_t at = text.find("\n" + name + " ");
    return text.substr(at + 1, text.find('\n', at + 1) - at - 1);
  }

  // Waits for a gauge that follows the end of a call.
  void AwaitGauge(const std::string& line) {
    const std::string name = line.substr(0, line.find(' '));
    while (Gauge(name) != line) std::this_thread::yield();
  }

  ThreadPool pool_{2};
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
};

TEST_F(ServerTest, ForwardAnswersWithTheCountingOracle) {
  StartReal();
  v1::ForwardRequest request =
      Request(5);  // Q = 0, V_j = j, causal: out_i = i / 2, lse_i = ln(i + 1)
  request.mutable_header()->mutable_options()->set_causal(true);
  std::vector<float> v(5 * 2 * 64);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 128);
  std::memcpy(request.mutable_payload(2)->data(), v.data(), v.size() * 4);
  v1::ForwardResponse response;
  const grpc::Status status = Forward(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.payload_size(), 2);
  ASSERT_EQ(response.payload(0).size(), v.size() * 4);
  ASSERT_EQ(response.payload(1).size(), 2 * 5 * 4u);
  EXPECT_EQ(response.header().out().shape_size(), 4);
  EXPECT_EQ(response.header().lse().shape(2), 5);
  for (int row = 0; row < 5; ++row) {
    float out = 0, lse = 0;
    std::memcpy(&out, response.payload(0).data() + row * 128 * 4, 4);
    std::memcpy(&lse, response.payload(1).data() + row * 4, 4);
    EXPECT_NEAR(out, row / 2.0, 1e-6);
    EXPECT_NEAR(lse, std::log(row + 1.0), 1e-5);
  }
  const v1::ExecutionReport& report = response.report();
  EXPECT_EQ(report.path(), "flash_cpu");
  EXPECT_EQ(report.path_class(), v1::PATH_CLASS_FLASH);
  EXPECT_EQ(report.fused_batch(), 1u);
  EXPECT_EQ(report.flops(), 2u * 15 * 2 * 128);
  EXPECT_EQ(report.traffic().wire_request_bytes(), 3 * v.size() * 4);
  EXPECT_GT(report.times().kernel_ns(), 0u);
  EXPECT_GE(report.times().handler_ns(), report.times().kernel_ns());
  EXPECT_EQ(report.rejections_size(), 3);  // three CUDA paths
  EXPECT_EQ(Trailer(*context_, "attn-path"), "flash_cpu");
  EXPECT_EQ(Trailer(*context_, "attn-kernel"), report.kernel());
  EXPECT_THAT(Trailer(*context_, "attn-rejections"), HasSubstr("flash_sm90:NOT_BUILT"));
  EXPECT_EQ(server_->metrics().ExecutionCount(Pass::kForward, PathId::kFlashCpu, DType::kFp32), 1);
  AwaitGauge("attn_inflight_requests 0");
  AwaitGauge("attn_inflight_bytes 0");
}

TEST_F(ServerTest, StreamAnswersAsUnaryDoes) {
  StartReal();
  v1::ForwardRequest request = Request(700);  // 358,400 bytes a tensor
  for (int i = 0; i < 3; ++i) {
    for (size_t k = 0; k < request.payload(i).size(); k += 4) {
      const float value = static_cast<float>((k * 2654435761u + i) % 1000) / 500.0f - 1.0f;
      std::memcpy(request.mutable_payload(i)->data() + k, &value, 4);
    }
  }
  v1::ForwardResponse unary;
  ASSERT_TRUE(Forward(request, &unary).ok());
  std::vector<v1::ForwardStreamRequest> messages(1);
  *messages[0].mutable_header() = request.header();
  // Payloads interleaved, in pieces of an odd size.
  for (size_t offset = 0; offset < request.payload(0).size(); offset += 100'001) {
    for (uint32_t i = 0; i < 3; ++i) {
      v1::PayloadChunk& chunk = *messages.emplace_back().mutable_chunk();
      chunk.set_payload_index(i);
      chunk.set_offset(offset);
      chunk.set_data(request.payload(static_cast<int>(i)).substr(offset, 100'001));
    }
  }
  std::vector<v1::ForwardStreamResponse> responses;
  const grpc::Status status = Stream(messages, &responses);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(responses.size(), 4u);
  EXPECT_TRUE(responses.front().has_header());
  EXPECT_TRUE(responses.back().has_report());
  std::string out[2];
  for (size_t i = 1; i + 1 < responses.size(); ++i) {
    const v1::PayloadChunk& chunk = responses[i].chunk();
    ASSERT_EQ(chunk.offset(), out[chunk.payload_index()].size());
    out[chunk.payload_index()] += chunk.data();
  }
  EXPECT_TRUE(out[0] == unary.payload(0));
  EXPECT_TRUE(out[1] == unary.payload(1));
}

TEST_F(ServerTest, ErrorsHaveTheirCodesAndNoTensor) {
  StartFake();
  v1::ForwardRequest request = Request(4);
  request.mutable_payload()->RemoveLast();
  grpc::Status status = Forward(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("v.payload is 2"));
  request = Request(4);
  request.mutable_header()->mutable_shape()->set_num_kv_heads(3);
  EXPECT_EQ(Forward(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request = Request(4);
  request.mutable_header()->mutable_q()->set_dtype(static_cast<v1::DType>(77));
  status = Forward(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("q.dtype has the value 77"));
  EXPECT_EQ(server_->metrics().RequestCount(Method::kForward, absl::StatusCode::kInvalidArgument),
            2);
  EXPECT_EQ(server_->metrics().RequestCount(Method::kForward, absl::StatusCode::kUnimplemented), 1);
  AwaitGauge("attn_inflight_requests 0");
}

TEST_F(ServerTest, OptionContentsAreChecked) {
  StartFake();
  v1::ForwardRequest request = Request(4);
  v1::Tensor& sinks = *request.mutable_header()->mutable_options()->mutable_sinks();
  sinks.set_dtype(v1::DTYPE_FP32);
  sinks.add_shape(2);
  sinks.set_payload(3);
  const float values[2] = {0.0f, std::nanf("")};
  request.add_payload(values, sizeof(values));
  const grpc::Status status = Forward(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("sinks"));
}

TEST_F(ServerTest, RequireFlashIsRefusedWithEveryReason) {
  StartFake();
  v1::ForwardRequest request = Request(4, 264);
  request.mutable_header()->mutable_path_policy()->set_mode(v1::PATH_POLICY_REQUIRE_FLASH);
  const grpc::Status status = Forward(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("flash_sm90"), HasSubstr("NOT_BUILT"),
                                            HasSubstr("head_dim 264 > 256")));
  EXPECT_THAT(Trailer(*context_, "attn-rejections"), HasSubstr("flash_cpu:HEAD_DIM_UNSUPPORTED"));
  EXPECT_EQ(server_->metrics().RejectionCount(PathId::kFlashCpu, Reason::kHeadDimUnsupported), 1);
  // Without the demand it runs, and says why not on flash.
  request.mutable_header()->clear_path_policy();
  v1::ForwardResponse response;
  ASSERT_TRUE(Forward(request, &response).ok());
  EXPECT_EQ(response.report().path(), "standard_cpu");
  EXPECT_EQ(response.report().rejections(3).reason(), v1::REASON_HEAD_DIM_UNSUPPORTED);
  // Both are among the recent calls, the refused one without a report.
  const auto recent = server_->recent_calls().Snapshot();
  ASSERT_EQ(recent.size(), 2u);
  EXPECT_EQ(recent[0].ParseReport().SerializeAsString(), response.report().SerializeAsString());
  EXPECT_EQ(recent[0].shape.head_dim, 264);
  EXPECT_EQ(recent[0].shape.seqlen_q, 4);
  EXPECT_EQ(recent[1].code, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(recent[1].error, HasSubstr("head_dim 264 > 256"));
  EXPECT_THAT(recent[1].rejections, HasSubstr("flash_cpu:HEAD_DIM_UNSUPPORTED"));
  EXPECT_EQ(recent[1].report, "");
}

TEST_F(ServerTest, OversizeReplyIsRefusedBeforeItRuns) {
  Config config = TestConfig();
  config.max_unary_bytes = uint64_t{1} << 20;
  StartFake(config);
  v1::ForwardRequest request = Request(1);
  v1::Tensor& q = *request.mutable_header()->mutable_q();
  q.set_shape(1, 4096);  // 2 MiB of out from one stored row
  for (int64_t stride : {128, 0, 64, 1}) q.add_strides(stride);
  const grpc::Status status = Forward(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("ForwardStream"), HasSubstr("1048576")));
  EXPECT_EQ(Trailer(*context_, "grpc-retry-pushback-ms"), "");
  EXPECT_EQ(server_->metrics().ExecutionCount(Pass::kForward, PathId::kFlashCpu, DType::kFp32), 0);
  // By streaming it runs.
  std::vector<v1::ForwardStreamRequest> messages(1);
  *messages[0].mutable_header() = request.header();
  for (uint32_t i = 0; i < 3; ++i) {
    v1::PayloadChunk& chunk = *messages.emplace_back().mutable_chunk();
    chunk.set_payload_index(i);
    chunk.set_data(request.payload(static_cast<int>(i)));
  }
  std::vector<v1::ForwardStreamResponse> responses;
  ASSERT_TRUE(Stream(messages, &responses).ok());
  EXPECT_EQ(responses.size(), 1 + 2 + 1 + 1u);  // header, out in two chunks, lse, report
  // A request over the limit is refused too.
  EXPECT_EQ(Forward(Request(2048)).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(ServerTest, StreamErrorsNamePayloadOffsetAndExpectation) {
  StartFake();
  const v1::ForwardRequest request = Request(4);  // 2048 bytes a tensor
  v1::ForwardStreamRequest header, chunk;
  *header.mutable_header() = request.header();
  const auto piece = [](uint32_t index, uint64_t offset, size_t size) {
    v1::ForwardStreamRequest message;
    message.mutable_chunk()->set_payload_index(index);
    message.mutable_chunk()->set_offset(offset);
    message.mutable_chunk()->set_data(std::string(size, '\0'));
    return message;
  };
  const std::vector<std::pair<std::vector<v1::ForwardStreamRequest>, std::string>> cases = {
      {{}, "ended before its header"},
      {{piece(0, 0, 4)}, "before the header"},
      {{header, header}, "second header"},
      {{header, v1::ForwardStreamRequest()}, "neither header nor chunk"},
      {{header, piece(0, 4, 4)}, "payload 0 has offset 4; expected 0 (there is a gap)"},
      {{header, piece(1, 0, 8), piece(1, 4, 8)}, "payload 1 has offset 4; expected 8 (it overlaps"},
      {{header, piece(2, 0, 2049)}, "payload 2 at offset 0 has 2049 bytes"},
      {{header, piece(3, 0, 4)}, "payload_index is 3"},
      {{header, piece(0, 0, 2048), piece(1, 0, 2000)},
       "payload 1 ended at offset 2000; expected 2048"},
  };
  for (const auto& [messages, expected] : cases) {
    const grpc::Status status = Stream(messages);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << expected;
    EXPECT_THAT(status.error_message(), HasSubstr(expected));
  }
  AwaitGauge("attn_inflight_requests 0");
  AwaitGauge("attn_buffer_pool_in_use_bytes 0");
}

TEST_F(ServerTest, StreamIsRefusedRightAfterItsHeader) {
  StartFake();
  v1::ForwardRequest request = Request(4);
  request.mutable_header()->mutable_path_policy()->set_mode(v1::PATH_POLICY_NAMED);
  request.mutable_header()->mutable_path_policy()->set_path("flash_sm90");
  grpc::ClientContext context;
  auto stream = stub_->ForwardStream(&context);
  v1::ForwardStreamRequest header;
  *header.mutable_header() = request.header();
  ASSERT_TRUE(stream->Write(header));
  v1::ForwardStreamResponse response;
  EXPECT_FALSE(stream->Read(&response));  // without any chunk or half-close
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ServerTest, FullServerRefusesWithARetryHint) {
  Gate gate;
  Config config = TestConfig();
  config.max_inflight_requests = 1;
  StartFake(config, &gate);
  PendingCall first;
  first.Start(*stub_);
  gate.AwaitWaiting(1);
  EXPECT_EQ(Gauge("attn_inflight_requests"), "attn_inflight_requests 1");
  EXPECT_EQ(Forward(QueuedRequest()).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GT(std::stoi(Trailer(*context_, "grpc-retry-pushback-ms")), 0);
  gate.Open();
  EXPECT_TRUE(first.Await().ok());
}

TEST_F(ServerTest, CancelAndDeadlineWhileQueuedDoNotWaitForTheirTurn) {
  Gate gate;
  StartFake(TestConfig(), &gate);
  PendingCall stuck, cancelled, late;
  stuck.Start(*stub_);
  gate.AwaitWaiting(1);
  cancelled.Start(*stub_);
  late.context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  late.Start(*stub_);
  AwaitGauge("attn_queued_requests 2");
  cancelled.context.TryCancel();
  EXPECT_EQ(cancelled.Await().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(late.Await().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  // The server has dropped both, with the first still running.
  AwaitGauge("attn_queued_requests 0");
  AwaitGauge("attn_queued_bytes 0");
  AwaitGauge("attn_inflight_requests 1");
  gate.Open();
  EXPECT_TRUE(stuck.Await().ok());
  AwaitGauge("attn_inflight_bytes 0");
  EXPECT_EQ(server_->metrics().RequestCount(Method::kForward, absl::StatusCode::kCancelled), 1);
  EXPECT_EQ(server_->metrics().RequestCount(Method::kForward, absl::StatusCode::kDeadlineExceeded),
            1);
}

TEST_F(ServerTest, CancelStopsARunningCall) {
  Gate gate;  // never opened: only the token ends the wait
  StartFake(TestConfig(), &gate);
  PendingCall call;
  call.Start(*stub_);
  gate.AwaitWaiting(1);
  call.context.TryCancel();
  EXPECT_EQ(call.Await().error_code(), grpc::StatusCode::CANCELLED);
  AwaitGauge("attn_inflight_requests 0");
}

TEST_F(ServerTest, DrainLetsCallsFinishAndRefusesNewOnes) {
  Gate gate;
  StartFake(TestConfig(), &gate);
  EXPECT_EQ(Health(""), 1);
  EXPECT_EQ(Health("attention.v1.Attention"), 1);
  EXPECT_EQ(Health("no.such.Service"), -static_cast<int>(grpc::StatusCode::NOT_FOUND));
  PendingCall call;
  call.Start(*stub_);
  gate.AwaitWaiting(1);
  std::future<bool> drained = std::async(std::launch::async, [this] { return server_->Drain(); });
  while (Health("attention.v1.Attention") != 2) std::this_thread::yield();
  EXPECT_EQ(Forward(Request(4)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Stream({}).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Gauge("attn_healthy"), "attn_healthy 0");
  gate.Open();
  EXPECT_TRUE(call.Await().ok());
  EXPECT_TRUE(drained.get());
}

TEST_F(ServerTest, DrainTimeoutCancelsWhatIsLeft) {
  Gate gate;
  Config config = TestConfig();
  config.drain_timeout = std::chrono::milliseconds(0);
  StartFake(config, &gate);
  PendingCall call;
  call.Start(*stub_);
  gate.AwaitWaiting(1);
  EXPECT_FALSE(server_->Drain());
  EXPECT_FALSE(call.Await().ok());
}

TEST_F(ServerTest, HastenEndsTheDrain) {
  Gate gate;
  StartFake(TestConfig(), &gate);
  PendingCall call;
  call.Start(*stub_);
  gate.AwaitWaiting(1);
  std::future<bool> drained = std::async(std::launch::async, [this] { return server_->Drain(); });
  server_->Hasten();
  EXPECT_FALSE(drained.get());
  EXPECT_FALSE(call.Await().ok());
}

TEST_F(ServerTest, BusyAddressesFailLoudly) {
  Config config = TestConfig();
  config.metrics_listen = "127.0.0.1:0";
  const std::string socket = testing::TempDir() + "/attnd_" + std::to_string(getpid()) + ".sock";
  config.listen.push_back("unix:" + socket);
  StartFake(config);
  for (const std::string& address : server_->addresses()) {
    ServerOptions options{.config = TestConfig(), .backends = {}, .devices = {}};
    options.config.listen = {address};
    options.self_test = options.measure_rates = false;
    const auto second = Server::Start(std::move(options));
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(second.status().ToString(), HasSubstr(address));
  }
  ServerOptions options{.config = TestConfig(), .backends = {}, .devices = {}};
  options.config.metrics_listen = server_->metrics_address();
  options.self_test = options.measure_rates = false;
  const auto second = Server::Start(std::move(options));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().ToString(), HasSubstr(server_->metrics_address()));
  EXPECT_TRUE(Forward(Request(4)).ok());  // the first still serves
}

TEST_F(ServerTest, PlanSaysWhatForwardDoes) {
  StartFake();
  for (int64_t head_dim : {64, 264}) {
    v1::ForwardRequest request = Request(4, head_dim);
    v1::PlanRequest plan_request;
    plan_request.set_pass(v1::PASS_FORWARD);
    ASSERT_TRUE(
        plan_request.mutable_header()->ParseFromString(request.header().SerializeAsString()));
    plan_request.mutable_header()->mutable_q()->clear_payload();  // shapes alone
    grpc::ClientContext context;
    v1::PlanResponse plan;
    ASSERT_TRUE(stub_->Plan(&context, plan_request, &plan).ok());
    v1::ForwardResponse response;
    ASSERT_TRUE(Forward(request, &response).ok());
    EXPECT_EQ(plan.path(), response.report().path());
    EXPECT_EQ(plan.kernel(), response.report().kernel());
    EXPECT_EQ(plan.flops(), response.report().flops());
    EXPECT_EQ(plan.traffic().SerializeAsString(), response.report().traffic().SerializeAsString());
    EXPECT_EQ(plan.rejections_size(), response.report().rejections_size());
    EXPECT_EQ(plan.advice_size(), head_dim == 64 ? 0 : 1);
    EXPECT_EQ(plan.score_entries_per_head(), 16u);
    EXPECT_EQ(plan.visible_pairs(), 2 * 16u);
  }
  v1::PlanRequest empty;
  v1::PlanResponse plan;
  grpc::ClientContext context;
  EXPECT_EQ(stub_->Plan(&context, empty, &plan).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTest, InfoListsPathsAndLimits) {
  Config config = TestConfig();
  config.disable_path = {"standard_cpu"};
  StartFake(config);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.version(), Version());
  ASSERT_EQ(info.paths_size(), 5);
  EXPECT_EQ(info.paths(0).path(), "flash_sm90");
  EXPECT_EQ(info.paths(0).rejections(0).reason(), v1::REASON_NOT_BUILT);
  EXPECT_TRUE(info.paths(3).available());
  EXPECT_EQ(info.paths(4).rejections(0).reason(), v1::REASON_DISABLED_BY_CONFIG);
  EXPECT_EQ(info.limits().max_chunk_bytes(), wire::kMaxChunkBytes);
  EXPECT_GT(info.limits().max_inflight_bytes(), 0u);
}

TEST_F(ServerTest, PortsFileHasTheBoundAddresses) {
  Config config = TestConfig();
  config.metrics_listen = "127.0.0.1:0";
  config.ports_file = testing::TempDir() + "/attnd_ports_" + std::to_string(getpid());
  StartFake(config);
  std::ifstream file(config.ports_file);
  std::string text;
  std::getline(file, text);
  EXPECT_EQ(text, "{\"listen\": [\"" + server_->addresses()[0] + "\"], \"metrics\": \"" +
                      server_->metrics_address() + "\"}");
  std::remove(config.ports_file.c_str());
}

}  // namespace
}  // namespace attn::server
