// Holds the framing parser against protobuf's own parser on the same bytes. Used by tests and
// fuzzers.
#ifndef ATTN_TESTS_UNIT_WIRE_GRPC_DIFFERENTIAL_H_
#define ATTN_TESTS_UNIT_WIRE_GRPC_DIFFERENTIAL_H_

#include <google/protobuf/unknown_field_set.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "attention/v1/attention.pb.h"
#include "proto/wire/byte_buffer.h"
#include "proto/wire/framing.h"

namespace attn::wire {

namespace v1 = ::attention::v1;

// Cuts `bytes` into pieces; `next(n)` gives a number in [0, n]. Empty pieces occur.
template <typename Next>
std::vector<std::string_view> CutIntoPieces(std::string_view bytes, Next next) {
  std::vector<std::string_view> pieces;
  while (!bytes.empty()) {
    const size_t at_most = next(2) == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 6);
    const size_t size = next(at_most);
    pieces.push_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  if (next(3) == 0) pieces.emplace_back();
  return pieces;
}

// Ours may refuse what protobuf accepts only for a limit.
inline bool IsLimit(const absl::Status& status) {
  const std::string message(status.message());
  return message.find("is over the limit of") != std::string::npos ||
         message.rfind("more than ", 0) == 0;
}

template <typename Message>
constexpr bool kHasReport = requires(const Message& m) {
  m.report();
};

// The header and report fields as protobuf sees them, before anything is merged or replaced.
template <typename Message>
bool SomePartFailsAlone(const std::string& bytes) {
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromString(bytes)) return false;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.type() != google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) continue;
    if (field.number() == 1) {
      std::remove_cvref_t<decltype(Message().header())> header;
      if (!ParseInto(field.length_delimited(), "header", &header).ok()) return true;
    }
    if constexpr (kHasReport<Message>) {
      v1::ExecutionReport report;
      if (field.number() == 3 && !ParseInto(field.length_delimited(), "report", &report).ok()) {
        return true;
      }
    }
  }
  return false;
}

// What both parsers make of a unary message. Empty where they agree, else what differs.
template <typename Message>
std::string CompareUnary(const std::string& bytes, std::span<const std::string_view> pieces) {
  Message theirs;
  const bool accepted = theirs.ParseFromString(bytes);
  const absl::StatusOr<UnaryMessage> ours = ParseUnary(pieces, !kHasReport<Message>);
  if (!ours.ok()) {
    if (!accepted || IsLimit(ours.status())) return "";
    return "only ours refuses: " + ours.status().ToString();
  }
  std::remove_cvref_t<decltype(theirs.header())> header;
  bool parsed = ParseInto(ours->header, "header", &header).ok();
  v1::ExecutionReport report;
  parsed = parsed && ParseInto(ours->report, "report", &report).ok();
  if (parsed != accepted) return accepted ? "only ours refuses the header" : "only ours accepts";
  if (!accepted) return "";
  if (header.SerializeAsString() != theirs.header().SerializeAsString()) return "header differs";
  if constexpr (kHasReport<Message>) {
    if (report.SerializeAsString() != theirs.report().SerializeAsString()) return "report differs";
  } else if (!ours->report.empty()) {
    return "a report in a request";
  }
  if (ours->payloads.size() != static_cast<size_t>(theirs.payload_size())) {
    return "number of payloads differs";
  }
  for (int i = 0; i < theirs.payload_size(); ++i) {
    if (ours->payloads[i].size != theirs.payload(i).size() ||
        ours->payloads[i].ToString() != theirs.payload(i)) {
      return "payload differs";
    }
  }
  return "";
}

template <typename Message>
StreamMessage::Part PartOf(const Message& message) {
  if (message.has_header()) return StreamMessage::Part::kHeader;
  if (message.has_chunk()) return StreamMessage::Part::kChunk;
  if constexpr (kHasReport<Message>) {
    if (message.has_report()) return StreamMessage::Part::kReport;
  }
  return StreamMessage::Part::kNone;
}

// The same of a stream message.
template <typename Message>
std::string CompareStream(const std::string& bytes, std::span<const std::string_view> pieces) {
  Message theirs;
  const bool accepted = theirs.ParseFromString(bytes);
  const absl::StatusOr<StreamMessage> ours = ParseStream(pieces, !kHasReport<Message>);
  if (!ours.ok()) {
    if (!accepted || IsLimit(ours.status())) return "";
    return "only ours refuses: " + ours.status().ToString();
  }
  std::remove_cvref_t<decltype(theirs.header())> header;
  bool parsed = ParseInto(ours->header, "header", &header).ok();
  v1::ExecutionReport report;
  parsed = parsed && ParseInto(ours->report, "report", &report).ok();
  if (parsed && !accepted) {
    // The documented exception: a replaced part was malformed inside.
    return SomePartFailsAlone<Message>(bytes) ? "" : "only ours accepts";
  }
  if (parsed != accepted) return "only ours refuses the header";
  if (!accepted) return "";
  if (ours->part != PartOf(theirs)) return "part differs";
  if (header.SerializeAsString() != theirs.header().SerializeAsString()) return "header differs";
  if constexpr (kHasReport<Message>) {
    if (report.SerializeAsString() != theirs.report().SerializeAsString()) return "report differs";
  }
  if (ours->chunk.payload_index != theirs.chunk().payload_index() ||
      ours->chunk.offset != theirs.chunk().offset() ||
      ours->chunk.data.size != theirs.chunk().data().size() ||
      ours->chunk.data.ToString() != theirs.chunk().data()) {
    return "chunk differs";
  }
  return "";
}

}  // namespace attn::wire

#endif  // ATTN_TESTS_UNIT_WIRE_GRPC_DIFFERENTIAL_H_
