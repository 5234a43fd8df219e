// Builds the gRPC server: addresses, credentials, limits.
#ifndef ATTN_SERVER_RPC_LISTENER_H_
#define ATTN_SERVER_RPC_LISTENER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/config/config.h"

namespace attn::server {

struct Listener {
  std::unique_ptr<grpc::Server> server;
  std::vector<std::string> addresses;  // of config.listen, with the ports that were bound
};

// Errors: INVALID_ARGUMENT (a TLS file cannot be read or used), UNAVAILABLE (an address cannot be
// bound; names it).
absl::StatusOr<Listener> StartListening(const Config& config, grpc::Service* service);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_LISTENER_H_
