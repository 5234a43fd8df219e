// One attention call over a stream, driven by the calling thread.
#include <algorithm>
#include <utility>

#include "client/lib/exchange.h"
#include "client/lib/transport.h"
#include "proto/wire/framing.h"

namespace attn::client {
namespace {

using Stream = grpc::ClientAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

// Walks the payloads in order, one chunk at a time.
class ChunkSource {
 public:
  explicit ChunkSource(std::span<const wire::OutgoingPayload> payloads) : payloads_(payloads) {
    SkipDone();
  }

  bool done() const { return index_ == payloads_.size(); }

  // Precondition: not done.
  grpc::ByteBuffer Next(uint64_t* chunk_bytes) {
    const wire::OutgoingPayload& payload = payloads_[index_];
    const auto bytes = payload.bytes.subspan(
        offset_, std::min<uint64_t>(wire::kMaxChunkBytes, payload.bytes.size() - offset_));
    grpc::ByteBuffer message = wire::MakeStreamChunk(static_cast<uint32_t>(index_), offset_,
                                                     MakeOwned({bytes, payload.owner}));
    *chunk_bytes = bytes.size();
    offset_ += bytes.size();
    SkipDone();
    return message;
  }

 private:
  void SkipDone() {  // an empty payload has no chunk
    while (index_ < payloads_.size() && offset_ == payloads_[index_].bytes.size()) {
      ++index_;
      offset_ = 0;
    }
  }

  std::span<const wire::OutgoingPayload> payloads_;
  size_t index_ = 0;
  uint64_t offset_ = 0;
};

// The state of one stream. Sending and receiving go on independently: a server may begin its reply
// before the half-close, only after it, or refuse while chunks are still being sent.
class StreamCall {
 public:
  StreamCall(std::span<const wire::OutgoingPayload> payloads, ReplyReader* reader)
      : chunks_(payloads), reader_(reader) {}

  void Run(std::unique_ptr<Stream> stream, const google::protobuf::MessageLite& header,
           grpc::ClientContext* context, EventLoop& events) {
    stream_ = std::move(stream);
    context_ = context;
    Begin(kStart);
    stream_->StartCall(TagOf(kStart));
    grpc::ByteBuffer first = wire::MakeStreamHeader(header);
    while (pending_ > 0) {
      void* tag;
      bool ok = false;
      events.Next(&tag, &ok);
      --pending_;
      switch (static_cast<Operation>(reinterpret_cast<intptr_t>(tag))) {
        case kStart:
          OnStart(ok, first);
          break;
        case kWrite:
          OnWrite(ok);
          break;
        case kHalfClose:
          writing_ = false;
          break;
        case kRead:
          OnRead(ok);
          break;
        case kFinish:
          // The status is known. A write that is still waiting for the server's window never ends
          // by itself.
          if (writing_) context_->TryCancel();
          break;
      }
    }
  }

  const grpc::Status& status() const { return status_; }
  const absl::Status& reply_error() const { return reply_error_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  std::chrono::steady_clock::time_point last_byte() const { return last_byte_; }

 private:
  enum Operation : intptr_t { kStart = 1, kWrite, kHalfClose, kRead, kFinish };
  static void* TagOf(Operation operation) { return reinterpret_cast<void*>(operation); }
  void Begin(Operation operation) {
    ++pending_;
    if (operation == kWrite || operation == kHalfClose) writing_ = true;
  }

  void OnStart(bool ok, const grpc::ByteBuffer& header) {
    if (!ok) {
      EndReading();
      return;
    }
    Begin(kRead);
    stream_->Read(&message_, TagOf(kRead));
    Begin(kWrite);
    stream_->Write(header, TagOf(kWrite));
  }

  void OnWrite(bool ok) {
    writing_ = false;
    if (!ok || reading_ended_) return;  // the server has ended the call; its status comes by itself
    sent_bytes_ += std::exchange(chunk_bytes_, 0);
    if (chunks_.done()) {
      Begin(kHalfClose);
      stream_->WritesDone(TagOf(kHalfClose));
      return;
    }
    Begin(kWrite);
    stream_->Write(chunks_.Next(&chunk_bytes_), TagOf(kWrite));
  }

  void OnRead(bool ok) {
    if (!ok) {
      EndReading();
      return;
    }
    last_byte_ = std::chrono::steady_clock::now();
    if (reply_error_.ok()) {
      reply_error_ = reader_->ReadStreamMessage(message_);
      if (!reply_error_.ok()) context_->TryCancel();
    }
    Begin(kRead);
    stream_->Read(&message_, TagOf(kRead));
  }

  void EndReading() {
    reading_ended_ = true;
    Begin(kFinish);
    stream_->Finish(&status_, TagOf(kFinish));
  }

  std::unique_ptr<Stream> stream_;
  grpc::ClientContext* context_ = nullptr;
  ChunkSource chunks_;
  ReplyReader* reader_;
  grpc::ByteBuffer message_;
  grpc::Status status_;
  absl::Status reply_error_;
  int pending_ = 0;       // operations whose event has not come yet
  bool writing_ = false;  // a write or the half-close is pending
  bool reading_ended_ = false;
  uint64_t chunk_bytes_ = 0;  // of the write that is pending
  uint64_t sent_bytes_ = 0;
  std::chrono::steady_clock::time_point last_byte_ = std::chrono::steady_clock::now();
};

}  // namespace

AttemptResult Transport::Stream(const std::string& method,
                                const google::protobuf::MessageLite& header,
                                std::span<const wire::OutgoingPayload> payloads,
                                uint64_t reply_bytes, const CallControl& control,
                                const ProgressFunction& progress, ReplyReader* reader) {
  uint64_t request_bytes = 0;
  for (const wire::OutgoingPayload& payload : payloads) request_bytes += payload.bytes.size();
  std::unique_ptr<grpc::CompletionQueue> queue = TakeQueue();
  grpc::ClientContext context;
  Prepare(control, &context);
  StreamCall call(payloads, reader);
  const std::function<void()> report = [&] {
    progress(call.sent_bytes(), request_bytes, reader->received_bytes(), reply_bytes);
  };
  EventLoop events(queue.get(), &context, control, progress ? report : nullptr);
  const auto begin = std::chrono::steady_clock::now();
  call.Run(NextStub().PrepareCall(&context, method, queue.get()), header, &context, events);
  if (progress) report();
  GiveQueue(std::move(queue));
  AttemptResult result = MakeResult(call.status(), context, control, events.cancelled());
  result.latency = call.last_byte() - begin;
  if (!call.reply_error().ok()) {
    result.status = call.reply_error();
    result.pushback_ms.reset();
  } else if (result.status.ok()) {
    result.status = reader->Finish();
  }
  return result;
}

}  // namespace attn::client
