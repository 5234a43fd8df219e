#include "proto/wire/framing.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attn::wire {
namespace {

// Field numbers, shared by every unary and stream message of attention.v1.
constexpr uint32_t kHeaderField = 1;
constexpr uint32_t kPayloadField = 2;  // unary; in stream messages the same number is the chunk
constexpr uint32_t kChunkField = 2;
constexpr uint32_t kReportField = 3;
constexpr uint32_t kIndexField = 1;   // PayloadChunk.payload_index
constexpr uint32_t kOffsetField = 2;  // PayloadChunk.offset
constexpr uint32_t kDataField = 3;    // PayloadChunk.data

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLen = 2,
  kGroupStart = 3,
  kGroupEnd = 4,
  kFixed32 = 5,
};

constexpr uint32_t Tag(uint32_t field, uint32_t type) { return field << 3 | type; }

// What protobuf's parser allows: messages and groups nested 100 deep, the outermost message not
// counted; a tag of at most 5 bytes, a varint of at most 10, a length of at most 5 bytes and under
// 2 GiB less its read-ahead of 16 bytes.
constexpr int kMaxDepth = 100;
constexpr int kMaxTagBytes = 5;
constexpr int kMaxVarintBytes = 10;
constexpr uint64_t kMaxLength = INT32_MAX - 16;

// Reads the encoding across pieces. Every method returns false on malformed input and says why in
// error(); nothing may be read after that.
class Reader {
 public:
  // `base`: where the first byte stands in the whole message, for error texts.
  explicit Reader(std::span<const std::string_view> pieces, uint64_t base = 0)
      : pieces_(pieces), position_(base), limit_(base) {
    for (const std::string_view piece : pieces) limit_ += piece.size();
  }

  bool AtLimit() const { return position_ == limit_; }
  uint64_t remaining() const { return limit_ - position_; }
  uint64_t position() const { return position_; }
  const std::string& error() const { return error_; }

  bool ReadTag(uint32_t* tag) {
    tag_position_ = position_;
    uint64_t value = 0;
    if (!ReadVarintOf(kMaxTagBytes, "tag", &value)) return false;
    *tag =
        static_cast<uint32_t>(value);  // surplus bits of a fifth byte are dropped, as protobuf does
    if (*tag >> 3 == 0) return Fail(tag_position_, "field number 0");
    return true;
  }

  bool ReadVarint(uint64_t* value) { return ReadVarintOf(kMaxVarintBytes, "varint", value); }

  // The length of a length-delimited field, which the rest of the enclosing message must hold.
  bool ReadLength(uint64_t* length) {
    const uint64_t at = position_;
    if (!ReadVarintOf(kMaxTagBytes, "length", length)) return false;
    if (*length > kMaxLength) {
      return Fail(at, absl::StrCat("length ", *length, " is over the limit of ", kMaxLength));
    }
    if (*length > remaining()) {
      return Fail(at, absl::StrCat("length ", *length, " is over the ", remaining(),
                                   " bytes that remain of the message"));
    }
    return true;
  }

  bool Skip(uint64_t count) {
    if (count > remaining()) {
      return Fail(position_, absl::StrCat("field of ", count, " bytes is over the ", remaining(),
                                          " bytes that remain of the message"));
    }
    Advance(count, nullptr);
    return true;
  }

  // The next `count` bytes, at most remaining().
  Bytes Take(uint64_t count) {
    Bytes bytes;
    bytes.size = count;
    Advance(count, &bytes.pieces);
    return bytes;
  }

  // Skips the field whose tag was just read. `depth`: how many more levels of groups may open.
  bool SkipField(uint32_t tag, int depth) {
    switch (tag & 7) {
      case kVarint: {
        uint64_t ignored;
        return ReadVarint(&ignored);
      }
      case kFixed64:
        return Skip(8);
      case kFixed32:
        return Skip(4);
      case kLen: {
        uint64_t length;
        return ReadLength(&length) && Skip(length);
      }
      case kGroupStart:
        return SkipGroup(tag, depth);
      case kGroupEnd:
        return Fail(tag_position_, "end of a group that was not begun");
      default:
        return Fail(tag_position_, absl::StrCat("wire type ", tag & 7));
    }
  }

  // Narrows the limit to the next `length` bytes, at most remaining(); gives the limit to go back
  // to.
  uint64_t PushLimit(uint64_t length) { return std::exchange(limit_, position_ + length); }
  void PopLimit(uint64_t limit) { limit_ = limit; }

  bool Fail(uint64_t position, const std::string& what) {
    error_ = absl::StrCat("malformed message at byte ", position, ": ", what);
    return false;
  }

 private:
  bool ReadByte(uint8_t* byte) {
    if (AtLimit()) return false;
    while (offset_ == pieces_[index_].size()) {
      ++index_;
      offset_ = 0;
    }
    *byte = static_cast<uint8_t>(pieces_[index_][offset_]);
    ++offset_;
    ++position_;
    return true;
  }

  bool ReadVarintOf(int max_bytes, const char* what, uint64_t* value) {
    const uint64_t at = position_;
    *value = 0;
    for (int i = 0; i < max_bytes; ++i) {
      uint8_t byte;
      if (!ReadByte(&byte)) return Fail(at, absl::StrCat(what, " is cut off"));
      *value |= uint64_t{byte & 0x7Fu} << (7 * i);
      if (byte < 0x80) return true;
    }
    return Fail(at, absl::StrCat(what, " of over ", max_bytes, " bytes"));
  }

  void Advance(uint64_t count, std::vector<std::string_view>* out) {
    position_ += count;
    while (count > 0) {
      const std::string_view piece = pieces_[index_];
      const size_t here = std::min<uint64_t>(count, piece.size() - offset_);
      if (here > 0 && out != nullptr) out->push_back(piece.substr(offset_, here));
      offset_ += here;
      count -= here;
      if (count > 0) {
        ++index_;
        offset_ = 0;
      }
    }
  }

  // Groups within groups by a list, not by recursion: the nesting is the sender's to choose.
  bool SkipGroup(uint32_t start_tag, int depth) {
    std::vector<uint32_t> open = {start_tag};
    while (!open.empty()) {
      if (static_cast<int>(open.size()) > depth) {
        return Fail(tag_position_, absl::StrCat("groups nested over ", kMaxDepth, " deep"));
      }
      uint32_t tag;
      if (!ReadTag(&tag)) return false;
      if ((tag & 7) == kGroupStart) {
        open.push_back(tag);
      } else if ((tag & 7) == kGroupEnd) {
        if (tag >> 3 != open.back() >> 3) {
          return Fail(tag_position_,
                      absl::StrCat("group ", open.back() >> 3, " ended as group ", tag >> 3));
        }
        open.pop_back();
      } else if (!SkipField(tag, 0)) {
        return false;
      }
    }
    return true;
  }

  std::span<const std::string_view> pieces_;
  size_t index_ = 0;           // piece that position_ is in
  size_t offset_ = 0;          // within that piece
  uint64_t position_ = 0;      // within the message
  uint64_t tag_position_ = 0;  // of the tag read last
  uint64_t limit_ = 0;         // end of the message being read
  std::string error_;
};

// A serialized message that may come in parts, which protobuf merges: for serialized bytes that is
// concatenation, provided that each part is a whole number of fields by itself.
class MergedField {
 public:
  MergedField(const char* name, uint64_t limit) : name_(name), limit_(limit) {}

  absl::Status Read(Reader& reader) {
    uint64_t length;
    if (!reader.ReadLength(&length)) return absl::InvalidArgumentError(reader.error());
    if (length > limit_ - value_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name_, " of ", value_.size() + length, " bytes is over the limit of ", limit_, " bytes"));
    }
    const uint64_t base = reader.position();
    const Bytes part = reader.Take(length);
    Reader fields(part.pieces, base);
    while (!fields.AtLimit()) {
      uint32_t tag;
      if (!fields.ReadTag(&tag) || !fields.SkipField(tag, kMaxDepth - 1)) {
        return absl::InvalidArgumentError(fields.error());
      }
    }
    value_.reserve(value_.size() + length);
    for (const std::string_view piece : part.pieces) value_.append(piece);
    return absl::OkStatus();
  }

  void Clear() { value_.clear(); }
  std::string Release() { return std::move(value_); }

 private:
  const char* name_;
  uint64_t limit_;
  std::string value_;
};

absl::Status ReadChunk(Reader& reader, ChunkView* chunk) {
  uint64_t length;
  if (!reader.ReadLength(&length)) return absl::InvalidArgumentError(reader.error());
  const uint64_t outer_limit = reader.PushLimit(length);
  while (!reader.AtLimit()) {
    uint32_t tag;
    uint64_t value;
    if (!reader.ReadTag(&tag)) return absl::InvalidArgumentError(reader.error());
    bool ok = true;
    switch (tag) {
      case Tag(kIndexField, kVarint):
        ok = reader.ReadVarint(&value);
        if (ok) chunk->payload_index = static_cast<uint32_t>(value);  // as protobuf reads a uint32
        break;
      case Tag(kOffsetField, kVarint):
        ok = reader.ReadVarint(&value);
        if (ok) chunk->offset = value;
        break;
      case Tag(kDataField, kLen):
        ok = reader.ReadLength(&value);
        if (!ok) break;
        if (value > kMaxChunkBytes) {
          return absl::InvalidArgumentError(absl::StrCat(
              "chunk.data of ", value, " bytes is over the limit of ", kMaxChunkBytes, " bytes"));
        }
        chunk->data = reader.Take(value);
        break;
      default:
        ok = reader.SkipField(tag, kMaxDepth - 1);
    }
    if (!ok) return absl::InvalidArgumentError(reader.error());
  }
  reader.PopLimit(outer_limit);
  return absl::OkStatus();
}

void AppendVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

}  // namespace

absl::StatusOr<UnaryMessage> ParseUnary(std::span<const std::string_view> pieces, bool is_request) {
  Reader reader(pieces);
  UnaryMessage message;
  MergedField header("header", is_request ? kMaxHeaderBytes : kMaxLength);
  MergedField report("report", kMaxLength);
  while (!reader.AtLimit()) {
    uint32_t tag;
    if (!reader.ReadTag(&tag)) return absl::InvalidArgumentError(reader.error());
    if (tag == Tag(kHeaderField, kLen)) {
      if (absl::Status status = header.Read(reader); !status.ok()) return status;
    } else if (tag == Tag(kPayloadField, kLen)) {
      uint64_t length;
      if (!reader.ReadLength(&length)) return absl::InvalidArgumentError(reader.error());
      if (message.payloads.size() == kMaxPayloads) {
        return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxPayloads, " payloads"));
      }
      message.payloads.push_back(reader.Take(length));
    } else if (tag == Tag(kReportField, kLen) && !is_request) {
      if (absl::Status status = report.Read(reader); !status.ok()) return status;
    } else if (!reader.SkipField(tag, kMaxDepth)) {
      return absl::InvalidArgumentError(reader.error());
    }
  }
  message.header = header.Release();
  message.report = report.Release();
  return message;
}

absl::StatusOr<StreamMessage> ParseStream(std::span<const std::string_view> pieces,
                                          bool is_request) {
  using Part = StreamMessage::Part;
  Reader reader(pieces);
  StreamMessage message;
  MergedField header("header", is_request ? kMaxHeaderBytes : kMaxLength);
  MergedField report("report", kMaxLength);
  // A oneof: another part than the one held replaces it, the same part merges with it.
  const auto enter = [&](Part part) {
    if (message.part == part) return;
    message.part = part;
    header.Clear();
    report.Clear();
    message.chunk = ChunkView();
  };
  while (!reader.AtLimit()) {
    uint32_t tag;
    if (!reader.ReadTag(&tag)) return absl::InvalidArgumentError(reader.error());
    absl::Status status;
    if (tag == Tag(kHeaderField, kLen)) {
      enter(Part::kHeader);
      status = header.Read(reader);
    } else if (tag == Tag(kChunkField, kLen)) {
      enter(Part::kChunk);
      status = ReadChunk(reader, &message.chunk);
    } else if (tag == Tag(kReportField, kLen) && !is_request) {
      enter(Part::kReport);
      status = report.Read(reader);
    } else if (!reader.SkipField(tag, kMaxDepth)) {
      status = absl::InvalidArgumentError(reader.error());
    }
    if (!status.ok()) return status;
  }
  message.header = header.Release();
  message.report = report.Release();
  return message;
}

std::string FieldPrefix(uint32_t field_number, uint64_t size) {
  std::string out;
  AppendVarint(Tag(field_number, kLen), &out);
  AppendVarint(size, &out);
  return out;
}

std::string ChunkPrefix(uint32_t payload_index, uint64_t offset, uint64_t size) {
  std::string fields;  // zeros are left out, as protobuf's own serializer does
  if (payload_index != 0) {
    AppendVarint(Tag(kIndexField, kVarint), &fields);
    AppendVarint(payload_index, &fields);
  }
  if (offset != 0) {
    AppendVarint(Tag(kOffsetField, kVarint), &fields);
    AppendVarint(offset, &fields);
  }
  if (size != 0) fields += FieldPrefix(kDataField, size);
  return FieldPrefix(kChunkField, fields.size() + size) + fields;
}

}  // namespace attn::wire
