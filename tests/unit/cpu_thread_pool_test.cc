#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cpu/thread_pool.h"

namespace attn {
namespace {

TEST(ThreadPoolTest, CallsEachIndexOnce) {
  for (int workers : {1, 2, 5}) {
    ThreadPool pool(workers);
    EXPECT_EQ(pool.num_workers(), workers);
    for (int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<int> calls(n);  // plain: each index belongs to one worker
      pool.ParallelFor(n, [&](int64_t i, int) { ++calls[i]; });
      for (int count : calls) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ThreadPoolTest, WorkerIsNeverInUseTwice) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::atomic<int>> inside(pool.num_workers());
    pool.ParallelFor(200, [&](int64_t, int worker) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, pool.num_workers());
      EXPECT_EQ(inside[worker].fetch_add(1), 0);
      inside[worker].fetch_sub(1);
    });
  }
}

TEST(ThreadPoolTest, OneIndexRunsOnTheCallingThread) {
  ThreadPool pool(3);
  std::thread::id ran;
  pool.ParallelFor(1, [&](int64_t, int worker) {
    EXPECT_EQ(worker, 0);
    ran = std::this_thread::get_id();
  });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(ThreadPoolTest, ServesSeveralCallersAtOnce) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        std::vector<int64_t> values(37);
        pool.ParallelFor(37, [&](int64_t i, int) { values[i] = i; });
        int64_t sum = 0;
        for (int64_t v : values) sum += v;  // visible without locks: ParallelFor() joined them
        total += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 6 * 100 * 37 * 36 / 2);
}

TEST(ThreadPoolTest, UsesEveryWorkerWhereWorkIsLong) {
  ThreadPool pool(3);
  // Each index waits until all workers are in, so this ends only if all take part.
  std::atomic<int> arrived{0};
  pool.ParallelFor(3, [&](int64_t, int) {
    ++arrived;
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 3);
}

TEST(ThreadPoolTest, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 20; ++i) ThreadPool pool(3);
  EXPECT_GE(ThreadPool().num_workers(), 1);
}

}  // namespace
}  // namespace attn
