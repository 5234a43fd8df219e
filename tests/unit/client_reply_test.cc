// Replies that break the contract are INTERNAL errors, never results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/lib/client.h"
#include "tests/unit/client_fake_attention.h"
#include "tests/unit/client_fake_server.h"

namespace attn::client {
namespace {

using ::testing::HasSubstr;

class ClientReplyTest : public ::testing::Test {
 protected:
  ClientReplyTest() : call_(MakeForward(20'000)), good_(Expected(call_)) {  // out: 2.56 MB
    ChannelOptions options;
    options.target = server_.target();
    auto client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  absl::Status Unary(const std::string& reply) {
    return Call("Forward", {reply}, /*streaming=*/false);
  }
  absl::Status Stream(const std::vector<std::string>& replies) {
    return Call("ForwardStream", replies, /*streaming=*/true);
  }
  void ExpectBoth(const FakeResult& reply, const std::string& message) {
    ExpectBroken(Unary(UnaryReply(reply)), message);
    ExpectBroken(Stream(StreamReply(reply)), message);
  }
  static void ExpectBroken(const absl::Status& status, const std::string& message) {
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  ForwardCall call_;
  FakeResult good_;

 private:
  absl::Status Call(const std::string& method, const std::vector<std::string>& replies,
                    bool streaming) {
    server_.Set(method, {[replies](const auto&, int) {
                  return FakeAnswer{replies, grpc::Status::OK, {}};
                }});
    CallOptions options;
    options.streaming = streaming;
    return client_->Forward(call_, options).status();
  }

  FakeServer server_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientReplyTest, GoodRepliesAreAccepted) {
  EXPECT_TRUE(Unary(UnaryReply(good_)).ok());
  EXPECT_TRUE(Stream(StreamReply(good_)).ok());
}

TEST_F(ClientReplyTest, ShortPayloads) {
  FakeResult reply = good_;
  reply.lse.clear();
  ExpectBoth(reply, "payload 1 ended after 0 of 160000 bytes");
  reply = good_;
  reply.out.pop_back();
  ExpectBoth(reply, "payload 0 ended after 2559999 of 2560000 bytes");
  reply.out.clear();
  reply.lse.clear();
  ExpectBoth(reply, "payload 0 ended after 0 of 2560000 bytes");
}

TEST_F(ClientReplyTest, LongAndSurplusPayloads) {
  FakeResult reply = good_;
  reply.lse += "x";
  ExpectBoth(reply, "payload 1 is over its 160000 bytes");
  v1::ForwardResponse message;
  ASSERT_TRUE(message.ParseFromString(UnaryReply(good_)));
  message.add_payload("more");
  ExpectBroken(Unary(message.SerializeAsString()), "payload 2 belongs to no tensor");
}

TEST_F(ClientReplyTest, HeaderMustDescribeWhatWasAskedFor) {
  FakeResult reply = good_;
  reply.header.mutable_out()->set_dtype(v1::DTYPE_FP16);
  ExpectBoth(reply, "out is FP16 [1, 20000, 2, 32], expected BF16 [1, 20000, 2, 32]");
  reply = good_;
  reply.header.mutable_lse()->set_shape(2, 19'999);
  ExpectBoth(reply, "lse is FP32 [1, 2, 19999], expected FP32 [1, 2, 20000]");
  reply = good_;
  reply.header.clear_lse();
  ExpectBoth(reply, "lse is missing");
  reply = good_;
  reply.header.mutable_out()->clear_source();
  ExpectBoth(reply, "out has no payload");
  reply = good_;
  reply.header.mutable_out()->set_payload(4'000'000'000u);
  ExpectBoth(reply, "out.payload 4000000000 is over the limit");
  reply = good_;
  reply.header.mutable_out()->set_offset_bytes(~uint64_t{0});
  ExpectBoth(reply, "out.offset_bytes 18446744073709551615 is over");
  reply = good_;
  reply.header.mutable_lse()->set_payload(0);
  ExpectBoth(reply, "lse and out share bytes of payload 0");
  reply = good_;
  for (const int64_t stride : {1'280'000, 64, 32, 2})
    reply.header.mutable_out()->add_strides(stride);
  ExpectBoth(reply, "out is not contiguous");
}

TEST_F(ClientReplyTest, TensorsMayShareAPayloadSideBySide) {
  FakeResult reply = good_;
  reply.header.mutable_out()->set_payload(0);
  reply.header.mutable_out()->set_offset_bytes(good_.lse.size());
  reply.header.mutable_lse()->set_payload(0);
  v1::ForwardResponse message;
  *message.mutable_header() = reply.header;
  message.add_payload(good_.lse + good_.out);
  *message.mutable_report() = reply.report;
  EXPECT_TRUE(Unary(message.SerializeAsString()).ok());
}

TEST_F(ClientReplyTest, ReportAndHeaderAreRequired) {
  v1::ForwardResponse message;
  ASSERT_TRUE(message.ParseFromString(UnaryReply(good_)));
  message.clear_report();
  ExpectBroken(Unary(message.SerializeAsString()), "the report is missing");
  ExpectBroken(Unary(""), "out is missing");
  std::vector<std::string> stream = StreamReply(good_);
  stream.pop_back();
  ExpectBroken(Stream(stream), "the report is missing");
  ExpectBroken(Stream({}), "the header is missing");
}

TEST_F(ClientReplyTest, StreamOrder) {
  const std::vector<std::string> good = StreamReply(good_);
  std::vector<std::string> stream = good;
  std::swap(stream[0], stream[1]);
  ExpectBroken(Stream(stream), "the first message is not the header");
  stream = good;
  stream.insert(stream.begin(), stream[0]);
  ExpectBroken(Stream(stream), "a second header");
  stream = good;
  stream.push_back(StreamChunk(1, 0, "x"));
  ExpectBroken(Stream(stream), "a message after the report");
}

TEST_F(ClientReplyTest, GapsAndOverlaps) {
  const std::vector<std::string> good = StreamReply(good_);
  std::vector<std::string> stream = good;
  stream.erase(stream.begin() + 2);
  ExpectBroken(Stream(stream), "gap in payload 0: chunk at byte 2097152, expected byte 1048576");
  stream = good;
  stream.insert(stream.begin() + 2, stream[1]);
  ExpectBroken(Stream(stream), "overlap in payload 0: chunk at byte 0, expected byte 1048576");
  stream = good;
  stream.insert(stream.begin() + 1, StreamChunk(7, 0, "x"));
  ExpectBroken(Stream(stream), "payload 7 belongs to no tensor");
}

TEST_F(ClientReplyTest, ChunksOfPayloadsMayInterleave) {
  std::vector<std::string> stream = StreamReply(good_);
  ASSERT_EQ(stream.size(), 6);  // header, three chunks of out, one of lse, report
  std::swap(stream[2], stream[4]);
  std::swap(stream[3], stream[4]);
  EXPECT_TRUE(Stream(stream).ok());
}

TEST_F(ClientReplyTest, MalformedBytes) {
  ExpectBroken(Unary("\x0a\x7f"), "malformed message at byte 1");
  ExpectBroken(Stream({"\x12\x7f"}), "malformed message at byte 1");
  ExpectBroken(Stream({"\x0a\x02\x0a\x05"}), "malformed message at byte 3");
}

TEST_F(ClientReplyTest, RequestsThatCannotHaveAReply) {
  call_.header.mutable_shape()->set_layout(v1::LAYOUT_THD);  // with tensors of rank 4
  ExpectBroken(Unary(UnaryReply(good_)), "rank 4");
}

}  // namespace
}  // namespace attn::client
