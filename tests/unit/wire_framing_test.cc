// The framing parser and the prefixes, on bytes written out by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "proto/wire/framing.h"

namespace attn::wire {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string_view> EachByte(const std::string& bytes) {
  std::vector<std::string_view> pieces;
  for (size_t i = 0; i < bytes.size(); ++i) pieces.push_back(std::string_view(bytes).substr(i, 1));
  return pieces;
}

// Results view the message, so it is kept.
const std::string& Keep(const std::string& bytes) {
  static std::deque<std::string> kept;
  return kept.emplace_back(bytes);
}

absl::StatusOr<UnaryMessage> Unary(const std::string& bytes, bool is_request = true) {
  return ParseUnary(EachByte(Keep(bytes)), is_request);
}

absl::StatusOr<StreamMessage> Stream(const std::string& bytes, bool is_request = true) {
  return ParseStream(EachByte(Keep(bytes)), is_request);
}

template <typename T>
std::string Error(const absl::StatusOr<T>& result) {
  if (result.ok()) return "OK";
  EXPECT_TRUE(absl::IsInvalidArgument(result.status()));
  return std::string(result.status().message());
}

std::string Field(uint32_t number, const std::string& bytes) {
  return FieldPrefix(number, bytes.size()) + bytes;
}

const std::string kHeader = "\x38\x02";  // report_level = FULL

TEST(FramingTest, EmptyMessage) {
  const auto message = ParseUnary({});
  ASSERT_TRUE(message.ok());
  EXPECT_THAT(message->header, IsEmpty());
  EXPECT_THAT(message->payloads, IsEmpty());
  EXPECT_EQ(ParseStream({})->part, StreamMessage::Part::kNone);
}

TEST(FramingTest, PayloadsComeInOrderWhereverTheHeaderStands) {
  const auto message = Unary(Field(2, "abc") + Field(1, kHeader) + Field(2, "") + Field(2, "de"));
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->header, kHeader);
  ASSERT_EQ(message->payloads.size(), 3);
  EXPECT_EQ(message->payloads[0].ToString(), "abc");
  EXPECT_EQ(message->payloads[1].size, 0);
  EXPECT_THAT(message->payloads[1].pieces, IsEmpty());
  EXPECT_EQ(message->payloads[2].ToString(), "de");
}

TEST(FramingTest, PayloadIsViewedNotCopied) {
  const std::string bytes = Field(2, std::string(1000, 'x'));
  const std::string_view whole = bytes;
  const std::vector<std::string_view> pieces = {whole.substr(0, 2), whole.substr(2, 500),
                                                std::string_view(), whole.substr(502)};
  const auto message = ParseUnary(pieces);
  ASSERT_TRUE(message.ok()) << message.status();
  const Bytes& payload = message->payloads[0];
  ASSERT_EQ(payload.pieces.size(), 2);
  EXPECT_EQ(payload.pieces[0].data(), bytes.data() + 3);
  EXPECT_EQ(payload.pieces[1].data(), bytes.data() + 502);
  EXPECT_EQ(payload.size, 1000);
}

TEST(FramingTest, LargeRangesAreCopiedWhole) {
  // Over the size from which several threads copy; pieces that no share is a multiple of.
  constexpr size_t kPiece = 65521, kPieces = 600;
  std::string all(kPiece * kPieces, '\0');
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<char>(i * 2654435761u >> 13);
  Bytes bytes;
  for (size_t i = 0; i < kPieces; ++i) {
    bytes.pieces.push_back(std::string_view(all).substr(i * kPiece, kPiece));
  }
  bytes.size = all.size();
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{kPiece * 2 + 3}}) {
    const uint64_t count = all.size() - 2 * offset;
    std::string out(count + 1, '!');
    bytes.CopyTo(offset, count, reinterpret_cast<std::byte*>(out.data()));
    EXPECT_TRUE(std::string_view(out).substr(0, count) ==
                std::string_view(all).substr(offset, count));
    EXPECT_EQ(out.back(), '!');
  }
}

// Over the size from which the destination is written past the caches, which needs it aligned.
TEST(FramingTest, CopyToWritesLargeRangesAtAnyAlignment) {
  constexpr size_t kPiece = 16375, kPieces = 300;
  std::string all(4 + kPiece * kPieces, '\0');
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<char>(i * 2654435761u >> 13);
  Bytes bytes;
  bytes.pieces = {std::string_view(all).substr(0, 3), std::string_view(all).substr(3, 1)};
  for (size_t i = 0; i < kPieces; ++i) {
    bytes.pieces.push_back(std::string_view(all).substr(4 + i * kPiece, kPiece));
  }
  bytes.size = all.size();
  for (const size_t misaligned : {0, 1, 15, 16, 63}) {
    std::string out(all.size() + 128, '!');
    const size_t base = 64 - reinterpret_cast<uintptr_t>(out.data()) % 64 + misaligned;
    const uint64_t offset = misaligned % 7;
    bytes.CopyTo(offset, all.size() - offset, reinterpret_cast<std::byte*>(out.data() + base));
    EXPECT_TRUE(std::string_view(out).substr(base, all.size() - offset) ==
                std::string_view(all).substr(offset));
    EXPECT_EQ(out[base - 1], '!');
    EXPECT_EQ(out[base + all.size() - offset], '!');
  }
}

TEST(FramingTest, ReaderCopiesAnyRange) {
  Bytes bytes;
  bytes.pieces = {"ab", "c", "defg"};
  bytes.size = 7;
  const BytesReader reader(bytes);
  for (uint64_t offset = 0; offset <= 7; ++offset) {
    for (uint64_t count = 0; offset + count <= 7; ++count) {
      std::string out(count + 1, '#');
      reader.CopyTo(offset, count, reinterpret_cast<std::byte*>(out.data()));
      EXPECT_EQ(out, std::string("abcdefg").substr(offset, count) + "#");
    }
  }
  std::byte untouched{7};
  BytesReader(Bytes()).CopyTo(0, 0, &untouched);
  EXPECT_EQ(untouched, std::byte{7});
}

TEST(FramingTest, CopyToTakesARangeAcrossPieces) {
  Bytes bytes;
  bytes.pieces = {"ab", "c", "defg"};
  bytes.size = 7;
  for (uint64_t offset = 0; offset <= 7; ++offset) {
    for (uint64_t count = 0; offset + count <= 7; ++count) {
      std::string out(count + 1, '#');  // one guard byte
      bytes.CopyTo(offset, count, reinterpret_cast<std::byte*>(out.data()));
      EXPECT_EQ(out, std::string("abcdefg").substr(offset, count) + "#");
    }
  }
}

TEST(FramingTest, ReportIsAFieldOfResponsesOnly) {
  const std::string bytes = Field(1, kHeader) + Field(3, "\x08\x01") + Field(3, "\x10\x01");
  EXPECT_EQ(Unary(bytes, /*is_request=*/false)->report, "\x08\x01\x10\x01");
  EXPECT_EQ(Unary(bytes, /*is_request=*/true)->report, "");
}

TEST(FramingTest, RepeatedHeaderIsMerged) {
  EXPECT_EQ(Unary(Field(1, kHeader) + Field(2, "p") + Field(1, "\x38\x01"))->header,
            kHeader + "\x38\x01");
}

TEST(FramingTest, HeaderPartsMayNotCompleteEachOther) {
  EXPECT_THAT(Error(Unary(Field(1, "\x38") + Field(1, "\x02"))), HasSubstr("varint is cut off"));
}

TEST(FramingTest, LimitsNameValueAndLimit) {
  const std::string large(kMaxHeaderBytes - 4, 'x');
  const std::string header = Field(15, large);  // an unknown field; 4 bytes before it
  ASSERT_EQ(header.size(), kMaxHeaderBytes);
  EXPECT_TRUE(Unary(Field(1, header)).ok());
  EXPECT_EQ(Error(Unary(Field(1, header) + Field(1, kHeader))),
            "header of 65538 bytes is over the limit of 65536 bytes");
  EXPECT_TRUE(Unary(Field(1, header) + Field(1, kHeader), /*is_request=*/false).ok());
  EXPECT_EQ(Error(Stream(Field(1, header) + Field(1, kHeader))),
            "header of 65538 bytes is over the limit of 65536 bytes");

  std::string payloads;
  for (size_t i = 0; i < kMaxPayloads; ++i) payloads += Field(2, "");
  EXPECT_TRUE(Unary(payloads).ok());
  EXPECT_EQ(Error(Unary(payloads + Field(2, ""))), "more than 32 payloads");

  const std::string data(kMaxChunkBytes, 'd');
  const std::vector<std::string> whole = {ChunkPrefix(1, 2, data.size()) + data,
                                          ChunkPrefix(1, 2, data.size() + 1) + data + "d"};
  const std::vector<std::string_view> fits = {whole[0]}, over = {whole[1]};
  EXPECT_EQ(ParseStream(fits)->chunk.data.size, kMaxChunkBytes);
  EXPECT_EQ(Error(ParseStream(over)),
            "chunk.data of 1048577 bytes is over the limit of 1048576 bytes");
}

TEST(FramingTest, MalformedMessagesSayWhere) {
  EXPECT_EQ(Error(Unary(Field(2, "a") + "\x0a")), "malformed message at byte 4: length is cut off");
  EXPECT_EQ(Error(Unary("\x0a\x05"
                        "ab")),
            "malformed message at byte 1: length 5 is over the 2 bytes that remain of the message");
  EXPECT_EQ(Error(Unary(Field(1, "\x38"))), "malformed message at byte 3: varint is cut off");
  EXPECT_EQ(Error(Unary(std::string("\x00", 1))), "malformed message at byte 0: field number 0");
  EXPECT_EQ(Error(Unary(std::string("\x02\x00", 2))),
            "malformed message at byte 0: field number 0");
  EXPECT_EQ(Error(Unary("\x7e")), "malformed message at byte 0: wire type 6");
  EXPECT_EQ(Error(Unary("\x7f")), "malformed message at byte 0: wire type 7");
  EXPECT_EQ(Error(Unary("\x7c")), "malformed message at byte 0: end of a group that was not begun");
  EXPECT_EQ(Error(Unary("\x7b\x74")), "malformed message at byte 1: group 15 ended as group 14");
  EXPECT_EQ(Error(Unary("\x7b")), "malformed message at byte 1: tag is cut off");
  EXPECT_EQ(Error(Unary("\x8a\x80\x80\x80\x80\x01")),
            "malformed message at byte 0: tag of over 5 bytes");
  EXPECT_EQ(Error(Unary(std::string("\x78").append(10, '\xff') + "\x01")),
            "malformed message at byte 1: varint of over 10 bytes");
  EXPECT_EQ(Error(Unary("\x79"
                        "1234567")),
            "malformed message at byte 1: field of 8 bytes is over the 7 bytes that remain of the "
            "message");
}

TEST(FramingTest, LengthOverTwoGibIsRefusedWhateverRemains) {
  EXPECT_THAT(Error(Unary("\x12\xff\xff\xff\xff\x0f")), HasSubstr("is over the limit of"));
}

TEST(FramingTest, LastPartOfAStreamMessageWins) {
  const std::string chunk = ChunkPrefix(3, 77, 2) + "zz";
  auto message = Stream(Field(1, kHeader) + chunk);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->part, StreamMessage::Part::kChunk);
  EXPECT_EQ(message->header, "");
  EXPECT_EQ(message->chunk.payload_index, 3);
  EXPECT_EQ(message->chunk.offset, 77);
  EXPECT_EQ(message->chunk.data.ToString(), "zz");

  message = Stream(Field(1, "\x38\x01") + chunk + Field(1, kHeader));
  EXPECT_EQ(message->part, StreamMessage::Part::kHeader);
  EXPECT_EQ(message->header, kHeader);
  EXPECT_EQ(message->chunk.data.size, 0);
}

TEST(FramingTest, RepeatedChunkIsMergedFieldByField) {
  const auto message =
      Stream(ChunkPrefix(3, 77, 2) + "zz" + ChunkPrefix(4, 0, 0) + ChunkPrefix(0, 0, 1) + "y");
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->chunk.payload_index, 4);
  EXPECT_EQ(message->chunk.offset, 77);
  EXPECT_EQ(message->chunk.data.ToString(), "y");
}

TEST(FramingTest, PrefixesAreMinimal) {
  EXPECT_EQ(FieldPrefix(2, 0), std::string("\x12\x00", 2));
  EXPECT_EQ(FieldPrefix(2, 300), "\x12\xac\x02");
  EXPECT_EQ(ChunkPrefix(0, 0, 0), std::string("\x12\x00", 2));
  EXPECT_EQ(ChunkPrefix(1, 128, 5), "\x12\x0c\x08\x01\x10\x80\x01\x1a\x05");
}

}  // namespace
}  // namespace attn::wire
