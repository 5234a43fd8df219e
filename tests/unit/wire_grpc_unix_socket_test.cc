// The send buffers of Unix sockets, at both ends of a connection of this process.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "proto/wire/unix_socket.h"

namespace attn::wire {
namespace {

// SO_SNDBUF of every connected stream socket of the domain that this process has.
std::vector<int> SendBuffers(int wanted_domain) {
  std::vector<int> buffers;
  for (int fd = 3; fd < 1024; ++fd) {
    const auto option = [fd](int name) {
      int value = -1;
      socklen_t size = sizeof(value);
      return getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
    };
    sockaddr_storage peer;
    socklen_t size = sizeof(peer);
    if (option(SO_DOMAIN) != wanted_domain || option(SO_TYPE) != SOCK_STREAM ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
      continue;
    }
    buffers.push_back(option(SO_SNDBUF));
  }
  return buffers;
}

// What the system makes of the request.
int Granted() {
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kUnixSendBufferBytes, sizeof(kUnixSendBufferBytes));
  int value = 0;
  socklen_t size = sizeof(value);
  getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, &size);
  close(fd);
  return value;
}

TEST(UnixSocketTest, BothEndsHaveTheLargerBuffer) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("attn-" + std::to_string(getpid()))).string();
  int port = 0;
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterAsyncGenericService(&service);
  const auto queue = builder.AddCompletionQueue();
  EnlargeUnixSendBuffers(&builder);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  {
    const std::vector<int> before = SendBuffers(AF_UNIX);
    const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(10);
    grpc::ChannelArguments arguments;
    EnlargeUnixSendBuffers(&arguments);
    const auto channel =
        grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments);
    ASSERT_TRUE(channel->WaitForConnected(deadline));
    const std::vector<int> after = SendBuffers(AF_UNIX);
    ASSERT_EQ(after.size(), before.size() + 2);
    int enlarged = 0;
    for (const int size : after) enlarged += size == Granted() ? 1 : 0;
    EXPECT_EQ(enlarged, 2);

    // TCP sizes its buffers itself; setting one would stop that.
    const auto tcp = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port),
                                               grpc::InsecureChannelCredentials(), arguments);
    ASSERT_TRUE(tcp->WaitForConnected(deadline));
    std::vector<int> of_tcp = SendBuffers(AF_INET);
    for (const int size : SendBuffers(AF_INET6)) of_tcp.push_back(size);
    EXPECT_FALSE(of_tcp.empty());
    for (const int size : of_tcp) EXPECT_NE(size, Granted());
  }
  server->Shutdown();
  queue->Shutdown();
  void* tag;
  bool ok;
  while (queue->Next(&tag, &ok)) {
  }
}

}  // namespace
}  // namespace attn::wire
