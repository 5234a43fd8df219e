// Raw calls: messages as grpc::ByteBuffer over one or more channels to one server.
#ifndef ATTN_CLIENT_LIB_TRANSPORT_H_
#define ATTN_CLIENT_LIB_TRANSPORT_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/lib/client.h"
#include "kernels/api/mutex.h"
#include "proto/wire/byte_buffer.h"

namespace attn::client {

class ReplyReader;

// What bounds one attempt.
struct CallControl {
  std::optional<std::chrono::system_clock::time_point> deadline;
  const std::atomic<bool>* cancel = nullptr;
  std::string traceparent = {};  // metadata; empty: none
};

// What `control` says of a call that is about to start.
void Prepare(const CallControl& control, grpc::ClientContext* context);

// How one attempt ended.
struct AttemptResult {
  absl::Status status;
  // Of trailing metadata grpc-retry-pushback-ms. Negative: the server asks not to be tried again.
  std::optional<int64_t> pushback_ms;
  std::chrono::nanoseconds latency{0};  // from send to the last byte
};

using ProgressFunction = decltype(CallOptions::progress);

// Bytes of a tensor as gRPC may hold them: as they are where they have an owner, else a copy,
// because gRPC may still hold them when a call that failed has returned.
wire::OutgoingPayload MakeOwned(const wire::OutgoingPayload& payload);

// Thread-safe. The calling thread drives its own call through a completion queue of its own, so
// that a small call needs no hand-over between threads.
class Transport {
 public:
  // Errors: INVALID_ARGUMENT: an option; NOT_FOUND: a PEM file cannot be read; both name the
  // option.
  static absl::StatusOr<std::unique_ptr<Transport>> Create(const ChannelOptions& options);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  AttemptResult Unary(const std::string& method, const grpc::ByteBuffer& request,
                      const CallControl& control, grpc::ByteBuffer* reply);

  // Header, payloads in chunks, half-close; the reply goes to `reader` as it comes in, also while
  // chunks are still being sent. `reply_bytes` is the total for `progress`, which may be empty.
  AttemptResult Stream(const std::string& method, const google::protobuf::MessageLite& header,
                       std::span<const wire::OutgoingPayload> payloads, uint64_t reply_bytes,
                       const CallControl& control, const ProgressFunction& progress,
                       ReplyReader* reader);

  // Waits until the first channel is connected, it has failed to, or the deadline has passed.
  void WaitForStateChange(std::chrono::system_clock::time_point deadline);

 private:
  // A queue borrowed for one call; empty again when it goes back.
  class BorrowedQueue;

  Transport() = default;
  grpc::GenericStub& NextStub();
  std::unique_ptr<grpc::CompletionQueue> TakeQueue();
  void GiveQueue(std::unique_ptr<grpc::CompletionQueue> queue);

  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<grpc::GenericStub> stubs_;
  std::atomic<uint32_t> next_{0};
  Mutex mutex_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> idle_queues_ ATTN_GUARDED_BY(mutex_);
};

// Waits for the next event of a call. Watches `control.cancel` and cancels the call when it is set;
// calls `tick` (may be empty) a few times per second.
class EventLoop {
 public:
  EventLoop(grpc::CompletionQueue* queue, grpc::ClientContext* context, const CallControl& control,
            std::function<void()> tick)
      : queue_(queue), context_(context), control_(control), tick_(std::move(tick)) {}

  void Next(void** tag, bool* ok);
  bool cancelled() const { return cancelled_; }

 private:
  grpc::CompletionQueue* queue_;
  grpc::ClientContext* context_;
  const CallControl& control_;
  std::function<void()> tick_;
  std::chrono::steady_clock::time_point last_tick_ = std::chrono::steady_clock::now();
  bool cancelled_ = false;
};

// Status and pushback of a call that has ended.
AttemptResult MakeResult(const grpc::Status& status, const grpc::ClientContext& context,
                         const CallControl& control, bool cancelled);

}  // namespace attn::client

#endif  // ATTN_CLIENT_LIB_TRANSPORT_H_
