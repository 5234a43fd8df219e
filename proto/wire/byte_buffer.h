// Framing on grpc::ByteBuffer, for the server and the client: payload bytes go from tensor memory
// to gRPC slices and back without a copy through protobuf.
#ifndef ATTN_PROTO_WIRE_BYTE_BUFFER_H_
#define ATTN_PROTO_WIRE_BYTE_BUFFER_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/wire/framing.h"

namespace attn::wire {

// The slices of a received message, kept alive, and views of their bytes. Move-only: a short slice
// holds its bytes within itself.
class ReceivedPieces {
 public:
  ReceivedPieces(ReceivedPieces&&) = default;
  ReceivedPieces& operator=(ReceivedPieces&&) = default;

  // Errors: INTERNAL where the buffer holds no message.
  static absl::StatusOr<ReceivedPieces> Create(const grpc::ByteBuffer& buffer);
  std::span<const std::string_view> pieces() const { return views_; }
  uint64_t size() const { return size_; }

 private:
  ReceivedPieces() = default;

  std::vector<grpc::Slice> slices_;
  std::vector<std::string_view> views_;
  uint64_t size_ = 0;
};

// Tensor bytes to send. `owner` is released when gRPC has sent them; may be null where the bytes
// outlive the call.
struct OutgoingPayload {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

// A slice over the payload's bytes that holds its owner; no copy.
grpc::Slice ToSlice(const OutgoingPayload& payload);

// Parses a header or report that ParseUnary() or ParseStream() gave back, with the nesting limit
// that protobuf would have applied inside the enclosing message. Errors: INVALID_ARGUMENT, names
// `what`.
absl::Status ParseInto(std::string_view serialized, const char* what,
                       google::protobuf::MessageLite* message);

// Payloads up to this size are copied next to their neighbours in a unary message. A slice of its
// own costs both sides an allocation, reference counts and an entry of the system call, which is
// more than copying so much. Unit: bytes.
inline constexpr size_t kCopiedPayloadBytes = 8192;

// A whole unary message: header, payloads in order, report (null: none). The caller has checked
// that it stays under kMaxUnaryMessageBytes. Payloads over kCopiedPayloadBytes are shared, not
// copied.
grpc::ByteBuffer MakeUnary(const google::protobuf::MessageLite& header,
                           std::span<const OutgoingPayload> payloads,
                           const google::protobuf::MessageLite* report);

// Stream messages.
grpc::ByteBuffer MakeStreamHeader(const google::protobuf::MessageLite& header);
grpc::ByteBuffer MakeStreamReport(const google::protobuf::MessageLite& report);
// `bytes` are data [offset, offset + bytes.size()) of the payload; at most kMaxChunkBytes.
grpc::ByteBuffer MakeStreamChunk(uint32_t payload_index, uint64_t offset,
                                 const OutgoingPayload& bytes);

// grpc::Status <-> absl::Status: codes are the same numbers; the message is kept.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status ToAbsl(const grpc::Status& status);

}  // namespace attn::wire

#endif  // ATTN_PROTO_WIRE_BYTE_BUFFER_H_
