// A server that computes nothing, to find out what a load generator itself can do: answers Forward
// with zeros of the right shapes and an empty report, from a reply that was made once.
//   attn_null_server PORTS_FILE
// writes {"listen": ["127.0.0.1:N"]} there and serves until SIGTERM.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/v1/attention.grpc.pb.h"
#include "kernels/api/mutex.h"
#include "proto/wire/byte_buffer.h"
#include "proto/wire/framing.h"

namespace attn::bench {
namespace {

namespace v1 = ::attention::v1;

absl::StatusOr<grpc::ByteBuffer> MakeReply(const grpc::ByteBuffer& request) {
  absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(request);
  if (!pieces.ok()) return pieces.status();
  absl::StatusOr<wire::UnaryMessage> message = wire::ParseUnary(pieces->pieces());
  if (!message.ok()) return message.status();
  v1::ForwardRequestHeader header;
  if (absl::Status status = wire::ParseInto(message->header, "header", &header); !status.ok()) {
    return status;
  }
  if (header.q().shape_size() != 4 || header.v().shape_size() != 4) {
    return absl::InvalidArgumentError("the null server takes BSHD");
  }
  v1::ForwardResponse response;
  v1::Tensor* out = response.mutable_header()->mutable_out();
  out->set_dtype(header.q().dtype());
  *out->mutable_shape() = header.q().shape();
  out->set_shape(3, header.v().shape(3));
  v1::Tensor* lse = response.mutable_header()->mutable_lse();
  lse->set_dtype(v1::DTYPE_FP32);
  size_t rows = 1;
  for (const int axis : {0, 2, 1}) {
    lse->add_shape(header.q().shape(axis));
    rows *= static_cast<size_t>(header.q().shape(axis));
  }
  out->set_payload(0);
  lse->set_payload(1);
  const size_t element = header.q().dtype() == v1::DTYPE_FP32 ? 4 : 2;
  response.add_payload(std::string(rows * header.v().shape(3) * element, '\0'));
  response.add_payload(std::string(rows * 4, '\0'));
  response.mutable_report()->set_path("none");
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

class NullService final
    : public v1::Attention::WithRawCallbackMethod_Forward<
          v1::Attention::WithCallbackMethod_GetServerInfo<v1::Attention::Service>> {
 public:
  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    MutexLock lock(mutex_);
    // Requests of equal length are taken for equal: nothing of them is read.
    const auto [place, is_new] = replies_.try_emplace(request->Length());
    if (is_new) {
      absl::StatusOr<grpc::ByteBuffer> reply = MakeReply(*request);
      if (!reply.ok()) {
        replies_.erase(place);
        reactor->Finish(wire::ToGrpc(reply.status()));
        return reactor;
      }
      place->second = *std::move(reply);
    }
    *response = place->second;
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse* response) override {
    response->set_version("null");
    response->mutable_limits()->set_max_unary_bytes(64 << 20);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  Mutex mutex_;
  std::map<size_t, grpc::ByteBuffer> replies_ ATTN_GUARDED_BY(mutex_);
};

int Serve(const std::string& ports_file) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  NullService service;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  {
    std::ofstream file(ports_file + ".tmp");
    file << "{\"listen\": [\"127.0.0.1:" << port << "\"]}";
  }
  std::filesystem::rename(ports_file + ".tmp", ports_file);
  int signal = 0;
  sigwait(&signals, &signal);
  server->Shutdown(std::chrono::system_clock::now());
  return 0;
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: attn_null_server PORTS_FILE\n");
    return 2;
  }
  return attn::bench::Serve(argv[1]);
}
