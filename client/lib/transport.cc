#include "client/lib/transport.h"

#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/lib/tensor.h"
#include "proto/wire/framing.h"
#include "proto/wire/trace_context.h"
#include "proto/wire/unix_socket.h"

namespace attn::client {
namespace {

using std::chrono::milliseconds;

// How often a waiting call looks at its cancel flag. A person does not notice 10 ms; a hundred
// wake-ups per second cost nothing.
constexpr milliseconds kCancelPoll{10};
constexpr milliseconds kProgressPeriod{200};

absl::StatusOr<std::string> ReadPem(const char* option, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  if (!file.good() || contents.str().empty()) {
    return absl::NotFoundError(
        absl::StrCat(option, ": cannot read \"", path, "\", or it is empty"));
  }
  return contents.str();
}

bool UsesTls(const ChannelOptions& options) {
  return !options.tls_ca.empty() || !options.tls_cert.empty() || !options.tls_key.empty() ||
         !options.tls_server_name.empty();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ChannelOptions& options) {
  if (!UsesTls(options)) return grpc::InsecureChannelCredentials();
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.tls_cert.empty() ? "tls_key" : "tls_cert", " is set without ",
                     options.tls_cert.empty() ? "tls_cert" : "tls_key"));
  }
  absl::StatusOr<std::string> ca = ReadPem("tls_ca", options.tls_ca);
  if (!ca.ok()) return ca.status();
  absl::StatusOr<std::string> cert = ReadPem("tls_cert", options.tls_cert);
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem("tls_key", options.tls_key);
  if (!key.ok()) return key.status();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = *std::move(ca);
  ssl.pem_cert_chain = *std::move(cert);
  ssl.pem_private_key = *std::move(key);
  return grpc::SslCredentials(ssl);
}

// The HTTP/2 flow-control window adapts by BDP probing, which is on by default; frame sizes, write
// buffers and look-ahead made no difference in measurements and stay at their defaults.
grpc::ChannelArguments MakeArguments(const ChannelOptions& options) {
  grpc::ChannelArguments arguments;
  // gRPC's default is 4 MB. Whether a message is too large is decided before it is made.
  arguments.SetMaxReceiveMessageSize(static_cast<int>(wire::kMaxUnaryMessageBytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(wire::kMaxUnaryMessageBytes));
  // Retries are ours. gRPC's own would keep a copy of what was sent.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // Without this all channels to one target share one connection.
  if (options.channels > 1) arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A server that is being started is found soon after it listens.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  for (const char* local : {"127.", "localhost", "[::1]", "unix:"}) {
    if (absl::StartsWith(options.target, local)) {
      arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    }
  }
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  wire::EnlargeUnixSendBuffers(&arguments);
  arguments.SetUserAgentPrefix("attn-client");
  return arguments;
}

}  // namespace

wire::OutgoingPayload MakeOwned(const wire::OutgoingPayload& payload) {
  if (payload.owner != nullptr || payload.bytes.empty()) return payload;
  std::shared_ptr<std::byte> copy = AllocateAligned(payload.bytes.size());
  if (copy == nullptr) return payload;
  std::memcpy(copy.get(), payload.bytes.data(), payload.bytes.size());
  return {{copy.get(), payload.bytes.size()}, copy};
}

void Prepare(const CallControl& control, grpc::ClientContext* context) {
  if (control.deadline) context->set_deadline(*control.deadline);
  if (!control.traceparent.empty()) {
    context->AddMetadata(wire::kTraceparent, control.traceparent);
  }
}

void EventLoop::Next(void** tag, bool* ok) {
  for (;;) {
    if (control_.cancel == nullptr && !tick_) {
      queue_->Next(tag, ok);
      return;
    }
    if (control_.cancel != nullptr && !cancelled_ && control_.cancel->load()) {
      cancelled_ = true;
      context_->TryCancel();
    }
    const auto now = std::chrono::steady_clock::now();
    if (tick_ && now - last_tick_ >= kProgressPeriod) {
      last_tick_ = now;
      tick_();
    }
    const auto wake = std::chrono::system_clock::now() +
                      (control_.cancel != nullptr ? kCancelPoll : kProgressPeriod);
    if (queue_->AsyncNext(tag, ok, wake) != grpc::CompletionQueue::TIMEOUT) return;
  }
}

AttemptResult MakeResult(const grpc::Status& status, const grpc::ClientContext& context,
                         const CallControl& control, bool cancelled) {
  AttemptResult result;
  result.status = wire::ToAbsl(status);
  if (cancelled && absl::IsCancelled(result.status)) {
    result.status = absl::CancelledError("cancelled by the caller");
  }
  // A server may see the deadline first and answer CANCELLED for it.
  if (absl::IsCancelled(result.status) && !cancelled && control.deadline &&
      std::chrono::system_clock::now() >= *control.deadline) {
    result.status = absl::DeadlineExceededError(result.status.message());
  }
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto it = trailers.find("grpc-retry-pushback-ms"); it != trailers.end()) {
    int64_t ms = -1;  // what cannot be read means "do not retry", as in gRPC's own retries
    const auto parsed = std::from_chars(it->second.begin(), it->second.end(), ms);
    result.pushback_ms = parsed.ptr == it->second.end() && parsed.ec == std::errc() ? ms : -1;
  }
  return result;
}

absl::StatusOr<std::unique_ptr<Transport>> Transport::Create(const ChannelOptions& options) {
  constexpr int kMaxChannels = 256;
  if (options.target.empty()) return absl::InvalidArgumentError("target is empty");
  if (options.channels < 1 || options.channels > kMaxChannels) {
    return absl::InvalidArgumentError(
        absl::StrCat("channels ", options.channels, " is not in 1..", kMaxChannels));
  }
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials = MakeCredentials(options);
  if (!credentials.ok()) return credentials.status();
  std::unique_ptr<Transport> transport(new Transport());
  for (int i = 0; i < options.channels; ++i) {
    transport->channels_.push_back(
        grpc::CreateCustomChannel(options.target, *credentials, MakeArguments(options)));
    transport->stubs_.emplace_back(transport->channels_.back());
  }
  return transport;
}

Transport::~Transport() {
  MutexLock lock(mutex_);
  for (const auto& queue : idle_queues_) {
    queue->Shutdown();
    void* tag;
    bool ok;
    while (queue->Next(&tag, &ok)) {
    }
  }
}

grpc::GenericStub& Transport::NextStub() {
  return stubs_[next_.fetch_add(1, std::memory_order_relaxed) % stubs_.size()];
}

std::unique_ptr<grpc::CompletionQueue> Transport::TakeQueue() {
  MutexLock lock(mutex_);
  if (idle_queues_.empty()) return std::make_unique<grpc::CompletionQueue>();
  std::unique_ptr<grpc::CompletionQueue> queue = std::move(idle_queues_.back());
  idle_queues_.pop_back();
  return queue;
}

void Transport::GiveQueue(std::unique_ptr<grpc::CompletionQueue> queue) {
  MutexLock lock(mutex_);
  idle_queues_.push_back(std::move(queue));
}

void Transport::WaitForStateChange(std::chrono::system_clock::time_point deadline) {
  const grpc_connectivity_state state = channels_.front()->GetState(/*try_to_connect=*/true);
  if (state == GRPC_CHANNEL_READY) return;
  channels_.front()->WaitForStateChange(state, deadline);
}

AttemptResult Transport::Unary(const std::string& method, const grpc::ByteBuffer& request,
                               const CallControl& control, grpc::ByteBuffer* reply) {
  std::unique_ptr<grpc::CompletionQueue> queue = TakeQueue();
  grpc::ClientContext context;
  Prepare(control, &context);
  EventLoop events(queue.get(), &context, control, nullptr);
  const auto begin = std::chrono::steady_clock::now();
  auto call = NextStub().PrepareUnaryCall(&context, method, request, queue.get());
  call->StartCall();
  grpc::Status status;
  call->Finish(reply, &status, nullptr);
  void* tag;
  bool ok;
  events.Next(&tag, &ok);
  const auto latency = std::chrono::steady_clock::now() - begin;
  GiveQueue(std::move(queue));
  AttemptResult result = MakeResult(status, context, control, events.cancelled());
  result.latency = latency;
  return result;
}

}  // namespace attn::client
