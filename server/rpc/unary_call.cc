// Forward and Backward: the whole request has arrived when the handler starts.
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/text.h"
#include "proto/wire/byte_buffer.h"
#include "server/rpc/call_reactors.h"

namespace attn::server {
namespace {

// The call, whoever runs it. Not thread-safe; token() may be cancelled from any thread.
class UnaryCall {
 public:
  UnaryCall(ServiceContext* context, Pass pass, grpc::CallbackServerContext* rpc,
            const grpc::ByteBuffer* request, grpc::ByteBuffer* response)
      : rpc_(rpc),
        // The object is gRPC's and not const; clearing it early lets go of the request's memory
        // while attention runs.
        request_(const_cast<grpc::ByteBuffer*>(request)),
        response_(response),
        call_(context, pass == Pass::kForward ? Method::kForward : Method::kBackward, pass,
              DeadlineOf(*rpc, *context->clock)) {
    call_.set_trace(TraceOf(*rpc));
  }

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

  // After Read() succeeded: makes the reply.
  absl::Status Execute() {
    call_.NoteStarted();
    if (absl::Status s = call_.Gather(message_.payloads); !s.ok()) return s;
    const bool gathered = !call_.reads_inputs();
    if (gathered) LetRequestGo();
    call_.NoteGathered();
    if (absl::Status s = call_.Run(); !s.ok()) return s;
    if (!gathered) LetRequestGo();
    const v1::ExecutionReport& report = call_.Report();
    *response_ = wire::MakeUnary(call_.response_header(), call_.outputs(), &report);
    return absl::OkStatus();
  }

  // What to finish the call with. Call once, last.
  grpc::Status Settle(const absl::Status& status) {
    const absl::Status settled = call_.Settle(status);
    AddTrailingMetadata(call_, rpc_);
    return wire::ToGrpc(settled);
  }

  AttentionCall& call() { return call_; }
  const AttentionCall& call() const { return call_; }

 private:
  void LetRequestGo() {
    message_.payloads.clear();
    pieces_.reset();
    request_->Clear();
  }

  grpc::CallbackServerContext* const rpc_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  AttentionCall call_;
  std::optional<wire::ReceivedPieces> pieces_;
  wire::UnaryMessage message_;  // views into pieces_
};

// A call that waits for a worker. Lives until OnDone(). Once Finish() is called another thread may
// delete it, so nothing is touched after that.
class QueuedCall final : public grpc::ServerUnaryReactor, public Job {
 public:
  QueuedCall(Executor* executor, std::unique_ptr<UnaryCall> unary)
      : executor_(executor), unary_(std::move(unary)) {}

  void Run() override { Finish(unary_->Settle(unary_->Execute())); }
  void Drop(const absl::Status& status) override { Finish(unary_->Settle(status)); }
  const CancelToken& token() const override { return call().token(); }
  TimePoint deadline() const override { return call().deadline(); }
  uint64_t bytes() const override { return call().admitted_bytes(); }

  void OnCancel() override {
    unary_->call().token().Cancel();
    executor_->DropIfQueued(this);
  }
  void OnDone() override { delete this; }

 private:
  const AttentionCall& call() const { return std::as_const(*unary_).call(); }

  Executor* const executor_;
  const std::unique_ptr<UnaryCall> unary_;
};

}  // namespace

grpc::ServerUnaryReactor* StartUnaryCall(ServiceContext* context, Pass pass,
                                         grpc::CallbackServerContext* rpc,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) {
  auto unary = std::make_unique<UnaryCall>(context, pass, rpc, request, response);
  absl::Status status = unary->Read();
  if (status.ok() && !unary->call().tiny()) {
    unary->call().NoteQueued();
    auto* queued = new QueuedCall(context->executor, std::move(unary));
    context->executor->Submit(queued);
    return queued;
  }
  // A call that ends here has no reactions. gRPC runs those of a reactor of our own on a thread of
  // its own, which costs a tiny call a quarter of its time; its default reactor has none.
  if (status.ok()) status = unary->Execute();
  grpc::ServerUnaryReactor* reactor = rpc->DefaultReactor();
  reactor->Finish(unary->Settle(status));
  return reactor;
}

TimePoint DeadlineOf(const grpc::CallbackServerContext& rpc, const Clock& clock) {
  const auto deadline = rpc.deadline();
  const auto left = deadline - std::chrono::system_clock::now();
  // A day is as good as none, and an infinite deadline must not overflow.
  if (left > std::chrono::hours(24)) return TimePoint::max();
  return clock.Now() + std::chrono::duration_cast<TimePoint::duration>(left);
}

std::optional<wire::TraceContext> TraceOf(const grpc::CallbackServerContext& rpc) {
  const auto [first, last] = rpc.client_metadata().equal_range(wire::kTraceparent);
  if (first == last || std::next(first) != last) return std::nullopt;
  const auto parent = wire::TraceContext::Parse({first->second.data(), first->second.size()});
  if (!parent) return std::nullopt;
  return parent->Child();
}

void AddTrace(const std::optional<wire::TraceContext>& trace, grpc::CallbackServerContext* rpc) {
  if (trace) rpc->AddTrailingMetadata(wire::kTraceparent, trace->ToString());
}

void AddTrailingMetadata(const AttentionCall& call, grpc::CallbackServerContext* rpc) {
  AddTrace(call.trace(), rpc);
  if (const CallPlan* plan = call.plan(); plan != nullptr) {
    if (!plan->path_name().empty()) {
      rpc->AddTrailingMetadata("attn-path", std::string(plan->path_name()));
      rpc->AddTrailingMetadata("attn-kernel", plan->kernel);
    }
    if (!plan->rejections.empty()) rpc->AddTrailingMetadata("attn-rejections", plan->rejections);
  }
  if (call.retry().count() > 0) {
    rpc->AddTrailingMetadata("grpc-retry-pushback-ms", Cat(call.retry().count()));
  }
}

}  // namespace attn::server
