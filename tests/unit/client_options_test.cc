// What the client checks by itself: tensors, channel options, and when a call is tried again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "client/lib/client.h"
#include "client/lib/retry.h"
#include "tests/unit/client_fake_attention.h"
#include "tests/unit/client_fake_server.h"

namespace attn::client {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(HostTensorTest, AllocateGivesZeroedAlignedMemory) {
  HostTensor tensor = HostTensor::Allocate(v1::DTYPE_FP16, {3, 5, 7});
  EXPECT_EQ(tensor.NumElements(), 105);
  EXPECT_EQ(tensor.bytes.size(), 210);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.bytes.data()) % 64, 0);
  for (const std::byte byte : tensor.bytes) EXPECT_EQ(byte, std::byte{0});
  tensor.mutable_bytes()[209] = std::byte{1};
  EXPECT_EQ(tensor.bytes[209], std::byte{1});
  const HostTensor copy = tensor;
  EXPECT_EQ(copy.bytes.data(), tensor.bytes.data());
}

TEST(HostTensorTest, ShapesThatAreNone) {
  EXPECT_EQ(HostTensor::Allocate(v1::DTYPE_FP32, {4, 0}).bytes.size(), 0);
  EXPECT_FALSE(HostTensor::Allocate(v1::DTYPE_FP32, {4, 0}).empty());
  EXPECT_TRUE(HostTensor::Allocate(v1::DTYPE_FP32, {-1}).empty());
  EXPECT_TRUE(HostTensor::Allocate(v1::DTYPE_FP32, {1LL << 40, 1LL << 40}).empty());
  EXPECT_TRUE(HostTensor::Allocate(static_cast<v1::DType>(77), {1}).empty());
  HostTensor tensor;
  tensor.shape = {1LL << 40, 1LL << 40};
  EXPECT_EQ(tensor.NumElements(), -1);
  tensor.shape = {1LL << 40, 1LL << 40, 0};
  EXPECT_EQ(tensor.NumElements(), 0);
  tensor.shape = {};
  EXPECT_EQ(tensor.NumElements(), 1);
  EXPECT_EQ(SizeOf(v1::DTYPE_FP32), 4);
  EXPECT_EQ(SizeOf(v1::DTYPE_BF16), 2);
  EXPECT_EQ(SizeOf(v1::DTYPE_UINT8), 1);
  EXPECT_EQ(SizeOf(v1::DTYPE_UNSPECIFIED), 0);
}

TEST(ClientOptionsTest, TensorsAreCheckedBeforeAnythingIsSent) {
  FakeServer server;
  ServeForward(server);
  ChannelOptions options;
  options.target = server.target();
  const auto client = *Client::Connect(options);
  ForwardCall call = MakeForward(4);
  call.inputs.k = {};
  EXPECT_EQ(client->Forward(call).status(), absl::InvalidArgumentError("k is required"));
  call = MakeForward(4);
  call.inputs.v.bytes = call.inputs.v.bytes.first(100);
  EXPECT_EQ(client->Forward(call).status(),
            absl::InvalidArgumentError("v: 100 bytes given, but BF16 [1, 4, 2, 32] takes 512"));
  call = MakeForward(4);
  call.inputs.bias = Pattern(v1::DTYPE_FP32, {1, 1, 4, 4}, 1);
  call.inputs.bias.shape[0] = -1;
  EXPECT_THAT(Message(client->Forward(call).status()),
              HasSubstr("options.bias: FP32 [-1, 1, 4, 4] is not a tensor"));
  call = MakeForward(4);
  for (int i = 0; i < 40'000; ++i) call.header.mutable_options()->add_seqlens_k(1 << 20);
  EXPECT_THAT(Message(client->Forward(call).status()), HasSubstr("over the limit of 65536"));
  BackwardCall backward;
  backward.header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  backward.inputs = MakeForward(4).inputs;
  EXPECT_EQ(client->Backward(backward).status(), absl::InvalidArgumentError("out is required"));
  EXPECT_EQ(server.Calls("Forward"), 0);
  EXPECT_EQ(server.Calls("Backward"), 0);
}

TEST(ClientOptionsTest, BadOptionsAreNamed) {
  ChannelOptions options;
  options.channels = 0;
  EXPECT_EQ(Client::Connect(options).status(),
            absl::InvalidArgumentError("channels 0 is not in 1..256"));
  options = {};
  options.max_retries = -1;
  EXPECT_THAT(Message(Client::Connect(options).status()), HasSubstr("max_retries -1"));
  options = {};
  options.target = "";
  EXPECT_THAT(Message(Client::Connect(options).status()), HasSubstr("target"));
  options = {};
  options.tls_ca = "/nonexistent/ca.pem";
  EXPECT_TRUE(absl::IsNotFound(Client::Connect(options).status()));
  EXPECT_THAT(Message(Client::Connect(options).status()), HasSubstr("tls_ca"));
  options = {};
  options.tls_cert = "/nonexistent/cert.pem";
  EXPECT_THAT(Message(Client::Connect(options).status()),
              HasSubstr("tls_cert is set without tls_key"));
}

TEST(ClientOptionsTest, NobodyListening) {
  std::string target;
  {
    FakeServer server;
    target = server.target();
  }
  ChannelOptions options;
  options.target = target;
  options.connect_timeout = milliseconds(200);
  const auto status = Client::Connect(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("no answer from " + target + " within 200 ms"));
}

TEST(ClientOptionsTest, AServerThatIsNotAttnd) {
  FakeServer server;
  server.Set("GetServerInfo",
             {[](const auto&, int) {
                return FakeAnswer{{}, {grpc::StatusCode::UNIMPLEMENTED, "unknown method"}, {}};
              },
              1});
  ChannelOptions options;
  options.target = server.target();
  EXPECT_EQ(Client::Connect(options).status(), absl::UnimplementedError("unknown method"));
}

AttemptResult Failed(absl::Status status, std::optional<int64_t> pushback = std::nullopt) {
  return {std::move(status), pushback, {}};
}

TEST(RetryDelayTest, BackoffDoublesUpToItsLimit) {
  const AttemptResult failed = Failed(absl::UnavailableError(""));
  const int64_t expected[] = {100, 200, 400, 800, 1600, 3200, 5000, 5000};
  for (int attempt = 1; attempt <= 8; ++attempt) {
    EXPECT_EQ(RetryDelay(failed, attempt, 100, 0.0)->count(), expected[attempt - 1] / 2);
    EXPECT_EQ(RetryDelay(failed, attempt, 100, 1.0)->count(), expected[attempt - 1]);
  }
}

TEST(RetryDelayTest, PushbackIsTheLeastWait) {
  const auto exhausted = absl::ResourceExhaustedError("");
  EXPECT_EQ(RetryDelay(Failed(exhausted, 700), 1, 3, 0.0), milliseconds(700));
  EXPECT_EQ(RetryDelay(Failed(exhausted, 700), 1, 3, 1.0), milliseconds(770));
  EXPECT_EQ(RetryDelay(Failed(exhausted, 0), 1, 3, 1.0), milliseconds(0));
  EXPECT_EQ(RetryDelay(Failed(exhausted, -1), 1, 3, 0.0), std::nullopt);
  EXPECT_EQ(RetryDelay(Failed(exhausted), 1, 3, 0.0), std::nullopt);
  EXPECT_EQ(RetryDelay(Failed(exhausted, INT64_MAX), 1, 3, 0.0), milliseconds(86'400'000));
}

TEST(RetryDelayTest, NothingElseIsRetried) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "");
    const bool retried = absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
    EXPECT_EQ(RetryDelay(Failed(status, 5), 1, 3, 0.0).has_value(), retried) << status;
    EXPECT_EQ(RetryDelay(Failed(status, 5), 4, 3, 0.0), std::nullopt);
  }
}

}  // namespace
}  // namespace attn::client
