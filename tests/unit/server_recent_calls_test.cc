#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "server/rpc/recent_calls.h"

namespace attn::server {
namespace {

CallRecord Record(int id) {
  CallRecord record;
  record.request_id = std::to_string(id);
  return record;
}

TEST(RecentCallsTest, NewestFirstAndBounded) {
  RecentCalls recent;
  EXPECT_TRUE(recent.Snapshot().empty());
  const int n = static_cast<int>(RecentCalls::kCapacity) + 10;
  for (int i = 0; i < n; ++i) {
    recent.Add(Record(i));
    EXPECT_EQ(recent.Snapshot().front().request_id, std::to_string(i));
  }
  const auto all = recent.Snapshot();
  ASSERT_EQ(all.size(), RecentCalls::kCapacity);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].request_id, std::to_string(n - 1 - static_cast<int>(i)));
  }
}

TEST(RecentCallsTest, LongErrorsAreCut) {
  RecentCalls recent;
  CallRecord record = Record(1);
  record.error = std::string(100'000, 'x');
  recent.Add(std::move(record));
  EXPECT_EQ(recent.Snapshot().front().error.size(), RecentCalls::kMaxErrorBytes);
}

TEST(RecentCallsTest, ReadersKeepWhatTheyHold) {
  RecentCalls recent;
  recent.Add(Record(-1));
  const auto held = recent.Snapshot();
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&recent] {
      for (int i = 0; i < 2000; ++i) recent.Add(Record(i));
    });
  }
  for (int i = 0; i < 200; ++i) {
    for (const auto& record : recent.Snapshot()) ASSERT_FALSE(record.request_id.empty());
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(held.front().request_id, "-1");
}

}  // namespace
}  // namespace attn::server
