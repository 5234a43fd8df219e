// ForwardStream and BackwardStream: header, chunks, half-close; then header, chunks, report.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "kernels/api/text.h"
#include "proto/wire/byte_buffer.h"
#include "server/rpc/call_reactors.h"

namespace attn::server {
namespace {

using ByteBuffer = grpc::ByteBuffer;

// Lives from the handler's start to OnDone(). At any time at most one of these is under way: a
// read, a wait in the queue, a run, a write; so members need no lock. Once Finish() or
// StartWriteAndFinish() is called another thread may delete it, so nothing is touched after that.
// While it waits for its caller the watch may step in: phase_ decides who goes on.
class StreamCall final : public grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>,
                         public Job,
                         public WatchedStream {
 public:
  StreamCall(ServiceContext* context, Pass pass, grpc::CallbackServerContext* rpc)
      : context_(context),
        rpc_(rpc),
        call_(context, pass == Pass::kForward ? Method::kForwardStream : Method::kBackwardStream,
              pass, DeadlineOf(*rpc, *context->clock)) {
    call_.set_trace(TraceOf(*rpc));
    context_->watch->Add(this);
  }

  void Begin() {
    if (context_->admission->draining()) {
      return End(absl::UnavailableError("the server is draining"));
    }
    ReadNext();
  }

  void OnReadDone(bool ok) override {
    // Ended as idle: this is the read that was under way then.
    if (phase_.exchange(Phase::kBusy) == Phase::kClaimed) return;
    if (!ok) return EndOfRequest();
    if (absl::Status s = TakeMessage(); !s.ok()) return End(s);
    ReadNext();
  }

  void Run() override {
    call_.NoteStarted();
    if (absl::Status s = call_.Run(); !s.ok()) return End(s);
    out_ = wire::MakeStreamHeader(call_.response_header());
    Write();
  }

  void OnWriteDone(bool ok) override {
    phase_.store(Phase::kBusy);
    if (!ok) return End(absl::CancelledError("the caller stopped reading"));
    WriteNext();
  }

  void Drop(const absl::Status& status) override { End(status); }
  const CancelToken& token() const override { return call_.token(); }
  TimePoint deadline() const override { return call_.deadline(); }
  uint64_t bytes() const override { return call_.admitted_bytes(); }

  void OnCancel() override {
    call_.token().Cancel();
    context_->executor->DropIfQueued(this);
  }
  void OnDone() override {
    context_->watch->Remove(this);
    delete this;
  }

  bool EndOrClaim(TimePoint limit) override {
    if (waiting_since_.load() > limit) return false;
    if (phase_.load() == Phase::kWriting) {
      // A status would wait behind the bytes that the caller does not read.
      rpc_->TryCancel();
      return false;
    }
    Phase expected = Phase::kReading;
    return phase_.compare_exchange_strong(expected, Phase::kClaimed);
  }
  void EndClaimed() override {
    End(absl::DeadlineExceededError(Cat("the stream sent nothing for ",
                                        context_->config.stream_idle_timeout.count(),
                                        " ms (--stream-idle-timeout)")));
  }

 private:
  // Who may end the call: kReading and kWriting wait for the caller.
  enum class Phase : uint8_t { kBusy, kReading, kWriting, kClaimed };

  void ReadNext() {
    waiting_since_.store(context_->clock->Now());
    phase_.store(Phase::kReading);
    StartRead(&in_);
  }
  void Write() {
    waiting_since_.store(context_->clock->Now());
    phase_.store(Phase::kWriting);
    StartWrite(&out_);
  }

  absl::Status TakeMessage() {
    absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(in_);
    if (!pieces.ok()) return pieces.status();
    absl::StatusOr<wire::StreamMessage> message = wire::ParseStream(pieces->pieces());
    if (!message.ok()) return message.status();
    switch (message->part) {
      case wire::StreamMessage::Part::kHeader:
        return TakeHeader(message->header);
      case wire::StreamMessage::Part::kChunk:
        return TakeChunk(message->chunk);
      default:
        return absl::InvalidArgumentError(
            "a stream message has neither header nor chunk; set one of them");
    }
  }

  // Refuses what can be refused before any chunk is read, and reserves the call's memory.
  absl::Status TakeHeader(const std::string& header) {
    if (has_header_) return absl::InvalidArgumentError("the stream has a second header");
    has_header_ = true;
    if (absl::Status s = call_.ReadHeader(header); !s.ok()) return s;
    if (absl::Status s = call_.Admit(); !s.ok()) return s;
    received_.assign(call_.payload_sizes().size(), 0);
    return call_.AllocateInputs();
  }

  absl::Status TakeChunk(const wire::ChunkView& chunk) {
    if (!has_header_) {
      return absl::InvalidArgumentError("a chunk came before the header; send the header first");
    }
    const uint32_t index = chunk.payload_index;
    if (index >= received_.size()) {
      return absl::InvalidArgumentError(Cat("chunk.payload_index is ", index,
                                            "; the header's tensors name ", received_.size(),
                                            " payloads"));
    }
    const uint64_t size = call_.payload_sizes()[index];
    if (chunk.offset != received_[index]) {
      return absl::InvalidArgumentError(Cat(
          "chunk of payload ", index, " has offset ", chunk.offset, "; expected ", received_[index],
          chunk.offset < received_[index] ? " (it overlaps what was sent)" : " (there is a gap)"));
    }
    if (chunk.data.size > size - received_[index]) {
      return absl::InvalidArgumentError(
          Cat("chunk of payload ", index, " at offset ", chunk.offset, " has ", chunk.data.size,
              " bytes; the header's tensors need ", size, " bytes of this payload, so at most ",
              size - received_[index], " were expected"));
    }
    chunk.data.CopyTo(0, chunk.data.size, call_.payload(index) + received_[index]);
    received_[index] += chunk.data.size;
    return absl::OkStatus();
  }

  // The caller closed its side, or the call was cancelled.
  void EndOfRequest() {
    if (call_.token().cancelled() || rpc_->IsCancelled()) {
      return End(absl::CancelledError("cancelled while receiving"));
    }
    if (!has_header_) {
      return End(absl::InvalidArgumentError("the stream ended before its header"));
    }
    for (size_t i = 0; i < received_.size(); ++i) {
      if (received_[i] < call_.payload_sizes()[i]) {
        return End(
            absl::InvalidArgumentError(Cat("payload ", i, " ended at offset ", received_[i],
                                           "; expected ", call_.payload_sizes()[i], " bytes")));
      }
    }
    in_.Clear();
    call_.NoteGathered();
    if (call_.tiny()) return Run();
    call_.NoteQueued();
    context_->executor->Submit(this);
  }

  // One chunk, or the report after the last.
  void WriteNext() {
    while (output_ < call_.outputs().size() && offset_ == call_.outputs()[output_].bytes.size()) {
      ++output_;
      offset_ = 0;
    }
    if (output_ < call_.outputs().size()) {
      const wire::OutgoingPayload& output = call_.outputs()[output_];
      const uint64_t size = std::min<uint64_t>(wire::kMaxChunkBytes, output.bytes.size() - offset_);
      out_ = wire::MakeStreamChunk(static_cast<uint32_t>(output_), offset_,
                                   {output.bytes.subspan(offset_, size), output.owner});
      offset_ += size;
      return Write();
    }
    out_ = wire::MakeStreamReport(call_.Report());
    const absl::Status settled = call_.Settle(absl::OkStatus());
    AddTrailingMetadata(call_, rpc_);
    StartWriteAndFinish(&out_, grpc::WriteOptions(), wire::ToGrpc(settled));
  }

  void End(const absl::Status& status) {
    const absl::Status settled = call_.Settle(status);
    AddTrailingMetadata(call_, rpc_);
    Finish(wire::ToGrpc(settled));
  }

  ServiceContext* const context_;
  grpc::CallbackServerContext* const rpc_;
  AttentionCall call_;
  std::atomic<Phase> phase_{Phase::kBusy};
  std::atomic<TimePoint> waiting_since_{TimePoint::max()};
  ByteBuffer in_;
  ByteBuffer out_;
  bool has_header_ = false;
  std::vector<uint64_t> received_;  // bytes of each payload so far
  size_t output_ = 0;               // being written
  uint64_t offset_ = 0;             // of its next chunk
};

}  // namespace

grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* StartStreamCall(ServiceContext* context, Pass pass,
                                                                 grpc::CallbackServerContext* rpc) {
  auto* call = new StreamCall(context, pass, rpc);
  call->Begin();
  return call;
}

}  // namespace attn::server
