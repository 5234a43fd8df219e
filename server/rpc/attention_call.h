// One forward or backward call from its header to its report, whatever carries it. unary_call.cc
// and stream_call.cc bring the bytes in and out.
#ifndef ATTN_SERVER_RPC_ATTENTION_CALL_H_
#define ATTN_SERVER_RPC_ATTENTION_CALL_H_

#include <google/protobuf/arena.h>

#include <array>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "proto/wire/byte_buffer.h"
#include "proto/wire/trace_context.h"
#include "server/rpc/call_plan.h"
#include "server/rpc/convert.h"
#include "server/rpc/service_context.h"

namespace attn::server {

// Steps are called in the order below, each by one thread at a time; a step that fails ends the
// call. token() may be cancelled from any thread.
class AttentionCall {
 public:
  AttentionCall(ServiceContext* context, Method method, Pass pass, TimePoint deadline);
  ~AttentionCall();
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  // Where the call stands in its caller's trace. Call first, if at all.
  void set_trace(std::optional<wire::TraceContext> trace) { trace_ = std::move(trace); }
  const std::optional<wire::TraceContext>& trace() const { return trace_; }

  // Unary only: the message is within the limit. Errors: RESOURCE_EXHAUSTED (names the streaming
  // method).
  absl::Status CheckUnaryMessage(uint64_t message_bytes) const;

  // Parses, converts and validates the header, and chooses the path. Errors: INVALID_ARGUMENT,
  // UNIMPLEMENTED, RESOURCE_EXHAUSTED (over --max-request-bytes), FAILED_PRECONDITION (lists every
  // reason).
  absl::Status ReadHeader(std::string_view serialized);

  // Unary only: the payloads hold the tensors, and the reply will fit in one message. Errors:
  // INVALID_ARGUMENT, RESOURCE_EXHAUSTED (names the streaming method).
  absl::Status CheckUnary(std::span<const uint64_t> payload_sizes);

  // Takes the right to hold the call's memory, before any of it is allocated. Errors:
  // RESOURCE_EXHAUSTED, UNAVAILABLE.
  absl::Status Admit();

  // Unary only: copies the payloads into memory of the call's own, but for those that stay where
  // they are until Run() has read them: then the payloads must live until it returns (else they may
  // go). Errors: RESOURCE_EXHAUSTED.
  absl::Status Gather(std::span<const wire::Bytes> payloads);
  bool reads_inputs() const { return reader_.has_value(); }

  // Streams only: memory for the payloads; then payload(i) is where to put payload i,
  // payload_sizes()[i] bytes. Errors: RESOURCE_EXHAUSTED.
  absl::Status AllocateInputs();
  const std::vector<uint64_t>& payload_sizes() const { return payload_sizes_; }
  std::byte* payload(size_t index) { return inputs_.data() + payload_offsets_[index]; }

  // Small enough that handing it to a worker would cost more than running it.
  bool tiny() const;
  void NoteQueued() { times_.queued = context_->clock->Now(); }
  void NoteStarted() { times_.started = context_->clock->Now(); }
  void NoteGathered() { times_.gathered = context_->clock->Now(); }

  // Checks the contents of option tensors and runs attention. Errors: INVALID_ARGUMENT, CANCELLED,
  // DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL.
  absl::Status Run();

  // The reply: after Run() succeeded.
  const google::protobuf::MessageLite& response_header() const { return *plan_->response_header; }
  std::span<const wire::OutgoingPayload> outputs() const {
    return {outputs_.data(), static_cast<size_t>(plan_->num_outputs)};
  }
  // Fills in the report as of now; call last.
  const v1::ExecutionReport& Report();
  // What the header asks for: path, kernel and rejections. Null before ReadHeader(); where that
  // failed there may be no path.
  const CallPlan* plan() const { return plan_.get(); }

  // Settles how the call ended: counts it, keeps it among the recent ones and, at debug level, logs
  // it. Call once. A cancellation that the deadline caused becomes DEADLINE_EXCEEDED.
  absl::Status Settle(absl::Status status);

  CancelToken& token() { return token_; }
  const CancelToken& token() const { return token_; }
  TimePoint deadline() const { return deadline_; }
  uint64_t admitted_bytes() const { return ticket_.bytes(); }
  std::chrono::milliseconds retry() const { return retry_; }  // 0: no hint

 private:
  struct Times {
    TimePoint start, parsed, queued, started, gathered, run, ran;
  };
  // q, k and v in the payloads of a unary message.
  class PayloadReader final : public InputReader {
   public:
    PayloadReader(const ConvertedHeader& header, std::span<const wire::Bytes> payloads);
    void Read(Tensor tensor, uint64_t offset_bytes, uint64_t count_bytes,
              std::byte* destination) const override;

   private:
    struct Source {
      Source(const TensorRef& ref, std::span<const wire::Bytes> payloads)
          : bytes(payloads[ref.payload]), offset(ref.offset_bytes) {}
      wire::BytesReader bytes;
      uint64_t offset;
    };
    std::array<Source, 3> sources_;  // by Tensor
  };
  // Keeps the reply's memory, and the pool it goes back to, until gRPC has sent it.
  struct OutputMemory {
    std::shared_ptr<BufferPool> pool;
    BufferPool::Buffer buffer;
  };

  // Memory for the payloads but those that `left_out` names.
  absl::Status Allocate(std::bitset<wire::kMaxPayloads> left_out);
  absl::Status BindInputs();
  absl::Status AllocateOutputs();
  absl::Status RunBackend(std::span<std::byte> workspace);
  const std::byte* InputData(Input input) const;
  uint64_t InputBytes() const;
  bool on_cuda() const { return DeviceOf(*plan_->choice.path) == DeviceKind::kCuda; }
  // After RunBackend(): of the attention itself; on a device without queueing and copies.
  std::chrono::nanoseconds KernelTime() const;
  // What the device's rates, measured at start-up, allow at best; 0 where there are none.
  double RooflineNs() const;
  void CountExecution() const;
  void Remember(const absl::Status& status, std::chrono::nanoseconds handler) const;
  // What only calls on a device have.
  void ReportDevice(v1::ExecutionReport* report) const;

  ServiceContext* const context_;
  const Method method_;
  const Pass pass_;
  const TimePoint deadline_;
  CancelToken token_;
  Times times_;

  // The report lives here: no allocation of its own.
  alignas(8) std::array<char, 2048> arena_block_;
  google::protobuf::Arena arena_;
  std::shared_ptr<const CallPlan> plan_;
  AttentionProblem problem_;  // the plan's, with option tensors bound
  std::optional<CallCost> cost_;
  DeviceTimes device_times_;  // all 0 on a CPU path

  Admission::Ticket ticket_;
  std::chrono::milliseconds retry_{0};
  std::vector<uint64_t> payload_sizes_;    // what the tensors need, or what a unary message brought
  std::vector<uint64_t> payload_offsets_;  // in inputs_
  BufferPool::Buffer inputs_;
  std::optional<PayloadReader> reader_;
  uint64_t reading_ns_ = 0;  // of the run's time, what went into reader_

  std::array<wire::OutgoingPayload, 5> outputs_;
  std::byte* output_data_ = nullptr;
  v1::ExecutionReport* report_ = nullptr;
  std::string request_id_;
  std::optional<wire::TraceContext> trace_;  // of this call's own span
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_ATTENTION_CALL_H_
