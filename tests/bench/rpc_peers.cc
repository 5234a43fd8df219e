#include "tests/bench/rpc_peers.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attn::bench {
namespace {

absl::Status Errno(const std::string& what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

bool WriteAll(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

bool ReadAll(int fd, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

struct Sizes {
  uint64_t request;
  uint64_t reply;
};

void Serve(int fd) {
  std::vector<std::byte> request, reply;
  Sizes sizes;
  while (ReadAll(fd, std::as_writable_bytes(std::span(&sizes, 1)))) {
    request.resize(std::max<size_t>(request.size(), sizes.request));
    reply.resize(std::max<size_t>(reply.size(), sizes.reply));
    if (!ReadAll(fd, std::span(request).first(sizes.request))) return;
    if (!WriteAll(fd, std::span(reply).first(sizes.reply))) return;
  }
}

absl::StatusOr<sockaddr_un> UnixAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("socket path of ", path.size(), " bytes, limit ", sizeof(address.sun_path)));
  }
  path.copy(address.sun_path, path.size());
  return address;
}

// gRPC sets TCP_NODELAY, so the yardstick does too.
void NoDelay(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

template <typename Address>
absl::StatusOr<int> Connect(int family, const Address& address) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Errno("socket");
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const absl::Status status = Errno("connect");
    close(fd);
    return status;
  }
  return fd;
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

std::string Flatten(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return "";
  std::string text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

}  // namespace

grpc::ServerUnaryReactor* EchoService::Forward(grpc::CallbackServerContext* context,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::vector<grpc::Slice> slices;
  if (!request->Dump(&slices).ok()) {
    reactor->Finish(grpc::Status(grpc::StatusCode::INTERNAL, "request not readable"));
    return reactor;
  }
  size_t left = reply_bytes_.load(std::memory_order_relaxed);
  std::vector<grpc::Slice> reply;
  for (const grpc::Slice& slice : slices) {
    if (left == 0) break;
    reply.push_back(slice.size() <= left ? slice : slice.sub(0, left));
    left -= reply.back().size();
  }
  *response = grpc::ByteBuffer(reply.data(), reply.size());
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* EchoService::Plan(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  uint64_t bytes = 0;
  if (!absl::SimpleAtoi(Flatten(*request), &bytes)) {
    reactor->Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "not a decimal number"));
    return reactor;
  }
  reply_bytes_.store(bytes, std::memory_order_relaxed);
  *response = *request;
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

absl::StatusOr<std::unique_ptr<EchoServer>> EchoServer::Start() {
  auto echo = std::make_unique<EchoServer>();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &echo->port_);
  builder.RegisterService(&echo->service_);
  echo->server_ = builder.BuildAndStart();
  if (echo->server_ == nullptr || echo->port_ == 0) {
    return absl::UnavailableError("the echo server did not start");
  }
  return echo;
}

EchoServer::~EchoServer() {
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
}

absl::StatusOr<std::unique_ptr<PlainServer>> PlainServer::Start(const std::string& unix_path) {
  auto server = std::unique_ptr<PlainServer>(new PlainServer());
  server->unix_path_ = unix_path;
  const int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (tcp < 0) return Errno("socket");
  server->listeners_.push_back(tcp);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof(address);
  if (bind(tcp, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(tcp, 16) != 0 ||
      getsockname(tcp, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return Errno("listening on 127.0.0.1");
  }
  server->port_ = ntohs(address.sin_port);

  const auto unix_address = UnixAddress(unix_path);
  if (!unix_address.ok()) return unix_address.status();
  const int local = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (local < 0) return Errno("socket");
  server->listeners_.push_back(local);
  unlink(unix_path.c_str());
  if (bind(local, reinterpret_cast<const sockaddr*>(&*unix_address), sizeof(*unix_address)) != 0 ||
      listen(local, 16) != 0) {
    return Errno(absl::StrCat("listening on ", unix_path));
  }
  for (const int listener : server->listeners_) {
    server->acceptors_.emplace_back([s = server.get(), listener] { s->Accept(listener); });
  }
  return server;
}

void PlainServer::Accept(int listener) {
  while (true) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0) return;  // shut down
    NoDelay(fd);
    MutexLock lock(mutex_);
    if (stopping_) {
      close(fd);
      return;
    }
    connections_.push_back(fd);
    workers_.emplace_back(Serve, fd);
  }
}

PlainServer::~PlainServer() {
  std::vector<std::thread> workers;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (const int fd : connections_) shutdown(fd, SHUT_RDWR);
    workers.swap(workers_);
  }
  for (const int fd : listeners_) shutdown(fd, SHUT_RDWR);
  for (std::thread& thread : acceptors_) thread.join();
  for (std::thread& thread : workers) thread.join();
  for (const int fd : listeners_) close(fd);
  MutexLock lock(mutex_);
  for (const int fd : connections_) close(fd);
  unlink(unix_path_.c_str());
}

absl::StatusOr<std::unique_ptr<PlainConnection>> PlainConnection::Tcp(int port) {
  const absl::StatusOr<int> fd = Connect(AF_INET, Loopback(port));
  if (!fd.ok()) return fd.status();
  NoDelay(*fd);
  return std::unique_ptr<PlainConnection>(new PlainConnection(*fd));
}

absl::StatusOr<std::unique_ptr<PlainConnection>> PlainConnection::Unix(const std::string& path) {
  const auto address = UnixAddress(path);
  if (!address.ok()) return address.status();
  const absl::StatusOr<int> fd = Connect(AF_UNIX, *address);
  if (!fd.ok()) return fd.status();
  return std::unique_ptr<PlainConnection>(new PlainConnection(*fd));
}

PlainConnection::~PlainConnection() { close(fd_); }

absl::Status PlainConnection::Exchange(std::span<const std::byte> request,
                                       std::span<std::byte> reply) {
  const Sizes sizes{request.size(), reply.size()};
  if (!WriteAll(fd_, std::as_bytes(std::span(&sizes, 1))) || !WriteAll(fd_, request)) {
    return Errno("sending");
  }
  if (!ReadAll(fd_, reply)) return Errno("receiving");
  return absl::OkStatus();
}

}  // namespace attn::bench
