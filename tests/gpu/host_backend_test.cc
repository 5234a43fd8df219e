// HostBackend on a real device: every copy, layout and option pointer by a path that mixes bits,
// what a broken kernel does, and how fast calls go through. Skipped where there is no device.
#include "kernels/cuda/host_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/exactness/call.h"
#include "tests/gpu/echo_path.h"

namespace attn::cuda {
namespace {

using exactness::Call;
using exactness::Case;
using exactness::RunBackward;
using exactness::RunForward;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

double Seconds(steady_clock::time_point since) {
  return std::chrono::duration<double>(steady_clock::now() - since).count();
}

Case Shape(int64_t rows, int64_t heads, int64_t dim, DType dtype) {
  Case c;
  c.dtype = dtype;
  c.heads = c.kv_heads = heads;
  c.seqlen_q = c.seqlen_k = rows;
  c.dim = c.dim_v = dim;
  return c;
}

class HostBackendGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is cut short shows how far it came
    std::string why;
    if (FindDevices(&why).empty()) GTEST_SKIP() << "no CUDA device: " << why;
    Make({.poison = true, .measure_roofline = false});
  }
  void Make(const DeviceSetOptions& options) {
    auto set = DeviceSet::Create(options, CudaDriver());
    ASSERT_TRUE(set.ok()) << set.status();
    set_ = *set;
    ASSERT_FALSE(set_->empty()) << set_->why_empty();
    path_ = std::make_shared<EchoPath>();
    backend_ = std::make_unique<HostBackend>(path_, set_);
  }
  void ExpectSame(const Case& c) {
    SCOPED_TRACE(Name(c));
    const Call call(c);
    const auto want = RunForward(cpu_, call);
    const auto got = RunForward(*backend_, call);
    ASSERT_TRUE(want.ok()) << want.status();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(got->out == want->out);
    EXPECT_TRUE(got->lse == want->lse);
    const auto want_back = RunBackward(cpu_, call, *want);
    const auto got_back = RunBackward(*backend_, call, *want);
    ASSERT_TRUE(want_back.ok()) << want_back.status();
    ASSERT_TRUE(got_back.ok()) << got_back.status();
    EXPECT_TRUE(got_back->dq == want_back->dq);
    EXPECT_TRUE(got_back->dk == want_back->dk);
    EXPECT_TRUE(got_back->dv == want_back->dv);
    EXPECT_TRUE(got_back->dbias == want_back->dbias);
    EXPECT_TRUE(got_back->dsink == want_back->dsink);
  }

  EchoBackend cpu_;
  std::shared_ptr<DeviceSet> set_;
  std::shared_ptr<EchoPath> path_;
  std::unique_ptr<HostBackend> backend_;
};

// Without keys or rows the host answers, not the echo.
bool HasWork(const Case& c) { return c.batch > 0 && c.seqlen_q > 0 && c.seqlen_k > 0; }

TEST_F(HostBackendGpuTest, EveryInputArrives) {
  int run = 0;
  for (auto& list : {exactness::SingleOptionCases(), exactness::LengthCases(),
                     exactness::HeadDimCases(), exactness::RandomCases(300, 11)}) {
    for (const Case& c : list) {
      if (!HasWork(c)) continue;
      const Call call(c);
      const auto p = call.Problem(Pass::kForward);
      if (!p.ok() || p->total_q == 0 || p->total_k == 0) continue;
      ExpectSame(c);
      ++run;
    }
  }
  std::printf("cases: %d\n", run);
  EXPECT_GT(run, 500);
}

TEST_F(HostBackendGpuTest, PackKernelDoesWhatTheHostDoes) {
  int n = 0;
  for (int64_t size : {2, 4}) {
    for (int64_t dim : {1, 5, 8, 20, 33, 64, 100, 511}) {
      for (int64_t heads : {1, 3}) {
        StridedTensor from{.element_bytes = size,
                           .batch = 3,
                           .tokens = 17,
                           .heads = heads,
                           .dim = dim,
                           .strides = {}};
        from.strides.head = dim + n % 3;
        from.strides.token = from.strides.head * heads + n % 5;
        from.strides.batch = from.strides.token * 17 + 1;
        ++n;
        std::vector<uint8_t> source(from.SpanBytes());
        for (size_t i = 0; i < source.size(); ++i)
          source[i] = static_cast<uint8_t>(exactness::Mix(i));
        const auto packed = static_cast<size_t>(Packed(from).SpanBytes());
        // The padding of the last row is written, too.
        const size_t whole = static_cast<size_t>(3 * 17 * heads * Packed(from).strides.head * size);
        ASSERT_LE(packed, whole);
        std::vector<uint8_t> want(whole, 0xEE), got(whole);
        PackOnHost({source.data(), want.data(), from});
        void *in = nullptr, *out = nullptr;
        ASSERT_EQ(cudaMalloc(&in, source.size()), cudaSuccess);
        ASSERT_EQ(cudaMalloc(&out, whole), cudaSuccess);
        cudaMemcpy(in, source.data(), source.size(), cudaMemcpyHostToDevice);
        ASSERT_EQ(LaunchPack({in, out, from}, nullptr), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(got.data(), out, whole, cudaMemcpyDeviceToHost), cudaSuccess);
        EXPECT_EQ(got, want) << size << " " << dim << " " << heads;
        cudaFree(in);
        cudaFree(out);
      }
    }
  }
}

TEST_F(HostBackendGpuTest, AForgottenOutputIsNaN) {
  path_->set_fault(EchoPath::Fault::kForgetLse);
  const Call call(Shape(33, 2, 64, DType::kBf16));
  const auto got = RunForward(*backend_, call);
  ASSERT_TRUE(got.ok()) << got.status();
  for (int64_t i = 0; i < got->lse.bytes(); ++i) ASSERT_EQ(got->lse.data()[i], std::byte{0xFF});
}

TEST_F(HostBackendGpuTest, RooflineIsPlausible) {
  Roofline r;
  const auto start = steady_clock::now();
  ASSERT_TRUE(MeasureRoofline(set_->devices()[0]->properties(), &r).ok());
  const DeviceProperties& d = set_->devices()[0]->properties();
  std::printf(
      "%s sm_%d, %d multiprocessors, %.1f GB, L2 %.0f MB, measured in %.3f s: copy %.0f GB/s, "
      "read %.0f GB/s, matrix %.0f TFLOP/s, up %.1f GB/s, down %.1f GB/s\n",
      d.name.c_str(), d.capability(), d.multiprocessors, d.memory_bytes * 1e-9, d.l2_bytes * 1e-6,
      Seconds(start), r.copy_bytes_per_second * 1e-9, r.read_bytes_per_second * 1e-9,
      r.matrix_flops_per_second * 1e-12, r.upload_bytes_per_second * 1e-9,
      r.download_bytes_per_second * 1e-9);
  EXPECT_GT(r.copy_bytes_per_second, 100e9);
  EXPECT_GT(r.read_bytes_per_second, 0.4 * r.copy_bytes_per_second);
  EXPECT_GT(r.matrix_flops_per_second, 10e12);
  EXPECT_GT(r.upload_bytes_per_second, 2e9);
  EXPECT_GT(r.download_bytes_per_second, 2e9);
}

// Tensors of one call in memory of one kind.
class TimedCall {
 public:
  TimedCall(int64_t rows, int64_t heads, int64_t dim, bool pinned)
      : problem_(MakeProblem(rows, heads, dim)) {
    const int64_t size = SizeOf(problem_.dtype);
    const int64_t q = DqElements(problem_) * size, k = DkElements(problem_) * size;
    const int64_t out = OutElements(problem_) * size, lse = LseElements(problem_) * 4;
    bytes_ = q + 2 * k + out + lse;
    if (pinned) {
      cudaHostAlloc(&memory_, bytes_ + 4096, cudaHostAllocPortable);
      pinned_ = true;
    } else {
      memory_ = std::aligned_alloc(4096, (bytes_ + 8191) / 4096 * 4096);
    }
    auto* at = static_cast<std::byte*>(memory_);
    for (int64_t i = 0; i < q + 2 * k; ++i) at[i] = static_cast<std::byte>(i * 7);
    tensors_ = {.q = at, .k = at + q, .v = at + q + k, .out = at + q + 2 * k};
    tensors_.lse = reinterpret_cast<float*>(at + q + 2 * k + out);
  }
  ~TimedCall() { pinned_ ? static_cast<void>(cudaFreeHost(memory_)) : std::free(memory_); }
  TimedCall(const TimedCall&) = delete;
  TimedCall& operator=(const TimedCall&) = delete;
  absl::Status Run(const Backend& backend, DeviceTimes* times = nullptr) {
    return backend.Forward(problem_, tensors_, {.device_times = times});
  }
  int64_t bytes() const { return bytes_; }

 private:
  static AttentionProblem MakeProblem(int64_t rows, int64_t heads, int64_t dim) {
    AttentionSpec spec;
    spec.num_heads = spec.num_kv_heads = heads;
    spec.q = spec.k = spec.v = {DType::kBf16, {1, rows, heads, dim}, {}};
    return *Validate(spec, Pass::kForward);
  }

  AttentionProblem problem_;
  void* memory_ = nullptr;
  bool pinned_ = false;
  int64_t bytes_ = 0;
  ForwardTensors tensors_;
};

TEST_F(HostBackendGpuTest, LargeCallsRunAtTheSpeedOfTheBus) {
  Make({.poison = false, .measure_roofline = false});
  for (const bool pinned : {false, true}) {
    for (const int callers : {1, 2, 4, 8}) {
      std::vector<std::unique_ptr<TimedCall>> calls;
      for (int i = 0; i < callers; ++i) {
        calls.push_back(std::make_unique<TimedCall>(8192, 16, 128, pinned));
        ASSERT_TRUE(calls.back()->Run(*backend_).ok());
      }
      constexpr int kRepeats = 6;
      DeviceTimes times;
      const auto start = steady_clock::now();
      std::vector<std::thread> threads;
      for (int i = 0; i < callers; ++i) {
        threads.emplace_back([&, i] {
          for (int r = 0; r < kRepeats; ++r) {
            ASSERT_TRUE(calls[i]->Run(*backend_, i == 0 ? &times : nullptr).ok());
          }
        });
      }
      for (std::thread& t : threads) t.join();
      const double seconds = Seconds(start);
      std::printf(
          "%s, %d callers: %.1f GB/s in and out together; one call: queue %.2f ms, in %.2f ms "
          "(%.1f GB/s), kernel %.2f ms, out %.2f ms (%.1f GB/s)\n",
          pinned ? "pinned" : "pageable", callers,
          static_cast<double>(calls[0]->bytes()) * kRepeats * callers / seconds * 1e-9,
          times.queue_ns * 1e-6, times.host_to_device_ns * 1e-6,
          static_cast<double>(times.host_to_device_bytes) / times.host_to_device_ns,
          times.kernel_ns * 1e-6, times.device_to_host_ns * 1e-6,
          static_cast<double>(times.device_to_host_bytes) / times.device_to_host_ns);
    }
  }
}

TEST_F(HostBackendGpuTest, SmallCallsAreQuick) {
  Make({.poison = false, .measure_roofline = false});
  for (const int callers : {1, 4, 16}) {
    std::vector<std::vector<double>> times(callers);
    std::vector<std::thread> threads;
    const auto start = steady_clock::now();
    for (int i = 0; i < callers; ++i) {
      threads.emplace_back([&, i] {
        TimedCall call(16, 2, 64, false);
        for (int r = 0; r < 2000; ++r) {
          const auto begin = steady_clock::now();
          ASSERT_TRUE(call.Run(*backend_).ok());
          times[i].push_back(Seconds(begin));
        }
      });
    }
    for (std::thread& t : threads) t.join();
    const double seconds = Seconds(start);
    std::vector<double> all;
    for (const auto& t : times) all.insert(all.end(), t.begin(), t.end());
    std::sort(all.begin(), all.end());
    std::printf("8 KiB calls, %d callers: p50 %.1f us, p99 %.1f us, %.0f calls/s\n", callers,
                all[all.size() / 2] * 1e6, all[all.size() * 99 / 100] * 1e6, all.size() / seconds);
  }
  const DeviceSet::Stats stats = set_->stats(*set_->devices()[0]);
  EXPECT_LE(stats.memory.fresh, 8) << "no allocation in steady state";
  EXPECT_EQ(stats.busy_lanes, 0);
}

TEST_F(HostBackendGpuTest, MemoryComesBack) {
  size_t before = 0, total = 0, after = 0;
  cudaMemGetInfo(&before, &total);
  {
    TimedCall call(16384, 16, 128, false);
    ASSERT_TRUE(call.Run(*backend_).ok());
  }
  set_->Trim();
  cudaMemGetInfo(&after, &total);
  EXPECT_GE(after + (size_t{8} << 20), before);
}

// Last, since it ends the device for this process.
TEST_F(HostBackendGpuTest, ZzzAnIllegalAddressEndsTheDevice) {
  Make({.poison = true, .measure_roofline = false});
  std::string told;
  set_->set_on_unhealthy([&](const DeviceSet::Health& h) { told = h.error; });
  const Call call(Shape(33, 2, 64, DType::kBf16));
  ASSERT_TRUE(RunForward(*backend_, call).ok());
  path_->set_fault(EchoPath::Fault::kIllegalAddress);
  const absl::Status failed = RunForward(*backend_, call).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(told, HasSubstr("cudaErrorIllegalAddress"));
  std::printf("%s\n", failed.ToString().c_str());
  path_->set_fault(EchoPath::Fault::kNone);
  const absl::Status refused = RunForward(*backend_, call).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  std::printf("%s\n", refused.ToString().c_str());
  EXPECT_EQ(set_->healthy_devices(), 0);
}

}  // namespace
}  // namespace attn::cuda
