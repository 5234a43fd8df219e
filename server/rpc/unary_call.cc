// Forward and Backward: the whole request has arrived when the handler starts.
#include <optional>
#include <string>
#include <vector>

#include "kernels/api/text.h"
#include "proto/wire/byte_buffer.h"
#include "server/rpc/call_reactors.h"

namespace attn::server {
namespace {

// Lives from the handler's start to OnDone(). Once Finish() is called another thread may delete
// it, so nothing is touched after that.
class UnaryCall final : public grpc::ServerUnaryReactor, public Job {
 public:
  UnaryCall(ServiceContext* context, Pass pass, grpc::CallbackServerContext* rpc,
            const grpc::ByteBuffer* request, grpc::ByteBuffer* response)
      : context_(context),
        rpc_(rpc),
        // The object is gRPC's and not const; clearing it early lets go of the request's memory
        // while attention runs.
        request_(const_cast<grpc::ByteBuffer*>(request)),
        response_(response),
        call_(context, pass == Pass::kForward ? Method::kForward : Method::kBackward, pass,
              DeadlineOf(*rpc, *context->clock)) {}

  void Begin() {
    absl::Status status = Read();
    if (!status.ok()) return End(status);
    if (call_.tiny()) return Run();
    call_.NoteQueued();
    context_->executor->Submit(this);
  }

  void Run() override { End(Execute()); }
  void Drop(const absl::Status& status) override { End(status); }
  const CancelToken& token() const override { return call_.token(); }
  TimePoint deadline() const override { return call_.deadline(); }
  uint64_t bytes() const override { return call_.admitted_bytes(); }

  void OnCancel() override {
    call_.token().Cancel();
    context_->executor->DropIfQueued(this);
  }
  void OnDone() override { delete this; }

 private:
  // Finds the parts of the message and admits the call.
  absl::Status Read() {
    absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(*request_);
    if (!pieces.ok()) return pieces.status();
    pieces_ = *std::move(pieces);
    if (absl::Status s = call_.CheckUnaryMessage(pieces_->size()); !s.ok()) return s;
    absl::StatusOr<wire::UnaryMessage> message = wire::ParseUnary(pieces_->pieces());
    if (!message.ok()) return message.status();
    message_ = *std::move(message);
    if (absl::Status s = call_.ReadHeader(message_.header); !s.ok()) return s;
    std::vector<uint64_t> sizes;
    sizes.reserve(message_.payloads.size());
    for (const wire::Bytes& payload : message_.payloads) sizes.push_back(payload.size);
    if (absl::Status s = call_.CheckUnary(sizes); !s.ok()) return s;
    return call_.Admit();
  }

  absl::Status Execute() {
    call_.NoteStarted();
    if (absl::Status s = call_.AllocateInputs(); !s.ok()) return s;
    for (size_t i = 0; i < message_.payloads.size(); ++i) {
      message_.payloads[i].CopyTo(0, message_.payloads[i].size, call_.payload(i));
    }
    message_.payloads.clear();
    pieces_.reset();
    request_->Clear();
    call_.NoteGathered();
    if (absl::Status s = call_.Run(); !s.ok()) return s;
    const v1::ExecutionReport& report = call_.Report();
    *response_ = wire::MakeUnary(call_.response_header(), call_.outputs(), &report);
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    const absl::Status settled = call_.Settle(status);
    AddTrailingMetadata(call_, rpc_);
    Finish(wire::ToGrpc(settled));
  }

  ServiceContext* const context_;
  grpc::CallbackServerContext* const rpc_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  AttentionCall call_;
  std::optional<wire::ReceivedPieces> pieces_;
  wire::UnaryMessage message_;  // views into pieces_
};

}  // namespace

grpc::ServerUnaryReactor* StartUnaryCall(ServiceContext* context, Pass pass,
                                         grpc::CallbackServerContext* rpc,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) {
  auto* call = new UnaryCall(context, pass, rpc, request, response);
  call->Begin();
  return call;
}

TimePoint DeadlineOf(const grpc::CallbackServerContext& rpc, const Clock& clock) {
  const auto deadline = rpc.deadline();
  const auto left = deadline - std::chrono::system_clock::now();
  // A day is as good as none, and an infinite deadline must not overflow.
  if (left > std::chrono::hours(24)) return TimePoint::max();
  return clock.Now() + std::chrono::duration_cast<TimePoint::duration>(left);
}

void AddTrailingMetadata(const AttentionCall& call, grpc::CallbackServerContext* rpc) {
  if (!call.path_name().empty()) {
    rpc->AddTrailingMetadata("attn-path", std::string(call.path_name()));
    rpc->AddTrailingMetadata("attn-kernel", call.kernel());
  }
  if (std::string rejections = call.RejectionList(); !rejections.empty()) {
    rpc->AddTrailingMetadata("attn-rejections", rejections);
  }
  if (call.retry().count() > 0) {
    rpc->AddTrailingMetadata("grpc-retry-pushback-ms", Cat(call.retry().count()));
  }
}

}  // namespace attn::server
