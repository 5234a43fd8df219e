// Calls of the load tester through the client library, to a server that answers from a script.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/load/target.h"
#include "tests/unit/client_fake_attention.h"
#include "tests/unit/client_fake_server.h"

namespace attn::load {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::vector<MixEntry> OneForward() {
  std::vector<MixEntry> entries(1);
  entries[0].name = "small";
  entries[0].forward = client::MakeForward(5);
  return entries;
}

std::unique_ptr<client::Client> Connect(const client::FakeServer& server) {
  client::ChannelOptions options;
  options.target = server.target();
  options.max_retries = 0;
  auto client = client::Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

TEST(TraceContextTest, IsW3cAndNeverTheSame) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    const TraceContext context = MakeTraceContext();
    EXPECT_THAT(context.trace_id, MatchesRegex("[0-9a-f]{32}"));
    EXPECT_THAT(context.traceparent, MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-01"));
    EXPECT_EQ(context.traceparent.substr(3, 32), context.trace_id);
    ids.insert(context.trace_id);
  }
  EXPECT_EQ(ids.size(), 1000u);
}

TEST(ClientTargetTest, SendsTraceparentAndGivesTheReport) {
  client::FakeServer server;
  client::ServeForward(server);
  const auto client = Connect(server);
  ClientTarget target(client.get(), {});
  std::vector<MixEntry> entries = OneForward();
  ASSERT_TRUE(target.Prepare(&entries, nullptr).ok());
  CallRequest request;
  request.traceparent = MakeTraceContext().traceparent;
  CallReply reply = target.Call(request);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.report.path(), "flash_cpu");
  EXPECT_GT(reply.call_ns, 0);
  EXPECT_TRUE(reply.results.empty());
  EXPECT_EQ(server.LastMetadata("Forward", "traceparent"), request.traceparent);
  request.keep_results = true;
  reply = target.Call(request);
  ASSERT_EQ(reply.results.size(), 2u);
  EXPECT_EQ(reply.results[0].shape, entries[0].forward.inputs.q.shape);
}

TEST(ClientTargetTest, PrepareNamesTheEntryThatIsRefused) {
  client::FakeServer server;
  server.Set(
      "Forward",
      {[](const auto&, int) {
         return client::FakeAnswer{{}, {grpc::StatusCode::INVALID_ARGUMENT, "head_dim is bad"}, {}};
       },
       /*answer_after=*/1});
  const auto client = Connect(server);
  ClientTarget target(client.get(), {});
  std::vector<MixEntry> entries = OneForward();
  const absl::Status status = target.Prepare(&entries, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("entry 'small': head_dim is bad"));
}

TEST(ClientTargetTest, CancelEndsACall) {
  client::FakeServer server;
  client::ServeForward(server);
  const auto client = Connect(server);
  ClientTarget target(client.get(), {});
  std::vector<MixEntry> entries = OneForward();
  ASSERT_TRUE(target.Prepare(&entries, nullptr).ok());
  client::FakeMethod hang;
  hang.hang = true;
  server.Set("Forward", hang);
  const std::atomic<bool> cancel{true};
  CallRequest request;
  request.cancel = &cancel;
  EXPECT_EQ(target.Call(request).status.code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace attn::load
