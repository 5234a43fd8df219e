// Calls through a server that keeps the contract: unary, streaming, retries, deadlines,
// cancellation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "client/lib/client.h"
#include "tests/unit/client_fake_attention.h"
#include "tests/unit/client_fake_server.h"

namespace attn::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

std::unique_ptr<Client> Connect(const FakeServer& server, ChannelOptions options = {}) {
  options.target = server.target();
  auto client = Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

void ExpectResult(const absl::StatusOr<ForwardResult>& result, const ForwardCall& call) {
  ASSERT_TRUE(result.ok()) << result.status();
  const FakeResult expected = Expected(call);
  EXPECT_EQ(Text(result->out), expected.out);
  EXPECT_EQ(Text(result->lse), expected.lse);
  EXPECT_EQ(result->out.dtype, v1::DTYPE_BF16);
  EXPECT_EQ(result->out.shape, call.inputs.q.shape);
  EXPECT_EQ(result->lse.dtype, v1::DTYPE_FP32);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(result->out.bytes.data()) % 64, 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(result->lse.bytes.data()) % 64, 0);
  EXPECT_EQ(result->report.path(), "flash_cpu");
}

FakeMethod Refuse(grpc::StatusCode code, const std::string& message,
                  std::vector<std::pair<std::string, std::string>> trailers = {}) {
  return {[=](const auto&, int) {
            return FakeAnswer{{}, {code, message}, trailers};
          },
          /*answer_after=*/1};
}

TEST(ClientCallTest, MalformedTraceparentIsRefusedHere) {
  FakeServer server;
  ServeForward(server);
  const auto client = Connect(server);
  CallOptions options;
  options.traceparent = "00-1234-5678-01";
  const auto result = client->Forward(MakeForward(77), options);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("00-1234-5678-01"));
  EXPECT_EQ(client->Plan({}, options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(server.Calls("Forward"), 0);
}

TEST(ClientCallTest, Unary) {
  FakeServer server;
  ServeForward(server);
  const auto client = Connect(server);
  const ForwardCall call = MakeForward(77);
  const auto result = client->Forward(call);
  ExpectResult(result, call);
  EXPECT_FALSE(result->streamed);
  EXPECT_EQ(result->attempts, 1);
  EXPECT_GT(result->latency.count(), 0);
  EXPECT_EQ(server.Calls("ForwardStream"), 0);
}

TEST(ClientCallTest, TensorsWithoutOwnerAreSentToo) {
  FakeServer server;
  ServeForward(server);
  const auto client = Connect(server);
  const ForwardCall owned = MakeForward(40);
  ForwardCall call = owned;
  for (HostTensor* tensor : {&call.inputs.q, &call.inputs.k, &call.inputs.v}) tensor->owner.reset();
  ExpectResult(client->Forward(call), owned);
  CallOptions stream;
  stream.streaming = true;
  ExpectResult(client->Forward(call, stream), owned);
}

TEST(ClientCallTest, EmptyTensorsComeBackEmpty) {
  FakeServer server;
  ServeForward(server);
  const auto client = Connect(server);
  const ForwardCall call = MakeForward(0);
  ExpectResult(client->Forward(call), call);
  CallOptions stream;
  stream.streaming = true;
  ExpectResult(client->Forward(call, stream), call);
}

TEST(ClientCallTest, LargeTensorsAreStreamedInChunks) {
  FakeServer server;
  ServeForward(server);
  ChannelOptions options;
  options.stream_threshold_bytes = 1 << 20;
  const auto client = Connect(server, options);
  const ForwardCall call = MakeForward(40'001);  // 5,120,128 bytes a tensor: not whole chunks
  uint64_t sent = 0, sent_total = 0, received = 0, received_total = 0;
  CallOptions call_options;
  call_options.progress = [&](uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    EXPECT_GE(a, sent);
    EXPECT_GE(c, received);
    sent = a, sent_total = b, received = c, received_total = d;
  };
  const auto result = client->Forward(call, call_options);
  ExpectResult(result, call);
  EXPECT_TRUE(result->streamed);
  EXPECT_EQ(server.Calls("Forward"), 0);
  EXPECT_EQ(sent, 3u * 5'120'128);
  EXPECT_EQ(sent_total, sent);
  EXPECT_EQ(received, 5'120'128u + 4 * 40'001 * 2);
  EXPECT_EQ(received_total, received);
}

TEST(ClientCallTest, ThresholdIsTheServersLimitWhereThatIsLower) {
  FakeServer server;
  ServeForward(server);
  v1::GetServerInfoResponse info;
  info.mutable_limits()->set_max_unary_bytes(4 << 20);
  server.SetInfo(info);
  const auto client = Connect(server);
  EXPECT_FALSE(client->Forward(MakeForward(1000))->streamed);
  EXPECT_TRUE(client->Forward(MakeForward(30'000))->streamed);  // 3.8 MB a tensor
}

TEST(ClientCallTest, ReplyMayBeginBeforeTheHalfClose) {
  // The server writes its whole reply, larger than every window on the way, before it reads on.
  // That deadlocks a client that sends everything first and then reads.
  FakeServer server;
  const ForwardCall call = MakeForward(80'000, 2, 128);  // 41 MB a tensor
  FakeMethod method;
  method.answer = [&](const auto&, int) {
    return FakeAnswer{StreamReply(Expected(call)), grpc::Status::OK, {}};
  };
  method.answer_after = 1;
  method.finish_after_half_close = true;
  server.Set("ForwardStream", method);
  CallOptions options;
  options.streaming = true;
  options.deadline = std::chrono::minutes(2);
  ExpectResult(Connect(server)->Forward(call, options), call);
}

TEST(ClientCallTest, RefusalWhileSendingEndsTheCall) {
  FakeServer server;
  server.Set("ForwardStream", Refuse(grpc::StatusCode::INVALID_ARGUMENT, "q: wrong"));
  CallOptions options;
  options.streaming = true;
  uint64_t sent = 0, total = 0;
  options.progress = [&](uint64_t a, uint64_t b, uint64_t, uint64_t) { sent = a, total = b; };
  const auto client = Connect(server);
  const auto result = client->Forward(MakeForward(200'000, 2, 128), options);  // 307 MB
  EXPECT_EQ(result.status(), absl::InvalidArgumentError("q: wrong"));
  EXPECT_EQ(total, 3u * 102'400'000);
  EXPECT_LT(sent, total / 2);
  // The connection is as good as before.
  ServeForward(server);
  const ForwardCall call = MakeForward(100);
  ExpectResult(client->Forward(call), call);
}

TEST(ClientCallTest, OneBufferForSeveralTensorsTravelsOnce) {
  FakeServer server;
  v1::ForwardRequest seen;
  server.Set("Forward", {[&](const auto& messages, int) {
               EXPECT_TRUE(seen.ParseFromString(messages[0]));
               return FakeAnswer{{UnaryReply(FakeForwardUnary(messages[0]))}, grpc::Status::OK, {}};
             }});
  ForwardCall call = MakeForward(9);
  call.inputs.k = call.inputs.v = call.inputs.q;
  ASSERT_TRUE(Connect(server)->Forward(call).ok());
  ASSERT_EQ(seen.payload_size(), 1);
  EXPECT_EQ(seen.payload(0), Text(call.inputs.q));
  EXPECT_EQ(seen.header().v().payload(), 0);
}

TEST(ClientCallTest, ServersStatusIsKept) {
  FakeServer server;
  server.Set("Forward", Refuse(grpc::StatusCode::FAILED_PRECONDITION, "flash_cpu: head_dim"));
  const auto client = Connect(server);
  EXPECT_EQ(client->Forward(MakeForward(3)).status(),
            absl::FailedPreconditionError("flash_cpu: head_dim"));
  EXPECT_EQ(server.Calls("Forward"), 1);
}

TEST(ClientCallTest, PushbackIsHonoured) {
  for (const bool streaming : {false, true}) {
    FakeServer server;
    ServeForward(server);
    const ForwardCall call = MakeForward(5);
    FakeMethod method;
    method.answer = [&](const auto&, int attempt) {
      if (attempt < 3) {
        return FakeAnswer{{},
                          {grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full"},
                          {{"grpc-retry-pushback-ms", "30"}}};
      }
      return FakeAnswer{streaming ? StreamReply(Expected(call))
                                  : std::vector<std::string>{UnaryReply(Expected(call))},
                        grpc::Status::OK,
                        {}};
    };
    server.Set(streaming ? "ForwardStream" : "Forward", method);
    CallOptions options;
    options.streaming = streaming;
    const auto begin = steady_clock::now();
    const auto result = Connect(server)->Forward(call, options);
    ExpectResult(result, call);
    EXPECT_EQ(result->attempts, 3);
    EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
  }
}

TEST(ClientCallTest, OnlyUnavailableAndPushbackAreRetried) {
  const std::vector<std::pair<std::string, std::string>> none,
      never = {{"grpc-retry-pushback-ms", "-1"}};
  const std::vector<std::pair<std::string, std::string>> now = {{"grpc-retry-pushback-ms", "0"}};
  const struct {
    grpc::StatusCode code;
    std::vector<std::pair<std::string, std::string>> trailers;
    int calls;
  } cases[] = {{grpc::StatusCode::RESOURCE_EXHAUSTED, none, 1},
               {grpc::StatusCode::RESOURCE_EXHAUSTED, never, 1},
               {grpc::StatusCode::RESOURCE_EXHAUSTED, now, 3},
               {grpc::StatusCode::UNAVAILABLE, none, 3},
               {grpc::StatusCode::UNAVAILABLE, never, 1},
               {grpc::StatusCode::INTERNAL, now, 1},
               {grpc::StatusCode::INVALID_ARGUMENT, now, 1},
               {grpc::StatusCode::CANCELLED, none, 1}};
  for (const auto& c : cases) {
    FakeServer server;
    server.Set("Forward", Refuse(c.code, "no", c.trailers));
    ChannelOptions options;
    options.max_retries = 2;
    const auto status = Connect(server, options)->Forward(MakeForward(3)).status();
    EXPECT_EQ(static_cast<int>(status.code()), c.code);
    EXPECT_EQ(server.Calls("Forward"), c.calls) << status;
  }
}

TEST(ClientCallTest, AWaitBeyondTheDeadlineIsNotBegun) {
  FakeServer server;
  server.Set("Forward", Refuse(grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full",
                               {{"grpc-retry-pushback-ms", "3600000"}}));
  CallOptions options;
  options.deadline = std::chrono::seconds(60);
  EXPECT_EQ(Connect(server)->Forward(MakeForward(3), options).status(),
            absl::ResourceExhaustedError("queue full"));
}

TEST(ClientCallTest, DeadlineEndsACallThatIsNotAnswered) {
  FakeServer server;
  FakeMethod hang;
  hang.hang = true;
  server.Set("Forward", hang);
  server.Set("ForwardStream", hang);
  const auto client = Connect(server);
  for (const bool streaming : {false, true}) {
    CallOptions options;
    options.streaming = streaming;
    options.deadline = milliseconds(50);
    EXPECT_TRUE(absl::IsDeadlineExceeded(client->Forward(MakeForward(3), options).status()));
    server.AwaitCancelled(streaming ? "ForwardStream" : "Forward");
  }
  CallOptions past;
  past.deadline = milliseconds(-1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Forward(MakeForward(3), past).status()));
}

TEST(ClientCallTest, CancelFlagEndsTheCall) {
  FakeServer server;
  FakeMethod hang;
  hang.hang = true;
  server.Set("Forward", hang);
  server.Set("ForwardStream", hang);
  const auto client = Connect(server);
  for (const bool streaming : {false, true}) {
    const std::string method = streaming ? "ForwardStream" : "Forward";
    std::atomic<bool> cancel{false};
    std::thread canceller([&] {
      server.AwaitMessages(method, streaming ? 2 : 1);
      cancel = true;
    });
    CallOptions options;
    options.streaming = streaming;
    options.cancel = &cancel;
    EXPECT_EQ(client->Forward(MakeForward(3), options).status(),
              absl::CancelledError("cancelled by the caller"));
    canceller.join();
    server.AwaitCancelled(method);
  }
}

TEST(ClientCallTest, CancelFlagCutsARetryWaitShort) {
  FakeServer server;
  std::atomic<bool> cancel{false};
  server.Set("Forward", {[&](const auto&, int) {
                           cancel = true;
                           return FakeAnswer{{},
                                             {grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full"},
                                             {{"grpc-retry-pushback-ms", "86400000"}}};
                         },
                         1});
  CallOptions options;
  options.cancel = &cancel;
  EXPECT_TRUE(absl::IsCancelled(Connect(server)->Forward(MakeForward(3), options).status()));
}

TEST(ClientCallTest, ForcedUnaryOverTheLimitIsRefusedBeforeItIsSent) {
  FakeServer server;
  ServeForward(server);
  const auto client = Connect(server);
  CallOptions options;
  options.streaming = false;
  const auto status = client->Forward(MakeForward(200'000, 2, 128), options).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("307200000 bytes"));
  EXPECT_EQ(server.Calls("Forward"), 0);
}

TEST(ClientCallTest, OverTwoGibibytesIsNeverUnary) {
  FakeServer server;
  v1::GetServerInfoResponse no_limits;
  server.SetInfo(no_limits);
  server.Set("Forward", Refuse(grpc::StatusCode::INTERNAL, "unary"));
  server.Set("ForwardStream", Refuse(grpc::StatusCode::INVALID_ARGUMENT, "streamed"));
  constexpr size_t kSize = (size_t{1} << 31) + 256;  // address space, not memory: never written
  void* region =
      mmap(nullptr, kSize, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(region, MAP_FAILED);
  ForwardCall call = MakeForward(1, 1, 128);
  HostTensor& q = call.inputs.q;
  q.shape = {1, static_cast<int64_t>(kSize / 256), 1, 128};
  q.bytes = {static_cast<const std::byte*>(region), kSize};
  q.owner = std::shared_ptr<const void>(region, [](void* p) { munmap(p, kSize); });
  ChannelOptions options;
  options.stream_threshold_bytes = ~uint64_t{0};
  const auto client = Connect(server, options);
  EXPECT_EQ(client->Forward(call).status(), absl::InvalidArgumentError("streamed"));
  CallOptions unary;
  unary.streaming = false;
  EXPECT_TRUE(absl::IsResourceExhausted(client->Forward(call, unary).status()));
  EXPECT_EQ(server.Calls("Forward"), 0);
}

TEST(ClientCallTest, ManyThreadsOverSeveralChannels) {
  FakeServer server;
  ServeForward(server);
  ChannelOptions options;
  options.channels = 4;
  const auto client = Connect(server, options);
  const ForwardCall call = MakeForward(300);
  const FakeResult expected = Expected(call);
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        CallOptions call_options;
        call_options.streaming = (t + i) % 2 == 0;
        const auto result = client->Forward(call, call_options);
        if (result.ok() && Text(result->out) == expected.out) ++good;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 200);
}

TEST(ClientCallTest, UnixSocket) {
  const std::string path = ::testing::TempDir() + "attn_client_" + std::to_string(getpid());
  FakeServer server(path);
  ServeForward(server);
  const ForwardCall call = MakeForward(50);
  ExpectResult(Connect(server)->Forward(call), call);
  unlink(path.c_str());
}

TEST(ClientCallTest, BackwardSendsAndReturnsEveryTensor) {
  FakeServer server;
  v1::BackwardRequest seen;
  server.Set("Backward", {[&](const auto& messages, int) {
               EXPECT_TRUE(seen.ParseFromString(messages[0]));
               v1::BackwardResponse reply;
               v1::BackwardResponseHeader* header = reply.mutable_header();
               const v1::Tensor* from[] = {&seen.header().q(), &seen.header().k(),
                                           &seen.header().v(), &seen.header().options().bias(),
                                           &seen.header().options().sinks()};
               v1::Tensor* to[] = {header->mutable_dq(), header->mutable_dk(), header->mutable_dv(),
                                   header->mutable_dbias(), header->mutable_dsink()};
               for (int i = 0; i < 5; ++i) {
                 *to[i] = *from[i];
                 to[i]->set_payload(i);
                 reply.add_payload(seen.payload(from[i]->payload()));
               }
               reply.mutable_report()->set_path("standard_cpu");
               return FakeAnswer{{reply.SerializeAsString()}, grpc::Status::OK, {}};
             }});
  const ForwardCall forward = MakeForward(6);
  BackwardCall call;
  *call.header.mutable_shape() = forward.header.shape();
  call.header.mutable_options()->mutable_alibi_slopes()->set_payload(17);  // stale
  call.inputs = forward.inputs;
  call.inputs.bias = Pattern(v1::DTYPE_FP32, {1, 1, 6, 6}, 4);
  call.inputs.sinks = Pattern(v1::DTYPE_FP32, {2}, 5);
  call.out = Pattern(v1::DTYPE_BF16, {1, 6, 2, 32}, 6);
  call.lse = Pattern(v1::DTYPE_FP32, {1, 2, 6}, 7);
  call.dout = Pattern(v1::DTYPE_BF16, {1, 6, 2, 32}, 8);
  call.dlse = Pattern(v1::DTYPE_FP32, {1, 2, 6}, 9);
  const auto result = Connect(server)->Backward(call);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Text(result->dq), Text(call.inputs.q));
  EXPECT_EQ(Text(result->dk), Text(call.inputs.k));
  EXPECT_EQ(Text(result->dv), Text(call.inputs.v));
  EXPECT_EQ(Text(result->dbias), Text(call.inputs.bias));
  EXPECT_EQ(Text(result->dsink), Text(call.inputs.sinks));
  EXPECT_EQ(result->report.path(), "standard_cpu");
  EXPECT_FALSE(seen.header().options().has_alibi_slopes());
  const auto payload = [&](const v1::Tensor& t) { return seen.payload(t.payload()); };
  EXPECT_EQ(payload(seen.header().out()), Text(call.out));
  EXPECT_EQ(payload(seen.header().lse()), Text(call.lse));
  EXPECT_EQ(payload(seen.header().dout()), Text(call.dout));
  EXPECT_EQ(payload(seen.header().dlse()), Text(call.dlse));
}

TEST(ClientCallTest, PlanInfoAndHealth) {
  FakeServer server;
  server.Set("Plan", {[](const auto& messages, int) {
               v1::PlanRequest request;
               EXPECT_TRUE(request.ParseFromString(messages[0]));
               v1::PlanResponse reply;
               reply.set_path(v1::Pass_Name(request.pass()));
               return FakeAnswer{{reply.SerializeAsString()}, grpc::Status::OK, {}};
             }});
  server.Set("/grpc.health.v1.Health/Check", {[](const auto& messages, int) {
               if (messages[0] == "\x0a\x03two") return FakeAnswer{{"\x08\x02"}, {}, {}};
               if (messages[0].empty()) return FakeAnswer{{"\x08\x01"}, {}, {}};
               return FakeAnswer{{}, {grpc::StatusCode::NOT_FOUND, "unknown service"}, {}};
             }});
  const auto client = Connect(server);
  v1::PlanRequest request;
  request.set_pass(v1::PASS_BACKWARD);
  EXPECT_EQ(client->Plan(request)->path(), "PASS_BACKWARD");
  EXPECT_EQ(client->ServerInfo()->limits().max_unary_bytes(), 64 << 20);
  EXPECT_TRUE(*client->Healthy());
  EXPECT_FALSE(*client->Healthy("two"));
  EXPECT_TRUE(absl::IsNotFound(client->Healthy("three").status()));
}

}  // namespace
}  // namespace attn::client
