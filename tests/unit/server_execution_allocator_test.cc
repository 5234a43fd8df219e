#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "server/execution/allocator.h"

namespace attn::server {
namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

using Blocks = std::vector<std::unique_ptr<char[]>>;

// Written to, so that no compiler leaves them out.
Blocks Allocate(int count, size_t bytes) {
  Blocks blocks;
  for (int i = 0; i < count; ++i) {
    blocks.push_back(std::make_unique<char[]>(bytes));
    std::memset(blocks.back().get(), i, bytes);
  }
  return blocks;
}

class AllocatorTest : public testing::Test {
 protected:
  void SetUp() override {
    if (ReadAllocatorStats().in_use_bytes == 0) GTEST_SKIP() << "a sanitizer's allocator";
  }
};

TEST_F(AllocatorTest, InUseFollowsWhatIsHeld) {
  const uint64_t before = ReadAllocatorStats().in_use_bytes;
  {
    const Blocks blocks = Allocate(80, 100 * kKiB);
    const uint64_t held = ReadAllocatorStats().in_use_bytes - before;
    EXPECT_GE(held, 80 * 100 * kKiB);
    EXPECT_LE(held, 80 * 128 * kKiB);
  }
  EXPECT_LE(ReadAllocatorStats().in_use_bytes, before + 64 * kKiB);
}

TEST_F(AllocatorTest, WhatIsFreedIsRetainedUntilReleased) {
  if (!BoundThreadCaches(8 * kMiB)) GTEST_SKIP() << "not tcmalloc";
  ReleaseFreeMemory();
  const uint64_t before = ReadAllocatorStats().retained_bytes;
  Allocate(64, kMiB);
  EXPECT_GE(ReadAllocatorStats().retained_bytes, before + 32 * kMiB);
  ReleaseFreeMemory();
  EXPECT_LE(ReadAllocatorStats().retained_bytes, before + kMiB);
}

// As gRPC's threads do: each takes and frees many slices, and is idle then but does not end.
TEST_F(AllocatorTest, IdleThreadsCacheNoMoreThanTheBound) {
  constexpr size_t kBound = 2 * kMiB;
  constexpr int kThreads = 8;
  if (!BoundThreadCaches(kBound)) GTEST_SKIP() << "not tcmalloc";
  std::barrier<> freed(kThreads + 1), done(kThreads + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) Allocate(100, 64 * kKiB + 64);
      freed.arrive_and_wait();
      done.arrive_and_wait();
    });
  }
  freed.arrive_and_wait();
  ReleaseFreeMemory();
  const uint64_t retained = ReadAllocatorStats().retained_bytes;
  done.arrive_and_wait();
  for (std::thread& thread : threads) thread.join();
  // tcmalloc keeps to the bound only roughly, and the central lists keep some more: up to 7 MiB on
  // a busy machine. Without a bound it is 35.
  EXPECT_LE(retained, 8 * kMiB);
}

}  // namespace
}  // namespace attn::server
