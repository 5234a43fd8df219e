// Devices, pools, lanes and repacking, on a host with or without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "kernels/cuda/backends.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/runtime/device_set.h"
#include "kernels/cuda/runtime/memory_pool.h"
#include "kernels/cuda/runtime/pack.h"
#include "tests/unit/api_test_util.h"
#include "tests/unit/cuda_fake_driver.h"

namespace attn::cuda {
namespace {

using ::testing::HasSubstr;

// ---- devices

TEST(FindDevicesTest, AHostWithoutADriverIsAnOrdinaryHost) {
  std::string why = "unset";
  const std::vector<DeviceProperties> devices = FindDevices(&why);
  if (!devices.empty()) {
    EXPECT_FALSE(devices[0].name.empty());
    EXPECT_GT(devices[0].multiprocessors, 0);
    GTEST_SKIP() << "this host has a GPU";
  }
  EXPECT_THAT(why, testing::AnyOf(HasSubstr("cudaError"), HasSubstr("no device")));
  const auto set = DeviceSet::Create({}, CudaDriver());
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_TRUE((*set)->empty());
  EXPECT_EQ((*set)->why_empty(), why);
  EXPECT_TRUE(MakeCudaBackends(*set).empty());
}

TEST(ToStatusTest, CarriesTheCudaError) {
  EXPECT_TRUE(ToStatus(cudaSuccess, "x").ok());
  const absl::Status status = ToStatus(cudaErrorIllegalAddress, "running");
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("running: cudaErrorIllegalAddress: "));
  EXPECT_EQ(CudaErrorOf(status), cudaErrorIllegalAddress);
  EXPECT_EQ(CudaErrorOf(absl::InternalError("x")), cudaSuccess);
  EXPECT_EQ(ToStatus(cudaErrorMemoryAllocation, "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(IsSticky(cudaErrorIllegalAddress));
  EXPECT_TRUE(IsSticky(cudaErrorECCUncorrectable));
  EXPECT_FALSE(IsSticky(cudaErrorMemoryAllocation));
  EXPECT_FALSE(IsSticky(cudaErrorInvalidConfiguration));
  EXPECT_FALSE(IsSticky(cudaErrorNotReady));
  EXPECT_FALSE(IsSticky(cudaSuccess));
}

TEST(DeviceSetTest, TakesTheDevicesThatAreNamed) {
  FakeDriver driver(3);
  const auto set = DeviceSet::Create({.indices = std::vector<int>{2, 0}}, &driver);
  ASSERT_TRUE(set.ok()) << set.status();
  ASSERT_EQ((*set)->devices().size(), 2u);
  EXPECT_EQ((*set)->devices()[0]->properties().index, 2);
  EXPECT_EQ((*set)->devices()[1]->properties().index, 0);
  EXPECT_EQ((*set)->devices()[0]->roofline().copy_bytes_per_second, 1e9);

  const auto missing = DeviceSet::Create({.indices = std::vector<int>{3}}, &driver);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("CUDA device 3"));

  const auto none = DeviceSet::Create({.indices = std::vector<int>{}}, &driver);
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE((*none)->empty());
  EXPECT_THAT((*none)->why_empty(), HasSubstr("configuration"));
}

TEST(DeviceSetTest, ADeviceThatCannotStartIsLeftOut) {
  FakeDriver driver(2);
  driver.FailNext("FreeMemory", cudaErrorDevicesUnavailable);
  const auto set = DeviceSet::Create({}, &driver);
  ASSERT_TRUE(set.ok());
  ASSERT_EQ((*set)->devices().size(), 1u);
  EXPECT_EQ((*set)->devices()[0]->properties().index, 1);
  EXPECT_THAT((*set)->why_empty(), HasSubstr("CUDA device 0"));
}

TEST(DeviceSetTest, TheLeastLoadedDeviceWithAFreeLaneGetsTheCall) {
  FakeDriver driver(2);
  const auto set = DeviceSet::Create({.lanes = 2}, &driver);
  ASSERT_TRUE(set.ok());
  const std::vector<bool> all = {true, true};
  const auto index = [](const auto& lease) { return lease->device()->properties().index; };
  auto a = (*set)->Acquire(all, 5.0, nullptr);
  auto b = (*set)->Acquire(all, 1.0, nullptr);
  EXPECT_EQ(index(a), 0);
  EXPECT_EQ(index(b), 1);
  auto c = (*set)->Acquire(all, 1.0, nullptr);
  EXPECT_EQ(index(c), 1) << "1 s there against 5 s";
  auto d = (*set)->Acquire(all, 1.0, nullptr);
  EXPECT_EQ(index(d), 0) << "the other has no lane left";
  CancelToken soon(std::chrono::steady_clock::now() + std::chrono::milliseconds(5));
  EXPECT_EQ((*set)->Acquire(all, 1.0, &soon).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(a->lane(), d->lane());
  *b = DeviceSet::Lease();
  auto e = (*set)->Acquire(all, 1.0, nullptr);
  EXPECT_EQ(index(e), 1);
}

TEST(DeviceSetTest, WaitersAreServedInOrder) {
  FakeDriver driver(1);
  const auto set = DeviceSet::Create({.lanes = 1}, &driver);
  ASSERT_TRUE(set.ok());
  auto held = std::make_optional((*set)->Acquire({true}, 1.0, nullptr));
  Mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      const auto lease = (*set)->Acquire({true}, 1.0, nullptr);
      ASSERT_TRUE(lease.ok());
      MutexLock lock(mutex);
      order.push_back(i);
    });
    while ((*set)->waiting() < i + 1) std::this_thread::yield();
  }
  held.reset();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 2, 3));
}

TEST(DeviceSetTest, WaitersLearnThatTheLastDeviceFailed) {
  FakeDriver driver(1);
  const auto set = DeviceSet::Create({.lanes = 1}, &driver);
  ASSERT_TRUE(set.ok());
  const auto held = (*set)->Acquire({true}, 1.0, nullptr);
  std::thread waiter([&] {
    EXPECT_EQ((*set)->Acquire({true}, 1.0, nullptr).status().code(),
              absl::StatusCode::kUnavailable);
  });
  while ((*set)->waiting() < 1) std::this_thread::yield();
  (*set)->MarkUnhealthy(held->device(), absl::InternalError("broken"));
  waiter.join();
  EXPECT_EQ((*set)->health()[0].error, "broken");
}

// ---- pools

struct CountingSource {
  int live = 0;
  int made = 0;
  int64_t room = int64_t{1} << 40;  // what the system has
  int64_t used = 0;
  std::map<void*, int64_t> blocks;

  MemoryPool::Source source() {
    return {.allocate = [this](int64_t bytes) -> absl::StatusOr<void*> {
              if (used + bytes > room)
                return absl::ResourceExhaustedError("the system has no more");
              void* data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
              blocks[data] = bytes;
              used += bytes;
              ++live;
              ++made;
              return data;
            },
            .free =
                [this](void* data) {
                  used -= blocks[data];
                  blocks.erase(data);
                  --live;
                  std::free(data);
                }};
  }
};

TEST(MemoryPoolTest, ReusesBlocksOfSimilarSize) {
  CountingSource source;
  MemoryPool pool({.name = "test", .budget_bytes = 1 << 20, .smallest_bytes = 1024},
                  source.source());
  void* first = nullptr;
  {
    const auto block = pool.Allocate(100'000, nullptr);
    ASSERT_TRUE(block.ok());
    first = block->data();
    EXPECT_EQ(block->size(), 100'000);
  }
  const auto again = pool.Allocate(90'000, nullptr);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->data(), first);
  const auto small = pool.Allocate(1, nullptr);
  ASSERT_TRUE(small.ok());
  EXPECT_NE(small->data(), first);
  EXPECT_EQ(source.made, 2);
  EXPECT_EQ(pool.stats().reused, 1);
  EXPECT_EQ(pool.Allocate(0, nullptr)->data(), nullptr);
}

TEST(MemoryPoolTest, KeepsWithinTheBudget) {
  CountingSource source;
  MemoryPool pool({.name = "test", .budget_bytes = 100'000, .smallest_bytes = 256},
                  source.source());
  EXPECT_EQ(pool.Allocate(100'001, nullptr).status().code(), absl::StatusCode::kResourceExhausted);
  {
    const auto whole = pool.Allocate(100'000, nullptr);
    ASSERT_TRUE(whole.ok());
  }
  for (int64_t bytes : {1'000, 20'000, 60'000, 3'000, 99'000}) {
    const auto block = pool.Allocate(bytes, nullptr);
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_LE(source.used, 100'000);
  }
  pool.Trim();
  EXPECT_EQ(source.live, 0);
  EXPECT_EQ(pool.stats().retained_bytes, 0);
  EXPECT_EQ(pool.stats().in_use_bytes, 0);
}

TEST(MemoryPoolTest, FreesWhatItKeepsBeforeGivingUp) {
  CountingSource source;
  source.room = 10'000;
  MemoryPool pool({.name = "test", .budget_bytes = 100'000, .smallest_bytes = 256},
                  source.source());
  {
    const auto block = pool.Allocate(8'000, nullptr);
    ASSERT_TRUE(block.ok());
  }
  const auto other = pool.Allocate(4'000, nullptr);  // the system has room only without the first
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(pool.Allocate(9'000, nullptr).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LE(pool.stats().in_use_bytes, 8'192);
}

TEST(MemoryPoolTest, WaitsForRoomInOrder) {
  CountingSource source;
  MemoryPool pool({.name = "test", .budget_bytes = 10'000, .smallest_bytes = 256}, source.source());
  auto held = std::make_optional(pool.Allocate(9'000, nullptr));
  CancelToken soon(std::chrono::steady_clock::now() + std::chrono::milliseconds(5));
  EXPECT_EQ(pool.Allocate(5'000, &soon).status().code(), absl::StatusCode::kDeadlineExceeded);
  std::thread waiter([&] { EXPECT_TRUE(pool.Allocate(9'500, nullptr).ok()); });
  while (pool.waiting() < 1) std::this_thread::yield();
  // It would fit now, but whoever came first goes first: a large call is not starved by small ones.
  CancelToken later(std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
  EXPECT_EQ(pool.Allocate(100, &later).status().code(), absl::StatusCode::kDeadlineExceeded);
  held.reset();
  waiter.join();
  EXPECT_TRUE(pool.Allocate(100, nullptr).ok());
}

// ---- repacking

TEST(PackTest, KnowsWhichRowsAreAligned) {
  StridedTensor t{.element_bytes = 2,
                  .batch = 2,
                  .tokens = 3,
                  .heads = 4,
                  .dim = 64,
                  .strides = {768, 256, 64}};
  EXPECT_TRUE(t.RowsAligned());
  t.strides.head = 68;
  EXPECT_FALSE(t.RowsAligned());
  t.heads = 1;
  EXPECT_TRUE(t.RowsAligned()) << "one head has no stride to speak of";
  EXPECT_EQ(NormalStrides(t).head % 8, 0);
  EXPECT_EQ(NormalStrides(t).token, 256);
  t.strides.batch = 3;
  EXPECT_FALSE(t.RowsAligned());
  t.element_bytes = 4;
  t.strides = {768, 256, 4};
  EXPECT_TRUE(t.RowsAligned());
}

TEST(PackTest, SpanSaturates) {
  StridedTensor t{
      .element_bytes = 4, .batch = 3, .tokens = 5, .heads = 2, .dim = 7, .strides = {100, 20, 10}};
  EXPECT_EQ(t.SpanBytes(), (2 * 100 + 4 * 20 + 10 + 7) * 4);
  t.strides.batch = int64_t{1} << 61;
  EXPECT_EQ(t.SpanBytes(), int64_t{1} << 62);
  t.tokens = 0;
  EXPECT_EQ(t.SpanBytes(), 0);
}

TEST(PackTest, RowsArePaddedWithZeros) {
  const StridedTensor from{
      .element_bytes = 2, .batch = 2, .tokens = 3, .heads = 2, .dim = 5, .strides = {70, 23, 7}};
  std::vector<uint16_t> source(from.SpanBytes() / 2);
  std::iota(source.begin(), source.end(), uint16_t{1});
  const StridedTensor to = Packed(from);
  EXPECT_TRUE(to.RowsAligned());
  EXPECT_EQ(to.strides.head, 8);
  EXPECT_EQ(to.strides.token, 16);
  EXPECT_EQ(to.strides.batch, 48);
  std::vector<uint16_t> packed(2 * 3 * 2 * 8, 0xFFFF);
  PackOnHost({source.data(), packed.data(), from});
  for (int b = 0; b < 2; ++b) {
    for (int t = 0; t < 3; ++t) {
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 8; ++d) {
          EXPECT_EQ(packed[b * 48 + t * 16 + h * 8 + d],
                    d < 5 ? source[b * 70 + t * 23 + h * 7 + d] : 0);
        }
      }
    }
  }
}

// ---- layout

TEST(CallLayoutTest, BlocksDoNotOverlapAndAreAligned) {
  AttentionSpec spec = BshdSpec({.head_dim = 20, .head_dim_v = 12}, DType::kBf16);
  spec.bias = Shape({2, 4, 5, 7});
  spec.sinks = Shape({4});
  spec.seqlens_k = {3, 7};
  spec.out = spec.dout = Shape({2, 5, 4, 12}, DType::kBf16);
  spec.lse = spec.dlse = Shape({2, 4, 5});
  const auto p = Validate(spec, Pass::kBackward);
  ASSERT_TRUE(p.ok()) << p.status();
  const CallLayout layout(*p, Pass::kBackward, 1000, nullptr);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& u : layout.uploads()) ranges.push_back({u.offset, u.bytes});
  for (const auto& k : layout.packings()) ranges.push_back({k.offset, Packed(k.from).SpanBytes()});
  for (int i = 0; i < kNumOutputs; ++i) {
    const auto& o = layout.output(static_cast<OutputSlot>(i));
    EXPECT_GT(o.bytes, 0);
    ranges.push_back({o.offset, o.bytes});
  }
  ranges.push_back({layout.workspace_offset(), 1000});
  std::sort(ranges.begin(), ranges.end());
  EXPECT_EQ(ranges.front().first, 0);
  for (size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_EQ(ranges[i].first % 256, 0);
    const int64_t end = i + 1 < ranges.size() ? ranges[i + 1].first : layout.total_bytes();
    EXPECT_LE(ranges[i].first + ranges[i].second, end);
  }
  // head_dim 20 is 40 bytes: q and k are packed; head_dim_v 12 is 24 bytes: v, out and dout too.
  EXPECT_EQ(layout.packings().size(), 5u);
  EXPECT_GE(layout.uploaded(kSlotSequences), 0);
  EXPECT_EQ(layout.uploaded(kSlotAlibi), -1);
  AttentionProblem aligned = *p;
  UsePackedStrides(Pass::kBackward, &aligned);
  EXPECT_EQ(aligned.q.head, 24);
  EXPECT_EQ(aligned.v.head, 16);
  EXPECT_EQ(aligned.bwd_dout.head, 16);
  EXPECT_FALSE(NeedsPacking(aligned, Pass::kBackward));
}

TEST(CallLayoutTest, HugeProblemsSaturate) {
  AttentionSpec spec = BshdSpec({.batch = 1 << 20,
                                 .seqlen_q = 1 << 20,
                                 .seqlen_k = 1 << 20,
                                 .num_heads = 1 << 10,
                                 .num_kv_heads = 1 << 10,
                                 .head_dim = 256,
                                 .head_dim_v = 256});
  const auto p = Validate(spec, Pass::kForward);
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_GE(CallLayout(*p, Pass::kForward, int64_t{1} << 62, nullptr).total_bytes(),
            int64_t{1} << 62);
}

}  // namespace
}  // namespace attn::cuda
