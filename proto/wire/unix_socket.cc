#include "proto/wire/unix_socket.h"

#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/version_info.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>

// gRPC calls a grpc_socket_mutator for every socket that it makes or accepts.
// ChannelArguments::SetSocketMutator() is public; what a mutator is made of is not in a public
// header, so it stands here. It is the same from 1.36, which added the last member of the table, to
// at least 1.51, which both supported platforms have.
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR >= 36 && GRPC_CPP_VERSION_MINOR <= 51
#define ATTN_HAS_SOCKET_MUTATOR 1

struct grpc_socket_mutator {
  struct Info {
    int fd;
    int usage;  // client connection, server's listening socket, server connection
  };
  struct Table {
    bool (*mutate_connecting)(int fd, grpc_socket_mutator* mutator);  // where the last is null
    int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);   // 0: set the same
    void (*destroy)(grpc_socket_mutator* mutator);
    bool (*mutate)(const Info* info,
                   grpc_socket_mutator* mutator);  // false: the socket is given up
  };
  const Table* table;
  intptr_t references;
};
#endif

namespace attn::wire {
namespace {

#ifdef ATTN_HAS_SOCKET_MUTATOR
bool EnlargeSendBuffer(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX) {
    // A connection with the system's buffer is as right, only slower: no error.
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kUnixSendBufferBytes, sizeof(kUnixSendBufferBytes));
  }
  return true;
}

// One for all channels and servers of the process. It is never destroyed: gRPC counts references
// down from more than there will ever be.
grpc_socket_mutator* Mutator() {
  static constexpr grpc_socket_mutator::Table kTable = {
      [](int fd, grpc_socket_mutator*) { return EnlargeSendBuffer(fd); },
      [](grpc_socket_mutator*, grpc_socket_mutator*) { return 0; },
      [](grpc_socket_mutator*) {},
      [](const grpc_socket_mutator::Info* info, grpc_socket_mutator*) {
        return EnlargeSendBuffer(info->fd);
      },
  };
  static grpc_socket_mutator mutator{&kTable, INTPTR_MAX / 2};
  return &mutator;
}

class ServerOption final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments* arguments) override {
    EnlargeUnixSendBuffers(arguments);
  }
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>*) override {}
};
#endif

}  // namespace

void EnlargeUnixSendBuffers([[maybe_unused]] grpc::ChannelArguments* arguments) {
#ifdef ATTN_HAS_SOCKET_MUTATOR
  arguments->SetSocketMutator(Mutator());
#endif
}

void EnlargeUnixSendBuffers([[maybe_unused]] grpc::ServerBuilder* builder) {
#ifdef ATTN_HAS_SOCKET_MUTATOR
  builder->SetOption(std::make_unique<ServerOption>());
#endif
}

}  // namespace attn::wire
