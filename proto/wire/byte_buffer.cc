#include "proto/wire/byte_buffer.h"

#include <google/protobuf/io/coded_stream.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attn::wire {
namespace {

constexpr uint32_t kHeaderField = 1;
constexpr uint32_t kPayloadField = 2;
constexpr uint32_t kReportField = 3;

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

void AppendMessage(uint32_t field, const google::protobuf::MessageLite& message, std::string* out) {
  *out += FieldPrefix(field, message.ByteSizeLong());
  message.AppendToString(out);
}

grpc::ByteBuffer FromString(const std::string& bytes) {
  const grpc::Slice slice(bytes);
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
  std::vector<grpc::Slice> slices;
  slices.reserve(2 * payloads.size() + 1);
  std::string between;  // what stands before the next payload
  AppendMessage(kHeaderField, header, &between);
  for (const OutgoingPayload& payload : payloads) {
    between += FieldPrefix(kPayloadField, payload.bytes.size());
    if (payload.bytes.empty()) continue;
    slices.emplace_back(between);
    slices.push_back(ToSlice(payload));
    between.clear();
  }
  if (report != nullptr) AppendMessage(kReportField, *report, &between);
  if (!between.empty()) slices.emplace_back(between);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer MakeStreamHeader(const google::protobuf::MessageLite& header) {
  std::string bytes;
  AppendMessage(kHeaderField, header, &bytes);
  return FromString(bytes);
}

grpc::ByteBuffer MakeStreamReport(const google::protobuf::MessageLite& report) {
  std::string bytes;
  AppendMessage(kReportField, report, &bytes);
  return FromString(bytes);
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
