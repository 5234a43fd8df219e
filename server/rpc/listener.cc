#include "server/rpc/listener.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>

#include "absl/strings/match.h"
#include "kernels/api/text.h"
#include "proto/wire/unix_socket.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

// Dead peers must not hold admitted memory: a silent connection is probed after 30 s and closed 20
// s later.
constexpr int kKeepaliveTimeMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
constexpr int kMinClientPingMs = 5'000;

// gRPC refuses a message over its limit without saying what to do instead. It is let through up to
// twice --max-unary-bytes, so that most callers learn of the streaming method.
uint64_t ReceiveLimit(uint64_t max_unary_bytes) {
  constexpr uint64_t kLeastMargin = uint64_t{16} << 20;
  return std::min<uint64_t>(max_unary_bytes + std::max(max_unary_bytes, kLeastMargin),
                            std::numeric_limits<int>::max());
}

// What connections buffer besides messages.
constexpr uint64_t kQuotaSlackBytes = uint64_t{64} << 20;

void LogGrpc(gpr_log_func_args* args) {
  // gRPC's own words at INFO are debugging output.
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarn : LogLevel::kDebug;
  if (log::Enabled(level)) log::Write(level, "grpc", {{"message", args->message}});
}

absl::StatusOr<std::string> ReadPem(std::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || text.empty()) {
    return absl::InvalidArgumentError(Cat("--", flag, " ", path, " cannot be read or is empty"));
  }
  if (!absl::StrContains(text, "-----BEGIN ")) {
    return absl::InvalidArgumentError(Cat("--", flag, " ", path, " is not a PEM file"));
  }
  return text;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(const Config& config) {
  if (!config.tls()) return grpc::InsecureServerCredentials();
  absl::StatusOr<std::string> cert = ReadPem("tls-cert", config.tls_cert);
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem("tls-key", config.tls_key);
  if (!key.ok()) return key.status();
  grpc::SslServerCredentialsOptions options;
  if (!config.tls_client_ca.empty()) {
    absl::StatusOr<std::string> ca = ReadPem("tls-client-ca", config.tls_client_ca);
    if (!ca.ok()) return ca.status();
    options.pem_root_certs = *ca;
    options.client_certificate_request = GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  options.pem_key_cert_pairs.push_back({*key, *cert});
  return grpc::SslServerCredentials(options);
}

// gRPC removes a socket file that is in its way, even one that another server listens on.
bool UnixSocketInUse(const std::string& address) {
  if (!absl::StartsWith(address, "unix:")) return false;
  std::string path = address.substr(5);
  if (absl::StartsWith(path, "//")) path.erase(0, 2);
  sockaddr_un name{};
  if (path.size() >= sizeof(name.sun_path)) return false;  // gRPC refuses it
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool in_use = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  return in_use;
}

absl::Status CannotBind(const std::string& address, const Config& config) {
  std::string why = "is another process using it, does the address exist";
  if (config.tls()) {
    why += Cat(", do --tls-cert ", config.tls_cert, " and --tls-key ", config.tls_key,
               " belong together");
    if (!config.tls_client_ca.empty())
      why += Cat(", is --tls-client-ca ", config.tls_client_ca, " valid");
  }
  return absl::UnavailableError(Cat("--listen ", address, " cannot be bound: ", why, "?"));
}

std::string WithPort(const std::string& address, int port) {
  if (absl::StartsWith(address, "unix")) return address;
  return Cat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace

absl::StatusOr<Listener> StartListening(const Config& config, grpc::Service* service) {
  static std::once_flag once;  // process-wide settings of gRPC
  std::call_once(once, [] {
    gpr_set_log_function(&LogGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials = MakeCredentials(config);
  if (!credentials.ok()) return credentials.status();

  grpc::ServerBuilder builder;
  // gRPC looks at the size of a message only when all of it has arrived, so messages on their way
  // in need a limit of their own. Room for as much as calls may hold, and for a few of the largest.
  builder.SetResourceQuota(grpc::ResourceQuota("attnd").Resize(static_cast<size_t>(
      std::max(config.max_inflight_bytes, 4 * config.max_unary_bytes + kQuotaSlackBytes))));
  builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(static_cast<int>(ReceiveLimit(config.max_unary_bytes)));
  builder.SetMaxSendMessageSize(-1);  // checked before a call runs
  // gRPC would inflate a compressed message without a limit, and tensors do not shrink. Bit 0:
  // none.
  builder.AddChannelArgument(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1);
  // With SO_REUSEPORT a second server on the same port starts silently and takes half the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  wire::EnlargeUnixSendBuffers(&builder);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, config.max_concurrent_streams);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinClientPingMs);
  std::vector<int> ports(config.listen.size(), 0);
  for (size_t i = 0; i < config.listen.size(); ++i) {
    if (UnixSocketInUse(config.listen[i])) return CannotBind(config.listen[i], config);
    builder.AddListeningPort(config.listen[i], *credentials, &ports[i]);
  }
  Listener listener;
  listener.server = builder.BuildAndStart();
  for (size_t i = 0; i < config.listen.size(); ++i) {
    if (ports[i] == 0) return CannotBind(config.listen[i], config);
    listener.addresses.push_back(WithPort(config.listen[i], ports[i]));
  }
  if (listener.server == nullptr) return absl::InternalError("gRPC did not start");
  return listener;
}

}  // namespace attn::server
