// Messages made on grpc::ByteBuffer are what a typed client or server would parse.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "attention/v1/attention.pb.h"
#include "proto/wire/byte_buffer.h"

namespace attn::wire {
namespace {

namespace v1 = ::attention::v1;

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

std::string Flat(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

TEST(ByteBufferTest, UnaryIsWhatProtobufParses) {
  v1::ForwardResponseHeader header;
  header.mutable_out()->set_payload(1);
  v1::ExecutionReport report;
  report.set_path("flash_cpu");
  const std::string a(100'000, 'a'), b, c = "c";
  const std::vector<OutgoingPayload> payloads = {
      {AsBytes(a), nullptr}, {AsBytes(b), nullptr}, {AsBytes(c), nullptr}};
  v1::ForwardResponse message;
  ASSERT_TRUE(message.ParseFromString(Flat(MakeUnary(header, payloads, &report))));
  EXPECT_EQ(message.header().out().payload(), 1);
  ASSERT_EQ(message.payload_size(), 3);
  EXPECT_EQ(message.payload(0), a);
  EXPECT_EQ(message.payload(1), b);
  EXPECT_EQ(message.payload(2), c);
  EXPECT_EQ(message.report().path(), "flash_cpu");

  ASSERT_TRUE(message.ParseFromString(Flat(MakeUnary(header, {}, nullptr))));
  EXPECT_FALSE(message.has_report());
  EXPECT_TRUE(message.has_header());
}

TEST(ByteBufferTest, SmallPayloadsAreCopiedAndLargeOnesShared) {
  v1::ForwardResponse message;
  message.mutable_header()->mutable_out()->set_payload(1);
  const std::string small(kCopiedPayloadBytes, 's');
  const auto large = std::make_shared<std::string>(kCopiedPayloadBytes + 1, 'l');
  const std::weak_ptr<std::string> watch = large;
  // Every arrangement of four payloads, so that runs of copies stand first, between and last.
  for (int large_ones = 0; large_ones < 16; ++large_ones) {
    for (const bool with_report : {false, true}) {
      std::vector<OutgoingPayload> payloads;
      message.clear_payload();
      message.clear_report();
      if (with_report) message.mutable_report()->set_path("flash_cpu");
      int shared = 0;
      for (int i = 0; i < 4; ++i) {
        const bool is_large = (large_ones >> i & 1) != 0;
        shared += is_large ? 1 : 0;
        payloads.push_back(is_large ? OutgoingPayload{AsBytes(*large), large}
                                    : OutgoingPayload{AsBytes(small), nullptr});
        message.add_payload(is_large ? *large : small);
      }
      const grpc::ByteBuffer buffer =
          MakeUnary(message.header(), payloads, with_report ? &message.report() : nullptr);
      EXPECT_EQ(Flat(buffer), message.SerializeAsString());
      payloads.clear();
      EXPECT_EQ(watch.use_count(), 1 + shared);
    }
  }
}

TEST(ByteBufferTest, StreamMessagesAreWhatProtobufSerializes) {
  v1::ForwardStreamResponse message;
  message.mutable_header()->mutable_out()->set_payload(4);
  EXPECT_EQ(Flat(MakeStreamHeader(message.header())), message.SerializeAsString());
  message.mutable_report()->set_flops(99);
  EXPECT_EQ(Flat(MakeStreamReport(message.report())), message.SerializeAsString());
  for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{1} << 20}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40}) {
      for (const uint32_t index : {0u, 3u}) {
        const std::string data(size, 'd');
        message.mutable_chunk()->set_payload_index(index);
        message.mutable_chunk()->set_offset(offset);
        message.mutable_chunk()->set_data(data);
        EXPECT_EQ(Flat(MakeStreamChunk(index, offset, {AsBytes(data), nullptr})),
                  message.SerializeAsString());
      }
    }
  }
}

TEST(ByteBufferTest, SlicesShareTheTensorsMemoryAndHoldItsOwner) {
  auto tensor = std::make_shared<std::string>(5000, 't');
  const std::weak_ptr<std::string> alive = tensor;
  {
    const grpc::Slice slice = ToSlice({AsBytes(*tensor), tensor});
    EXPECT_EQ(static_cast<const void*>(slice.begin()), tensor->data());
    EXPECT_EQ(slice.size(), 5000);
    tensor.reset();
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(alive.expired());
}

TEST(ByteBufferTest, ReceivedPiecesSurviveAMove) {
  // Short slices hold their bytes within themselves, so a view of one must not move with it.
  const grpc::Slice slices[] = {grpc::Slice("ab"), grpc::Slice(std::string(1000, 'c')),
                                grpc::Slice("d")};
  auto pieces = ReceivedPieces::Create(grpc::ByteBuffer(slices, 3));
  ASSERT_TRUE(pieces.ok());
  const ReceivedPieces moved = *std::move(pieces);
  std::string all;
  for (const std::string_view piece : moved.pieces()) all += piece;
  EXPECT_EQ(all, "ab" + std::string(1000, 'c') + "d");
  EXPECT_EQ(moved.size(), 1003);
}

TEST(ByteBufferTest, ABufferWithoutAMessageIsAnError) {
  EXPECT_TRUE(absl::IsInternal(ReceivedPieces::Create(grpc::ByteBuffer()).status()));
}

TEST(ByteBufferTest, StatusesKeepCodeAndMessage) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    EXPECT_EQ(static_cast<int>(ToGrpc(status).error_code()), code);
    EXPECT_EQ(ToAbsl(ToGrpc(status)), status);
  }
  EXPECT_TRUE(absl::IsUnknown(ToAbsl(grpc::Status(grpc::StatusCode::DO_NOT_USE, "odd"))));
}

TEST(ByteBufferTest, ParseIntoNamesWhatIsWrong) {
  v1::ForwardRequestHeader header;
  EXPECT_EQ(ParseInto("\x38", "header", &header).message(),
            "header is not a valid attention.v1.ForwardRequestHeader");
  EXPECT_TRUE(ParseInto("\x38\x02", "header", &header).ok());
  EXPECT_EQ(header.report_level(), v1::REPORT_LEVEL_FULL);
}

}  // namespace
}  // namespace attn::wire
