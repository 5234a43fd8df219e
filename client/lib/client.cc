#include "client/lib/client.h"

#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/lib/exchange.h"
#include "client/lib/retry.h"
#include "client/lib/tensor.h"
#include "client/lib/transport.h"
#include "proto/wire/framing.h"
#include "proto/wire/trace_context.h"

namespace attn::client {
namespace {

constexpr char kService[] = "/attention.v1.Attention/";
constexpr uint64_t kDefaultStreamThreshold = 64 * 1024 * 1024;
// What a message holds besides tensors, at most: the header, the report, tags and lengths.
constexpr uint64_t kMessageOverhead = 1024 * 1024;

// Errors: INVALID_ARGUMENT: options.traceparent.
absl::StatusOr<CallControl> MakeControl(const CallOptions& options) {
  // Beyond a century there is no deadline; nearer ones cannot overflow the clock.
  constexpr std::chrono::nanoseconds kFar = std::chrono::hours(24 * 365 * 100);
  CallControl control;
  control.cancel = options.cancel;
  if (!options.traceparent.empty()) {
    if (absl::Status s = wire::CheckTraceparent(options.traceparent); !s.ok()) return s;
  }
  control.traceparent = options.traceparent;
  if (options.deadline && *options.deadline < kFar) {
    control.deadline =
        std::chrono::system_clock::now() +
        std::chrono::duration_cast<std::chrono::system_clock::duration>(*options.deadline);
  }
  return control;
}

absl::StatusOr<grpc::ByteBuffer> Serialize(const google::protobuf::MessageLite& message) {
  const uint64_t size = message.ByteSizeLong();
  if (size > wire::kMaxUnaryMessageBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(message.GetTypeName(), " of ", size,
                                                     " bytes is over the limit of ",
                                                     wire::kMaxUnaryMessageBytes, " bytes"));
  }
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<std::string> Flatten(const grpc::ByteBuffer& buffer) {
  absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(buffer);
  if (!pieces.ok()) return pieces.status();
  std::string bytes;
  bytes.reserve(pieces->size());
  for (const std::string_view piece : pieces->pieces()) bytes.append(piece);
  return bytes;
}

// The `status` field of grpc.health.v1.HealthCheckResponse (1 is SERVING), without generated code.
absl::StatusOr<uint64_t> ParseHealthStatus(const std::string& bytes) {
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromString(bytes)) {
    return absl::InternalError("invalid reply: not a HealthCheckResponse");
  }
  uint64_t status = 0;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == 1 && field.type() == google::protobuf::UnknownField::TYPE_VARINT) {
      status = field.varint();
    }
  }
  return status;
}

class ClientImpl final : public Client {
 public:
  ClientImpl(const ChannelOptions& options, std::unique_ptr<Transport> transport)
      : options_(options), transport_(std::move(transport)) {}

  absl::Status Start();

  absl::StatusOr<ForwardResult> Forward(const ForwardCall& call,
                                        const CallOptions& options) override;
  absl::StatusOr<BackwardResult> Backward(const BackwardCall& call,
                                          const CallOptions& options) override;
  absl::StatusOr<v1::PlanResponse> Plan(const v1::PlanRequest& request,
                                        const CallOptions& options) override {
    const absl::StatusOr<CallControl> control = MakeControl(options);
    if (!control.ok()) return control.status();
    return Typed<v1::PlanResponse>("Plan", request, *control, options_.max_retries);
  }
  absl::StatusOr<v1::GetServerInfoResponse> ServerInfo(const CallOptions& options) override {
    const absl::StatusOr<CallControl> control = MakeControl(options);
    if (!control.ok()) return control.status();
    return Typed<v1::GetServerInfoResponse>("GetServerInfo", v1::GetServerInfoRequest(), *control,
                                            options_.max_retries);
  }
  absl::StatusOr<bool> Healthy(const std::string& service, const CallOptions& options) override;

 private:
  // What an attention call gives back, before its tensors get their names.
  struct Outcome {
    std::vector<HostTensor> tensors;
    v1::ExecutionReport report;
    std::chrono::nanoseconds latency{0};
    bool streamed = false;
    int attempts = 1;
  };

  template <typename Header>
  absl::StatusOr<Outcome> Call(const std::string& method, const Exchange<Header>& exchange,
                               const CallOptions& options);

  template <typename Header>
  AttemptResult CallUnary(const std::string& method, const Exchange<Header>& exchange,
                          const CallControl& control, ReplyReader* reader);

  // Whether the call must or should be streamed. Errors: RESOURCE_EXHAUSTED: unary is forced and a
  // message would be over the limit.
  absl::StatusOr<bool> UseStream(uint64_t request_bytes, uint64_t reply_bytes,
                                 const CallOptions& options) const;

  absl::StatusOr<std::string> RawUnary(const std::string& method, const grpc::ByteBuffer& request,
                                       const CallControl& control, int max_retries);

  template <typename Response>
  absl::StatusOr<Response> Typed(const std::string& method,
                                 const google::protobuf::MessageLite& request,
                                 const CallControl& control, int max_retries);

  const ChannelOptions options_;
  const std::unique_ptr<Transport> transport_;
  // Set by Start(), constant after it.
  uint64_t max_unary_bytes_ = wire::kMaxUnaryMessageBytes;
  uint64_t stream_threshold_ = kDefaultStreamThreshold;
};

absl::Status ClientImpl::Start() {
  CallControl control;
  control.deadline = std::chrono::system_clock::now() + options_.connect_timeout;
  for (;;) {
    absl::StatusOr<v1::GetServerInfoResponse> info = Typed<v1::GetServerInfoResponse>(
        "GetServerInfo", v1::GetServerInfoRequest(), control, /*max_retries=*/0);
    if (info.ok()) {
      if (const uint64_t limit = info->limits().max_unary_bytes(); limit > 0) {
        max_unary_bytes_ = std::min(limit, wire::kMaxUnaryMessageBytes);
      }
      stream_threshold_ = options_.stream_threshold_bytes.value_or(
          std::min(max_unary_bytes_, kDefaultStreamThreshold));
      return absl::OkStatus();
    }
    const bool late = std::chrono::system_clock::now() >= *control.deadline;
    if (!absl::IsUnavailable(info.status()) || late) {
      if (!absl::IsUnavailable(info.status()) && !absl::IsDeadlineExceeded(info.status())) {
        return info.status();
      }
      return absl::UnavailableError(absl::StrCat("no answer from ", options_.target, " within ",
                                                 options_.connect_timeout.count(),
                                                 " ms: ", info.status().message()));
    }
    transport_->WaitForStateChange(*control.deadline);
  }
}

absl::StatusOr<std::string> ClientImpl::RawUnary(const std::string& method,
                                                 const grpc::ByteBuffer& request,
                                                 const CallControl& control, int max_retries) {
  grpc::ByteBuffer reply;
  int attempts = 1;
  const AttemptResult result = RunWithRetries(control, max_retries, &attempts, [&] {
    return transport_->Unary(method, request, control, &reply);
  });
  if (!result.status.ok()) return result.status;
  return Flatten(reply);
}

template <typename Response>
absl::StatusOr<Response> ClientImpl::Typed(const std::string& method,
                                           const google::protobuf::MessageLite& request,
                                           const CallControl& control, int max_retries) {
  absl::StatusOr<grpc::ByteBuffer> message = Serialize(request);
  if (!message.ok()) return message.status();
  absl::StatusOr<std::string> reply =
      RawUnary(absl::StrCat(kService, method), *message, control, max_retries);
  if (!reply.ok()) return reply.status();
  Response response;
  if (!response.ParseFromString(*reply)) {
    return absl::InternalError(absl::StrCat("invalid reply: not a valid ", response.GetTypeName()));
  }
  return response;
}

absl::StatusOr<bool> ClientImpl::Healthy(const std::string& service, const CallOptions& options) {
  const grpc::Slice slice(service.empty() ? std::string()
                                          : wire::FieldPrefix(1, service.size()) + service);
  const absl::StatusOr<CallControl> control = MakeControl(options);
  if (!control.ok()) return control.status();
  absl::StatusOr<std::string> reply = RawUnary(
      "/grpc.health.v1.Health/Check", grpc::ByteBuffer(&slice, 1), *control, options_.max_retries);
  if (!reply.ok()) return reply.status();
  absl::StatusOr<uint64_t> status = ParseHealthStatus(*reply);
  if (!status.ok()) return status.status();
  return *status == 1;
}

absl::StatusOr<bool> ClientImpl::UseStream(uint64_t request_bytes, uint64_t reply_bytes,
                                           const CallOptions& options) const {
  const uint64_t larger = std::max(request_bytes, reply_bytes);
  // A limit set by the server counts whole messages. One so small that the allowance for the rest
  // would not fit leaves unary to headers that turn out to be small.
  const uint64_t room = max_unary_bytes_ > 2 * kMessageOverhead
                            ? max_unary_bytes_ - kMessageOverhead
                            : max_unary_bytes_ / 2;
  if (options.streaming.has_value()) {
    if (!*options.streaming && larger > room) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a unary ", request_bytes >= reply_bytes ? "request" : "reply", " with ",
                       larger, " bytes of tensors is over the limit of ", room,
                       " bytes; use the streaming method, which takes any size"));
    }
    return *options.streaming;
  }
  return larger > std::min(room, stream_threshold_);
}

template <typename Header>
AttemptResult ClientImpl::CallUnary(const std::string& method, const Exchange<Header>& exchange,
                                    const CallControl& control, ReplyReader* reader) {
  std::vector<wire::OutgoingPayload> payloads;
  payloads.reserve(exchange.payloads.size());
  for (const wire::OutgoingPayload& payload : exchange.payloads) {
    if (payload.bytes.size() <= wire::kCopiedPayloadBytes) {
      payloads.push_back(payload);
      continue;
    }
    payloads.push_back(MakeOwned(payload));
    if (payloads.back().owner == nullptr) {
      return {
          absl::ResourceExhaustedError(absl::StrCat(
              "no memory to copy a tensor of ", payload.bytes.size(), " bytes that has no owner")),
          std::nullopt,
          {}};
    }
  }
  const grpc::ByteBuffer request = wire::MakeUnary(exchange.header, payloads, nullptr);
  grpc::ByteBuffer reply;
  AttemptResult result = transport_->Unary(method, request, control, &reply);
  if (!result.status.ok()) return result;
  result.status = reader->ReadUnary(reply);
  if (result.status.ok()) result.status = reader->Finish();
  return result;
}

template <typename Header>
absl::StatusOr<ClientImpl::Outcome> ClientImpl::Call(const std::string& method,
                                                     const Exchange<Header>& exchange,
                                                     const CallOptions& options) {
  const uint64_t header_bytes = exchange.header.ByteSizeLong();
  if (header_bytes > wire::kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("header of ", header_bytes,
                                                   " bytes is over the limit of ",
                                                   wire::kMaxHeaderBytes, " bytes"));
  }
  absl::StatusOr<bool> stream = UseStream(exchange.payload_bytes, exchange.reply.bytes, options);
  if (!stream.ok()) return stream.status();
  const absl::StatusOr<CallControl> control = MakeControl(options);
  if (!control.ok()) return control.status();
  const std::string path = absl::StrCat(kService, method, *stream ? "Stream" : "");
  Outcome outcome;
  outcome.streamed = *stream;
  std::optional<ReplyReader> reader;
  const AttemptResult result =
      RunWithRetries(*control, options_.max_retries, &outcome.attempts, [&] {
        reader.emplace(exchange.reply);
        if (!*stream) return CallUnary(path, exchange, *control, &*reader);
        return transport_->Stream(path, exchange.header, exchange.payloads, exchange.reply.bytes,
                                  *control, options.progress, &*reader);
      });
  if (!result.status.ok()) return result.status;
  outcome.tensors = std::move(reader->tensors());
  outcome.report = std::move(reader->report());
  outcome.latency = result.latency;
  return outcome;
}

absl::StatusOr<ForwardResult> ClientImpl::Forward(const ForwardCall& call,
                                                  const CallOptions& options) {
  absl::StatusOr<Exchange<v1::ForwardRequestHeader>> exchange = PrepareForward(call);
  if (!exchange.ok()) return exchange.status();
  absl::StatusOr<Outcome> outcome = Call("Forward", *exchange, options);
  if (!outcome.ok()) return outcome.status();
  ForwardResult result;
  result.out = std::move(outcome->tensors[0]);
  result.lse = std::move(outcome->tensors[1]);
  result.report = std::move(outcome->report);
  result.latency = outcome->latency;
  result.streamed = outcome->streamed;
  result.attempts = outcome->attempts;
  return result;
}

absl::StatusOr<BackwardResult> ClientImpl::Backward(const BackwardCall& call,
                                                    const CallOptions& options) {
  absl::StatusOr<Exchange<v1::BackwardRequestHeader>> exchange = PrepareBackward(call);
  if (!exchange.ok()) return exchange.status();
  absl::StatusOr<Outcome> outcome = Call("Backward", *exchange, options);
  if (!outcome.ok()) return outcome.status();
  BackwardResult result;
  HostTensor* const places[] = {&result.dq, &result.dk, &result.dv};
  for (size_t i = 0; i < 3; ++i) *places[i] = std::move(outcome->tensors[i]);
  size_t next = 3;
  if (!call.inputs.bias.empty()) result.dbias = std::move(outcome->tensors[next++]);
  if (!call.inputs.sinks.empty()) result.dsink = std::move(outcome->tensors[next++]);
  result.report = std::move(outcome->report);
  result.latency = outcome->latency;
  result.streamed = outcome->streamed;
  result.attempts = outcome->attempts;
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ChannelOptions& options) {
  if (options.max_retries < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_retries ", options.max_retries, " is below 0"));
  }
  absl::StatusOr<std::unique_ptr<Transport>> transport = Transport::Create(options);
  if (!transport.ok()) return transport.status();
  auto client = std::make_unique<ClientImpl>(options, *std::move(transport));
  if (absl::Status status = client->Start(); !status.ok()) return status;
  return std::unique_ptr<Client>(std::move(client));
}

}  // namespace attn::client
