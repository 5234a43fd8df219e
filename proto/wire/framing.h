// Message framing of attention.v1 without protobuf: finds the header and the payload bytes of a
// message in the pieces it arrived in, copying nothing, and makes the few bytes that stand before
// each field on the way out.
//
// Unary messages (ForwardRequest, BackwardRequest and their responses): header = 1, payload = 2
// (repeated), report = 3. Stream messages: oneof part { header = 1, chunk = 2, report = 3 }. Any
// valid protobuf encoding gives what protobuf's own parser would give: fields in any order,
// singular message fields repeated (merged, which for serialized bytes is concatenation), unknown
// fields and fields of another wire type skipped, non-minimal varints. Source: Protocol Buffers
// encoding specification.
#ifndef ATTN_PROTO_WIRE_FRAMING_H_
#define ATTN_PROTO_WIRE_FRAMING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace attn::wire {

inline constexpr uint64_t kMaxHeaderBytes = 64 * 1024;
inline constexpr uint64_t kMaxChunkBytes = 1024 * 1024;
inline constexpr size_t kMaxPayloads = 32;

// A unary message over this cannot be sent: gRPC counts a message in 31 bits and a typed peer could
// not parse it. Check sizes against it before making a message.
inline constexpr uint64_t kMaxUnaryMessageBytes = INT32_MAX - 16;

// Bytes of one field, in the pieces they arrived in. Views into the message; valid as long as it
// is.
struct Bytes {
  std::vector<std::string_view> pieces;  // none empty
  uint64_t size = 0;

  // Writes bytes [offset, offset + count) to `destination`. The range must lie within size. Large
  // ranges are copied by several threads.
  void CopyTo(uint64_t offset, uint64_t count, std::byte* destination) const;
  std::string ToString() const;
};

// Copies ranges of Bytes in any order: each finds its first piece by bisection. Views the bytes,
// which must stay. Thread-safe.
class BytesReader {
 public:
  explicit BytesReader(const Bytes& bytes);
  // As Bytes::CopyTo(), by the calling thread alone and through its caches.
  void CopyTo(uint64_t offset, uint64_t count, std::byte* destination) const;

 private:
  std::span<const std::string_view> pieces_;
  std::vector<uint64_t> starts_;  // of each piece, in the whole
};

struct UnaryMessage {
  std::string header;  // serialized; parse with the message's header type
  std::string report;  // serialized; responses only
  std::vector<Bytes> payloads;
};

// Requests and responses differ in two things: the limit on the header is for requests, and field
// `report` exists in responses only (in a request it is an unknown field).
//
// What these functions refuse, protobuf's own parser refuses too, but for the limits. What they
// accept, protobuf accepts if the header (and report) given back parse; the one exception is a
// stream message in which a later part replaces an earlier header or report that was malformed
// inside.
//
// Errors: INVALID_ARGUMENT: malformed (says at which byte), header over kMaxHeaderBytes (names
// both), more than kMaxPayloads payloads. Nothing is allocated before its size is checked. Thread-
// safe.
absl::StatusOr<UnaryMessage> ParseUnary(std::span<const std::string_view> pieces,
                                        bool is_request = true);

struct ChunkView {
  uint32_t payload_index = 0;
  uint64_t offset = 0;
  Bytes data;
};

struct StreamMessage {
  enum class Part { kNone, kHeader, kChunk, kReport };
  Part part = Part::kNone;  // kNone: no part set
  std::string header;       // kHeader, serialized
  std::string report;       // kReport, serialized
  ChunkView chunk;          // kChunk
};

// Errors: INVALID_ARGUMENT: malformed; header over kMaxHeaderBytes; chunk data over kMaxChunkBytes.
absl::StatusOr<StreamMessage> ParseStream(std::span<const std::string_view> pieces,
                                          bool is_request = true);

// The bytes that stand before the contents of a length-delimited field.
std::string FieldPrefix(uint32_t field_number, uint64_t size);

// The bytes that stand before the `size` data bytes of a stream message that carries one chunk; the
// message is this prefix followed by the data.
std::string ChunkPrefix(uint32_t payload_index, uint64_t offset, uint64_t size);

}  // namespace attn::wire

#endif  // ATTN_PROTO_WIRE_FRAMING_H_
