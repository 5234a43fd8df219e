// Unary calls whose q, k and v stay in the message until the backend reads them.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/v1/attention.grpc.pb.h"
#include "kernels/cpu/backends.h"
#include "server/rpc/server.h"
#include "tests/unit/server_fakes.h"

namespace attn::server {
namespace {

namespace v1 = ::attention::v1;

// Answers with q, read piece by piece or from one place, and notes which; lse are k's elements
// where k has as many as lse.
class EchoBackend final : public FakeBackend {
 public:
  EchoBackend() : FakeBackend(PathId::kFlashCpu) {}
  bool ReadsInputs(const AttentionProblem&, Pass pass) const override {
    return pass == Pass::kForward;
  }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const RunContext& context) const override {
    const auto copy = [&](InputReader::Tensor tensor, const void* data, int64_t elements,
                          void* to) {
      const auto bytes = static_cast<uint64_t>(elements) * 4;
      if (context.reader == nullptr) {
        std::memcpy(to, data, bytes);
        return;
      }
      constexpr uint64_t kStep = 3001;
      for (uint64_t at = bytes; at > 0;) {  // backwards: in any order
        const uint64_t count = std::min(at, kStep);
        at -= count;
        context.reader->Read(tensor, at, count, static_cast<std::byte*>(to) + at);
      }
    };
    read = context.reader != nullptr;
    copy(InputReader::Tensor::kQ, t.q, OutElements(p), t.out);
    copy(InputReader::Tensor::kK, t.k, LseElements(p), t.lse);
    if (read) *context.reading_ns = kReadingNs;
    return absl::OkStatus();
  }

  static constexpr uint64_t kReadingNs = 5;
  mutable std::atomic<bool> read{false};
};

std::string RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> gauss;
  std::string bytes(count * 4, '\0');
  for (size_t i = 0; i < count; ++i) {
    const float value = gauss(rng);
    std::memcpy(bytes.data() + i * 4, &value, 4);
  }
  return bytes;
}

class ReaderTest : public testing::Test {
 protected:
  void Start(std::unique_ptr<Backend> backend) {
    ServerOptions options;
    options.config.listen = {"127.0.0.1:0"};
    options.config.metrics_listen = "";
    options.backends.push_back(std::move(backend));
    options.self_test = false;
    options.measure_rates = false;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Attention::NewStub(
        grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
  }

  // q, k and v of `heads` and `kv_heads`, each in a payload of its own.
  static v1::ForwardRequest Request(int64_t batch, int64_t seqlen_k, int64_t heads,
                                    int64_t kv_heads, int64_t head_dim) {
    v1::ForwardRequest request;
    v1::ForwardRequestHeader& header = *request.mutable_header();
    header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
    header.mutable_shape()->set_num_heads(heads);
    header.mutable_shape()->set_num_kv_heads(kv_heads);
    uint32_t index = 0;
    for (v1::Tensor* tensor : {header.mutable_q(), header.mutable_k(), header.mutable_v()}) {
      const bool q = index == 0;
      size_t count = 1;
      for (int64_t extent : {batch, q ? int64_t{1} : seqlen_k, q ? heads : kv_heads, head_dim}) {
        tensor->add_shape(extent);
        count *= static_cast<size_t>(extent);
      }
      tensor->set_dtype(v1::DTYPE_FP32);
      tensor->set_payload(index++);
      request.add_payload(RandomFloats(count, index));
    }
    return request;
  }

  v1::ForwardResponse Forward(const v1::ForwardRequest& request) {
    grpc::ClientContext context;
    v1::ForwardResponse response;
    const grpc::Status status = stub_->Forward(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (!status.ok()) response.clear_payload();
    while (response.payload_size() < 2) response.add_payload();
    return response;
  }

  // out and lse of the streaming method, which gathers.
  std::vector<std::string> Stream(const v1::ForwardRequest& request) {
    grpc::ClientContext context;
    auto stream = stub_->ForwardStream(&context);
    v1::ForwardStreamRequest message;
    *message.mutable_header() = request.header();
    stream->Write(message);
    for (int i = 0; i < request.payload_size(); ++i) {
      constexpr size_t kStep = 1 << 20;
      for (size_t at = 0; at < request.payload(i).size(); at += kStep) {
        v1::PayloadChunk& chunk = *message.mutable_chunk();
        chunk.set_payload_index(static_cast<uint32_t>(i));
        chunk.set_offset(at);
        chunk.set_data(request.payload(i).substr(at, kStep));
        stream->Write(message);
      }
    }
    stream->WritesDone();
    std::vector<std::string> tensors(2);
    v1::ForwardStreamResponse response;
    while (stream->Read(&response)) {
      if (response.has_chunk()) {
        tensors[response.chunk().payload_index()] += response.chunk().data();
      }
    }
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return tensors;
  }

  ThreadPool pool_{2};
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

TEST_F(ReaderTest, FindsTensorsWhereverTheyLie) {
  auto owned = std::make_unique<EchoBackend>();
  const EchoBackend& backend = *owned;
  Start(std::move(owned));
  v1::ForwardRequest request = Request(1000, 1, 3, 3, 70);  // lse: 3,000 elements; k: 210,000
  const std::string q = request.payload(0), k = request.payload(1), v = request.payload(2);
  const auto check = [&](bool read) {
    const v1::ForwardResponse response = Forward(request);
    EXPECT_EQ(backend.read.load(), read);
    EXPECT_TRUE(response.payload(0) == q);
    EXPECT_TRUE(response.payload(1) == k.substr(0, 12'000));
    EXPECT_EQ(response.report().traffic().wire_request_bytes(), [&request] {
      uint64_t bytes = 0;
      for (const std::string& payload : request.payload()) bytes += payload.size();
      return bytes;
    }());
    if (read) {
      EXPECT_GE(response.report().times().gather_ns(), EchoBackend::kReadingNs);
    }
  };
  check(/*read=*/true);
  // All in one payload, at offsets; k and v are the same bytes.
  request.clear_payload();
  request.add_payload(std::string(4, 'x') + k + std::string(8, 'y') + q);
  request.mutable_header()->mutable_q()->set_payload(0);
  request.mutable_header()->mutable_q()->set_offset_bytes(12 + k.size());
  for (v1::Tensor* tensor :
       {request.mutable_header()->mutable_k(), request.mutable_header()->mutable_v()}) {
    tensor->set_payload(0);
    tensor->set_offset_bytes(4);
  }
  check(/*read=*/true);
  // An option tensor in a payload of its own, then in that one, which is then gathered.
  v1::Tensor& slopes = *request.mutable_header()->mutable_options()->mutable_alibi_slopes();
  slopes.set_dtype(v1::DTYPE_FP32);
  slopes.add_shape(3);
  slopes.set_payload(1);
  request.add_payload(std::string(12, '\0'));
  check(/*read=*/true);
  slopes.set_payload(0);
  slopes.set_offset_bytes(4);
  request.mutable_payload()->RemoveLast();
  check(/*read=*/false);
}

TEST_F(ReaderTest, ResultsAreThoseOfGatheredInputs) {
  Start(MakeFlashCpuBackend(&pool_));
  v1::ForwardRequest request = Request(2048, 4, 2, 2, 64);  // 9 MiB
  ASSERT_GT(request.ByteSizeLong(), size_t{9} << 20);
  v1::AttentionOptions& options = *request.mutable_header()->mutable_options();
  options.mutable_dropout()->set_p(0.25f);
  options.mutable_dropout()->set_seed(7);
  v1::Tensor& sinks = *options.mutable_sinks();
  sinks.set_dtype(v1::DTYPE_FP32);
  sinks.add_shape(2);
  sinks.set_payload(3);
  request.add_payload(RandomFloats(2, 9));
  // k with a gap between sequences.
  const std::string dense = request.payload(1);
  std::string& gaps = *request.mutable_payload(1);
  gaps.clear();
  for (size_t at = 0; at < dense.size(); at += 2048) {
    if (at > 0) gaps += std::string(40, '\xff');  // NaN
    gaps += dense.substr(at, 2048);
  }
  for (const int64_t stride : {522, 128, 64, 1}) {
    request.mutable_header()->mutable_k()->add_strides(stride);
  }
  const v1::ForwardResponse unary = Forward(request);
  const std::vector<std::string> gathered = Stream(request);
  EXPECT_EQ(unary.payload(0).size(), size_t{1} << 20);
  EXPECT_TRUE(unary.payload(0) == gathered[0]);
  EXPECT_TRUE(unary.payload(1) == gathered[1]);
  const v1::StageTimes& times = unary.report().times();
  EXPECT_GT(times.gather_ns(), 0u);
  EXPECT_GT(times.kernel_ns(), 0u);
  EXPECT_LE(times.parse_ns() + times.gather_ns() + times.queue_ns() + times.kernel_ns() +
                times.reply_ns(),
            times.handler_ns());
}

}  // namespace
}  // namespace attn::server
