// The framing parser gives what protobuf's own parser gives, on any encoding.
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include "tests/unit/wire_grpc_differential.h"
#include "tests/unit/wire_grpc_random_encoding.h"

namespace attn::wire {
namespace {

constexpr int kRounds = 20'000;

class WireEquivalenceTest : public ::testing::Test {
 private:
  google::protobuf::LogSilencer quiet_;  // protobuf logs every string that is not UTF-8
};

std::string Hex(const std::string& bytes) {
  std::string out;
  for (const unsigned char byte : bytes) {
    char two[4];
    std::snprintf(two, sizeof(two), "%02x ", byte);
    out += two;
  }
  return out;
}

template <typename Message>
void ExpectSameUnary(RandomEncoding& random, const std::string& bytes) {
  const auto pieces = CutIntoPieces(bytes, [&](size_t n) { return random.Number(n); });
  ASSERT_EQ(CompareUnary<Message>(bytes, pieces), "") << Hex(bytes);
}

template <typename Message>
void ExpectSameStream(RandomEncoding& random, const std::string& bytes) {
  const auto pieces = CutIntoPieces(bytes, [&](size_t n) { return random.Number(n); });
  ASSERT_EQ(CompareStream<Message>(bytes, pieces), "") << Hex(bytes);
}

TEST_F(WireEquivalenceTest, ValidUnaryEncodingsGiveWhatProtobufGives) {
  RandomEncoding random(1);
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = random.Unary();
    // The generator must make valid encodings, or the comparison shows little.
    ASSERT_TRUE(v1::ForwardRequest().ParseFromString(bytes)) << Hex(bytes);
    ExpectSameUnary<v1::ForwardRequest>(random, bytes);
    ExpectSameUnary<v1::BackwardRequest>(random, bytes);
    ExpectSameUnary<v1::ForwardResponse>(random, bytes);
    if (HasFatalFailure()) return;
  }
}

TEST_F(WireEquivalenceTest, ValidStreamEncodingsGiveWhatProtobufGives) {
  RandomEncoding random(2);
  int parts[4] = {};
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = random.Stream();
    v1::ForwardStreamResponse message;
    ASSERT_TRUE(message.ParseFromString(bytes)) << Hex(bytes);
    ++parts[static_cast<int>(PartOf(message))];
    ExpectSameStream<v1::ForwardStreamRequest>(random, bytes);
    ExpectSameStream<v1::BackwardStreamRequest>(random, bytes);
    ExpectSameStream<v1::ForwardStreamResponse>(random, bytes);
    if (HasFatalFailure()) return;
  }
  for (const int count : parts) EXPECT_GT(count, kRounds / 50);
}

TEST_F(WireEquivalenceTest, DamagedUnaryEncodingsAreRefusedWhereProtobufRefuses) {
  RandomEncoding random(3);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = random.Damage(random.Unary());
    refused += v1::ForwardRequest().ParseFromString(bytes) ? 0 : 1;
    ExpectSameUnary<v1::ForwardRequest>(random, bytes);
    ExpectSameUnary<v1::ForwardResponse>(random, bytes);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(refused, kRounds / 10);
  EXPECT_LT(refused, kRounds * 9 / 10);
}

TEST_F(WireEquivalenceTest, DamagedStreamEncodingsAreRefusedWhereProtobufRefuses) {
  RandomEncoding random(4);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = random.Damage(random.Stream());
    refused += v1::ForwardStreamRequest().ParseFromString(bytes) ? 0 : 1;
    ExpectSameStream<v1::ForwardStreamRequest>(random, bytes);
    ExpectSameStream<v1::ForwardStreamResponse>(random, bytes);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(refused, kRounds / 10);
  EXPECT_LT(refused, kRounds * 9 / 10);
}

TEST_F(WireEquivalenceTest, RandomBytes) {
  RandomEncoding random(5);
  for (int round = 0; round < kRounds; ++round) {
    // Small values are tags, lengths and values at once.
    std::string bytes(random.Number(24), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random.Number(random.OneIn(3) ? 255 : 30));
    ExpectSameUnary<v1::ForwardRequest>(random, bytes);
    ExpectSameUnary<v1::ForwardResponse>(random, bytes);
    ExpectSameStream<v1::ForwardStreamRequest>(random, bytes);
    ExpectSameStream<v1::ForwardStreamResponse>(random, bytes);
    if (HasFatalFailure()) return;
  }
}

TEST_F(WireEquivalenceTest, GroupsNestAsDeepAsInProtobuf) {
  RandomEncoding random(6);
  for (const int depth : {1, 98, 99, 100, 101, 102}) {
    std::string groups;
    for (int i = 0; i < depth; ++i) groups += "\x7b";  // field 15 begins
    for (int i = 0; i < depth; ++i) groups += "\x7c";
    EXPECT_EQ(v1::ForwardRequest().ParseFromString(groups), depth <= 100) << depth;
    for (const std::string& bytes :
         {groups, random.Len(1, groups), random.Len(2, groups), random.Len(3, groups)}) {
      ExpectSameUnary<v1::ForwardRequest>(random, bytes);
      ExpectSameUnary<v1::ForwardResponse>(random, bytes);
      ExpectSameStream<v1::ForwardStreamRequest>(random, bytes);
      ExpectSameStream<v1::ForwardStreamResponse>(random, bytes);
    }
  }
}

}  // namespace
}  // namespace attn::wire
