#include "proto/wire/byte_buffer.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attn::wire {
namespace {

constexpr uint32_t kHeaderField = 1;
constexpr uint32_t kPayloadField = 2;
constexpr uint32_t kReportField = 3;

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

using google::protobuf::io::CodedOutputStream;

constexpr uint32_t LengthDelimitedTag(uint32_t field) { return field << 3 | 2; }

// Bytes of a length-delimited field's tag and length. Fields have numbers below 16.
size_t PrefixSize(uint64_t size) { return 1 + CodedOutputStream::VarintSize64(size); }

uint8_t* WritePrefix(uint32_t field, uint64_t size, uint8_t* at) {
  *at++ = static_cast<uint8_t>(LengthDelimitedTag(field));
  return CodedOutputStream::WriteVarint64ToArray(size, at);
}

// A message as a field. Its size is computed once; writing uses what ByteSizeLong() left cached.
class MessageField {
 public:
  MessageField(uint32_t field, const google::protobuf::MessageLite& message)
      : field_(field), message_(message), size_(message.ByteSizeLong()) {}
  size_t size() const { return PrefixSize(size_) + size_; }
  uint8_t* Write(uint8_t* at) const {
    return message_.SerializeWithCachedSizesToArray(WritePrefix(field_, size_, at));
  }

 private:
  const uint32_t field_;
  const google::protobuf::MessageLite& message_;
  const size_t size_;
};

// The memory of a slice that nobody else holds yet.
uint8_t* Writable(const grpc::Slice& slice) { return const_cast<uint8_t*>(slice.begin()); }

grpc::ByteBuffer FromField(const MessageField& field) {
  const grpc::Slice slice(field.size());
  field.Write(Writable(slice));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

absl::StatusOr<ReceivedPieces> ReceivedPieces::Create(const grpc::ByteBuffer& buffer) {
  ReceivedPieces out;
  if (const grpc::Status status = buffer.Dump(&out.slices_); !status.ok()) {
    return absl::InternalError(
        absl::StrCat("cannot read the received message: ", status.error_message()));
  }
  out.views_.reserve(out.slices_.size());
  for (const grpc::Slice& slice : out.slices_) {
    out.views_.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
    out.size_ += slice.size();
  }
  return out;
}

grpc::Slice ToSlice(const OutgoingPayload& payload) {
  // gRPC takes a pointer to non-const and only reads it.
  void* data = const_cast<std::byte*>(payload.bytes.data());
  if (payload.bytes.empty()) return grpc::Slice();
  if (payload.owner == nullptr) {
    return grpc::Slice(data, payload.bytes.size(), grpc::Slice::STATIC_SLICE);
  }
  return grpc::Slice(data, payload.bytes.size(), &ReleaseOwner,
                     new std::shared_ptr<const void>(payload.owner));
}

absl::Status ParseInto(std::string_view serialized, const char* what,
                       google::protobuf::MessageLite* message) {
  google::protobuf::io::CodedInputStream input(reinterpret_cast<const uint8_t*>(serialized.data()),
                                               static_cast<int>(serialized.size()));
  // One level less than protobuf's default: the enclosing message took one.
  input.SetRecursionLimit(google::protobuf::io::CodedInputStream::GetDefaultRecursionLimit() - 1);
  if (!message->ParseFromCodedStream(&input) || !input.ConsumedEntireMessage()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is not a valid ", message->GetTypeName()));
  }
  return absl::OkStatus();
}

grpc::ByteBuffer MakeUnary(const google::protobuf::MessageLite& header,
                           std::span<const OutgoingPayload> payloads,
                           const google::protobuf::MessageLite* report) {
  const MessageField header_field(kHeaderField, header);
  std::optional<MessageField> report_field;
  if (report != nullptr) report_field.emplace(kReportField, *report);
  std::vector<grpc::Slice> slices;
  // One turn makes a slice of everything up to the next payload that goes as it is, and that
  // payload's slice.
  for (size_t next = 0;;) {
    const bool first = slices.empty();
    size_t bytes = first ? header_field.size() : 0;
    size_t end = next;
    for (; end < payloads.size() && payloads[end].bytes.size() <= kCopiedPayloadBytes; ++end) {
      bytes += PrefixSize(payloads[end].bytes.size()) + payloads[end].bytes.size();
    }
    const bool last = end == payloads.size();
    if (!last) {
      bytes += PrefixSize(payloads[end].bytes.size());
    } else if (report_field) {
      bytes += report_field->size();
    }
    if (bytes > 0) {
      grpc::Slice slice(bytes);
      uint8_t* at = Writable(slice);
      if (first) at = header_field.Write(at);
      for (; next < end; ++next) {
        const std::span<const std::byte> payload = payloads[next].bytes;
        at = WritePrefix(kPayloadField, payload.size(), at);
        at = std::copy_n(reinterpret_cast<const uint8_t*>(payload.data()), payload.size(), at);
      }
      if (!last) {
        WritePrefix(kPayloadField, payloads[end].bytes.size(), at);
      } else if (report_field) {
        report_field->Write(at);
      }
      slices.push_back(std::move(slice));
    }
    if (last) break;
    slices.push_back(ToSlice(payloads[end]));
    next = end + 1;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer MakeStreamHeader(const google::protobuf::MessageLite& header) {
  return FromField(MessageField(kHeaderField, header));
}

grpc::ByteBuffer MakeStreamReport(const google::protobuf::MessageLite& report) {
  return FromField(MessageField(kReportField, report));
}

grpc::ByteBuffer MakeStreamChunk(uint32_t payload_index, uint64_t offset,
                                 const OutgoingPayload& bytes) {
  const grpc::Slice slices[] = {grpc::Slice(ChunkPrefix(payload_index, offset, bytes.bytes.size())),
                                ToSlice(bytes)};
  return grpc::ByteBuffer(slices, bytes.bytes.empty() ? 1 : 2);
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Status ToAbsl(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = status.error_code();
  const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      status.error_message());
}

}  // namespace attn::wire
