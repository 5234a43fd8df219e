// What the RPC benches compare attnd with: a raw callback echo over gRPC, and a plain socket
// server. Both run inside the process that serves attention, so that allocator, flags and
// scheduling are the same.
#ifndef ATTN_TESTS_BENCH_RPC_PEERS_H_
#define ATTN_TESTS_BENCH_RPC_PEERS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/v1/attention.grpc.pb.h"
#include "kernels/api/mutex.h"

namespace attn::bench {

// Answers the raw unary method `Forward` with the first reply_bytes bytes of the request (all of it
// where it is shorter), through the same generated raw callback method that attnd uses, and reads
// nothing. The raw unary method `Plan` sets reply_bytes from the decimal number it is sent.
class EchoService final
    : public attention::v1::Attention::WithRawCallbackMethod_Forward<
          attention::v1::Attention::WithRawCallbackMethod_Plan<attention::v1::Attention::Service>> {
 public:
  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;

 private:
  std::atomic<size_t> reply_bytes_{SIZE_MAX};
};

// The echo on 127.0.0.1, any free port.
class EchoServer {
 public:
  static absl::StatusOr<std::unique_ptr<EchoServer>> Start();
  ~EchoServer();
  int port() const { return port_; }

 private:
  EchoService service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

// A connection exchanges, over and over: the client sends 16 bytes (request size, reply size,
// little endian uint64) and the request bytes; the server receives them into memory, then sends the
// reply bytes from memory. Blocking read and write, one thread per connection, default socket
// buffers.
class PlainServer {
 public:
  // Listens on 127.0.0.1 (any free port) and on a Unix socket at `unix_path`.
  static absl::StatusOr<std::unique_ptr<PlainServer>> Start(const std::string& unix_path);
  ~PlainServer();
  int port() const { return port_; }
  const std::string& unix_path() const { return unix_path_; }

 private:
  PlainServer() = default;
  void Accept(int listener);

  int port_ = 0;
  std::string unix_path_;
  std::vector<int> listeners_;
  std::vector<std::thread> acceptors_;
  Mutex mutex_;
  bool stopping_ ATTN_GUARDED_BY(mutex_) = false;
  std::vector<int> connections_ ATTN_GUARDED_BY(mutex_);
  std::vector<std::thread> workers_ ATTN_GUARDED_BY(mutex_);
};

// The client's end of PlainServer. Not thread-safe.
class PlainConnection {
 public:
  static absl::StatusOr<std::unique_ptr<PlainConnection>> Tcp(int port);
  static absl::StatusOr<std::unique_ptr<PlainConnection>> Unix(const std::string& path);
  ~PlainConnection();

  // One exchange: sends all of `request`, receives all of `reply`.
  absl::Status Exchange(std::span<const std::byte> request, std::span<std::byte> reply);

 private:
  explicit PlainConnection(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace attn::bench

#endif  // ATTN_TESTS_BENCH_RPC_PEERS_H_
