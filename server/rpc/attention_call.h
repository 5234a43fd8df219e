// One forward or backward call from its header to its report, whatever carries it. unary_call.cc
// and stream_call.cc bring the bytes in and out.
#ifndef ATTN_SERVER_RPC_ATTENTION_CALL_H_
#define ATTN_SERVER_RPC_ATTENTION_CALL_H_

#include <google/protobuf/arena.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "proto/wire/byte_buffer.h"
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

  // Memory for the payloads; then payload(i) is where to put payload i, payload_sizes()[i] bytes.
  // Errors: RESOURCE_EXHAUSTED.
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
  const google::protobuf::MessageLite& response_header() const { return *response_header_; }
  std::span<const wire::OutgoingPayload> outputs() const {
    return {outputs_.data(), static_cast<size_t>(num_outputs_)};
  }
  // Fills in the report as of now; call last.
  const v1::ExecutionReport& Report();
  // Trailing metadata "attn-path", "attn-kernel", "attn-rejections"; empty where no path was
  // chosen.
  std::string_view path_name() const;
  const std::string& kernel() const { return kernel_; }
  std::string RejectionList() const;

  // Settles how the call ended: counts it and, at debug level, logs it. Call once. A cancellation
  // that the deadline caused becomes DEADLINE_EXCEEDED.
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
  // Keeps the reply's memory, and the pool it goes back to, until gRPC has sent it.
  struct OutputMemory {
    std::shared_ptr<BufferPool> pool;
    BufferPool::Buffer buffer;
  };
  struct Output {
    DType dtype = DType::kFp32;
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in outputs' buffer
  };

  void PlanOutputs();
  absl::Status BindInputs();
  absl::Status AllocateOutputs();
  absl::Status RunBackend(std::span<std::byte> workspace);
  void DescribeOutputs();
  const std::byte* InputData(Input input) const;
  uint64_t OutputBytes() const;
  uint64_t InputBytes() const;

  ServiceContext* const context_;
  const Method method_;
  const Pass pass_;
  const TimePoint deadline_;
  CancelToken token_;
  Times times_;

  // The header, the response header and the report live here: no allocation of their own.
  alignas(8) std::array<char, 4096> arena_block_;
  google::protobuf::Arena arena_;
  ConvertedHeader header_;
  AttentionProblem problem_;
  PathChoice choice_;
  std::optional<uint64_t> flops_;
  int64_t workspace_bytes_ = 0;
  std::string kernel_;

  Admission::Ticket ticket_;
  std::chrono::milliseconds retry_{0};
  std::vector<uint64_t> payload_sizes_;    // what the tensors need, or what a unary message brought
  std::vector<uint64_t> payload_offsets_;  // in inputs_
  BufferPool::Buffer inputs_;

  std::array<Output, 5> output_plan_;
  std::array<wire::OutgoingPayload, 5> outputs_;
  int num_outputs_ = 0;
  std::byte* output_data_ = nullptr;
  google::protobuf::MessageLite* response_header_ = nullptr;
  v1::ExecutionReport* report_ = nullptr;
  TileModel model_;
  uint64_t compulsory_bytes_ = 0;
  std::string request_id_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_ATTENTION_CALL_H_
