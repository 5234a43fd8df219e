// HostBackend over devices that are host memory: a CPU path behind it must give bit for bit what it
// gives alone, and every failure must end as a status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/host_backend.h"
#include "tests/exactness/call.h"
#include "tests/unit/cuda_fake_path.h"

namespace attn::cuda {
namespace {

using ::attn::exactness::BackwardOutputs;
using ::attn::exactness::Call;
using ::attn::exactness::Case;
using ::attn::exactness::ForwardOutputs;
using ::attn::exactness::RunBackward;
using ::attn::exactness::RunForward;
using ::testing::HasSubstr;

Case Lengths(int64_t seqlen_q, int64_t seqlen_k) {
  Case c;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  return c;
}

class HostBackendTest : public ::testing::Test {
 protected:
  void Make(int devices, DeviceSetOptions options = {.poison = true}) {
    backend_.reset();  // the set goes before its driver
    set_.reset();
    driver_ = std::make_unique<FakeDriver>(devices);
    MakeOn(options);
  }
  void MakeOn(const DeviceSetOptions& options) {
    auto set = DeviceSet::Create(options, driver_.get());
    ASSERT_TRUE(set.ok()) << set.status();
    set_ = *set;
    path_ = std::make_shared<FakePath>(driver_.get(), cpu_.get());
    backend_ = std::make_unique<HostBackend>(path_, set_);
  }

  ThreadPool pool_{1};
  std::unique_ptr<Backend> cpu_ = MakeFlashCpuBackend(&pool_);
  std::unique_ptr<FakeDriver> driver_;
  std::shared_ptr<DeviceSet> set_;
  std::shared_ptr<FakePath> path_;
  std::unique_ptr<HostBackend> backend_;
};

void ExpectSame(const Backend& host, const Backend& cpu, const Case& c) {
  SCOPED_TRACE(Name(c));
  const Call call(c);
  const absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kBackward);
  ASSERT_TRUE(problem.ok()) << problem.status();
  std::vector<Rejection> rejections;
  cpu.AppendRejections(*problem, Pass::kBackward, &rejections);
  if (!rejections.empty()) return;
  const absl::StatusOr<ForwardOutputs> want = RunForward(cpu, call);
  const absl::StatusOr<ForwardOutputs> got = RunForward(host, call);
  ASSERT_TRUE(want.ok()) << want.status();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->out == want->out);
  EXPECT_TRUE(got->lse == want->lse);
  const absl::StatusOr<BackwardOutputs> want_back = RunBackward(cpu, call, *want);
  const absl::StatusOr<BackwardOutputs> got_back = RunBackward(host, call, *got);
  ASSERT_TRUE(want_back.ok()) << want_back.status();
  ASSERT_TRUE(got_back.ok()) << got_back.status();
  EXPECT_TRUE(got_back->dq == want_back->dq);
  EXPECT_TRUE(got_back->dk == want_back->dk);
  EXPECT_TRUE(got_back->dv == want_back->dv);
  EXPECT_TRUE(got_back->dbias == want_back->dbias);
  EXPECT_TRUE(got_back->dsink == want_back->dsink);
}

TEST_F(HostBackendTest, EveryOptionGivesWhatThePathAloneGives) {
  Make(1);
  for (const Case& c : exactness::SingleOptionCases()) ExpectSame(*backend_, *cpu_, c);
}

TEST_F(HostBackendTest, EveryLengthAndHeadDimGivesWhatThePathAloneGives) {
  Make(1);
  for (const Case& c : exactness::LengthCases()) ExpectSame(*backend_, *cpu_, c);
  for (const Case& c : exactness::HeadDimCases()) ExpectSame(*backend_, *cpu_, c);
}

TEST_F(HostBackendTest, RandomCallsGiveWhatThePathAloneGives) {
  Make(2);
  for (const Case& c : exactness::RandomCases(400, 7)) ExpectSame(*backend_, *cpu_, c);
}

// More than a chunk in and out, so that chunks are reused.
TEST_F(HostBackendTest, LargeCallsTravelInChunks) {
  Make(1);
  Case c = Lengths(2500, 129);
  c.batch = 2;
  c.heads = 8;
  c.kv_heads = 4;
  c.dim = 128;
  c.dim_v = 72;
  ExpectSame(*backend_, *cpu_, c);
  c.storage = exactness::Storage::kGaps;
  c.dlse = true;
  ExpectSame(*backend_, *cpu_, c);
}

TEST_F(HostBackendTest, NothingIsAllocatedInSteadyState) {
  Make(1);
  const Case c = Lengths(70, 90);
  ExpectSame(*backend_, *cpu_, c);
  const int before = driver_->mallocs();
  for (int i = 0; i < 5; ++i) ExpectSame(*backend_, *cpu_, c);
  EXPECT_EQ(driver_->mallocs(), before);
  EXPECT_EQ(set_->stats(*set_->devices()[0]).busy_lanes, 0);
}

TEST_F(HostBackendTest, SmallCallsTravelInOneCopy) {
  Make(1);
  const Case c = Lengths(16, 16);
  const Call call(c);
  const int before = driver_->copies_to_device();
  ASSERT_TRUE(RunForward(*backend_, call).ok());
  EXPECT_EQ(driver_->copies_to_device(), before + 1);
}

TEST_F(HostBackendTest, AnOutputThatAKernelForgetsIsNaN) {
  Make(1, {.poison = true});
  path_->set_forgets_an_element(true);
  const Call call(Lengths(16, 16));
  const auto got = RunForward(*backend_, call);
  ASSERT_TRUE(got.ok()) << got.status();
  uint32_t first = 0;
  std::memcpy(&first, got->out.data(), 4);
  EXPECT_EQ(first, 0xFFFFFFFFu);
}

TEST_F(HostBackendTest, TimesNameTheDeviceAndTheBytes) {
  Make(1);
  const Call call(Lengths(16, 16));
  const auto problem = call.Problem(Pass::kForward);
  ASSERT_TRUE(problem.ok());
  std::vector<float> out(OutElements(*problem)), lse(LseElements(*problem));
  DeviceTimes times;
  const reference::Data data = call.data();
  ASSERT_TRUE(
      backend_
          ->Forward(*problem,
                    {.q = data.q, .k = data.k, .v = data.v, .out = out.data(), .lse = lse.data()},
                    {.device_times = &times})
          .ok());
  EXPECT_EQ(times.device_index, 0);
  EXPECT_EQ(times.host_to_device_bytes, 3u * 16 * 2 * 64 * 4);
  EXPECT_EQ(times.kernel_ns, 500'000u);
  EXPECT_GE(times.device_to_host_bytes, (16u * 2 * 64 + 2 * 16) * 4);
}

// q, k and v as slices of one packed tensor travel once.
TEST_F(HostBackendTest, OverlappingInputsTravelOnce) {
  Make(1);
  const int64_t tokens = 300, heads = 4, dim = 64;
  std::vector<float> qkv(tokens * 3 * heads * dim);
  for (size_t i = 0; i < qkv.size(); ++i) qkv[i] = exactness::Gauss(1, 2, i);
  AttentionSpec spec;
  spec.num_heads = spec.num_kv_heads = heads;
  for (TensorSpec* t : {&spec.q, &spec.k, &spec.v}) {
    t->shape = {1, tokens, heads, dim};
    t->strides = {tokens * 3 * heads * dim, 3 * heads * dim, dim, 1};
  }
  const auto problem = Validate(spec, Pass::kForward);
  ASSERT_TRUE(problem.ok()) << problem.status();
  const auto run = [&](const Backend& backend) {
    std::vector<float> out(OutElements(*problem)), lse(LseElements(*problem));
    std::vector<std::byte> workspace(cpu_->WorkspaceBytes(*problem, Pass::kForward) + 64);
    void* aligned = workspace.data();
    size_t space = workspace.size();
    std::align(64, space - 64, aligned, space);
    const absl::Status s =
        backend.Forward(*problem,
                        {.q = qkv.data(),
                         .k = &qkv[heads * dim],
                         .v = &qkv[2 * heads * dim],
                         .out = out.data(),
                         .lse = lse.data()},
                        {.workspace = {static_cast<std::byte*>(aligned), space}});
    EXPECT_TRUE(s.ok()) << s;
    return out;
  };
  EXPECT_EQ(run(*backend_), run(*cpu_));
  EXPECT_EQ(driver_->bytes_to_device(), qkv.size() * 4);
}

TEST_F(HostBackendTest, PinnedTensorsAreNotStaged) {
  Make(1);
  Case c = Lengths(512, 512);
  c.heads = c.kv_heads = 8;
  const Call call(c);
  const reference::Data data = call.data();
  const size_t bytes = size_t{512} * 8 * 64 * 4;
  for (const void* input : {data.q, data.k, data.v})
    driver_->RegisterPinned(const_cast<void*>(input), bytes);
  ExpectSame(*backend_, *cpu_, c);  // its own, pageable tensors
  const int before = driver_->copies_to_device();
  ASSERT_TRUE(RunForward(*backend_, call).ok());
  EXPECT_EQ(driver_->copies_to_device(), before + 3);
}

// ---- choosing a device

TEST_F(HostBackendTest, CallsSpreadOverDevices) {
  Make(3);
  std::set<int> used;
  path_->set_on_launch([&](const cuda::Launch& launch) {
    used.insert(launch.device->index);
    return absl::OkStatus();
  });
  const Call call(Lengths(16, 16));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(RunForward(*backend_, call).ok());
  EXPECT_THAT(used, ::testing::ElementsAre(0, 1, 2));
}

TEST_F(HostBackendTest, ACallerMayNameTheDevice) {
  Make(3);
  const Call call(Lengths(16, 16));
  const auto problem = call.Problem(Pass::kForward);
  std::vector<float> out(OutElements(*problem)), lse(LseElements(*problem));
  const reference::Data data = call.data();
  const auto run = [&](int device) {
    DeviceTimes times;
    const absl::Status s = backend_->Forward(
        *problem, {.q = data.q, .k = data.k, .v = data.v, .out = out.data(), .lse = lse.data()},
        {.device_times = &times, .device_index = device});
    return s.ok() ? times.device_index : -1;
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run(2), 2);
    EXPECT_EQ(run(0), 0);
  }
  EXPECT_EQ(run(3), -1);
}

TEST_F(HostBackendTest, OnlyDevicesThatCanTakeACallGetIt) {
  driver_ = std::make_unique<FakeDriver>(3);
  driver_->set_capability(0, 7, 0);
  driver_->set_capability(2, 7, 0);
  MakeOn({});
  path_->set_major(9);
  const Call call(Lengths(16, 16));
  std::vector<int> used;
  path_->set_on_launch([&](const cuda::Launch& launch) {
    used.push_back(launch.device->index);
    return absl::OkStatus();
  });
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(RunForward(*backend_, call).ok());
  EXPECT_THAT(used, ::testing::Each(1));
  const auto problem = call.Problem(Pass::kForward);
  EXPECT_EQ(backend_->KernelId(*problem, Pass::kForward), "fake_sm90");
}

TEST_F(HostBackendTest, ReasonsAreThoseOfTheLeastRejectingDevice) {
  driver_ = std::make_unique<FakeDriver>(2);
  driver_->set_capability(0, 7, 0);
  MakeOn({});
  path_->set_major(9);
  Case c = Lengths(16, 16);
  c.dim = c.dim_v = 264;
  const Call call(c);
  std::vector<Rejection> rejections;
  backend_->AppendRejections(*call.Problem(Pass::kForward), Pass::kForward, &rejections);
  ASSERT_EQ(rejections.size(), 2u);  // head_dim and head_dim_v, not the architecture
  for (const Rejection& r : rejections) EXPECT_EQ(r.reason, Reason::kHeadDimUnsupported);
}

// ---- limits

TEST_F(HostBackendTest, WorkspaceLimitIsTheDevices) {
  Make(1, {.memory_limit_bytes = int64_t{4} << 20});
  path_->set_extra_workspace(int64_t{8} << 20);
  const Call call(Lengths(16, 16));
  const auto problem = call.Problem(Pass::kForward);
  std::vector<Rejection> rejections;
  backend_->AppendRejections(*problem, Pass::kForward, &rejections);
  ASSERT_EQ(rejections.size(), 1u);
  EXPECT_EQ(rejections[0].reason, Reason::kWorkspaceLimit);
  EXPECT_THAT(rejections[0].detail, HasSubstr("> 4194304 bytes of device memory"));
  EXPECT_EQ(RunForward(*backend_, call).status().code(), absl::StatusCode::kFailedPrecondition);
  // Host memory has its own limit, which does not concern the scratch memory of a device.
  path_->set_extra_workspace(int64_t{1} << 20);
  const PathCandidate candidate{
      .path = PathId::kFlashSm80, .backend = backend_.get(), .standing = {}};
  const PathChoice choice = SelectPath(*problem, Pass::kForward, {}, {&candidate, 1}, 0);
  EXPECT_EQ(choice.backend, backend_.get());
}

TEST_F(HostBackendTest, OutOfDeviceMemoryIsResourceExhausted) {
  Make(1);
  const size_t before = driver_->live_allocations();  // the lanes' counters
  driver_->FailNext("Malloc", cudaErrorMemoryAllocation, 0);
  const Call call(Lengths(16, 16));
  EXPECT_TRUE(RunForward(*backend_, call).ok()) << "what is kept is freed and tried again";
  set_->Trim();
  EXPECT_EQ(driver_->live_allocations(), before);
  EXPECT_TRUE(set_->devices()[0]->healthy());
}

// ---- cancelling

TEST_F(HostBackendTest, ACancelledCallIsNotLaunched) {
  Make(1);
  bool launched = false;
  path_->set_on_launch([&](const cuda::Launch&) {
    launched = true;
    return absl::OkStatus();
  });
  CancelToken token;
  token.Cancel();
  const Call call(Lengths(16, 16));
  EXPECT_EQ(RunForward(*backend_, call, &token).status().code(), absl::StatusCode::kCancelled);
  CancelToken late(std::chrono::steady_clock::now() - std::chrono::seconds(1));
  EXPECT_EQ(RunForward(*backend_, call, &late).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(launched);
  EXPECT_EQ(set_->stats(*set_->devices()[0]).busy_lanes, 0);
}

TEST_F(HostBackendTest, WaitingForALaneEndsWithTheDeadline) {
  Make(1, {.lanes = 1});
  const auto held = set_->Acquire({true}, 1.0, nullptr);
  ASSERT_TRUE(held.ok());
  CancelToken token(std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
  const Call call(Lengths(16, 16));
  EXPECT_EQ(RunForward(*backend_, call, &token).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(HostBackendTest, WaitingForMemoryEndsWithTheCancellation) {
  Make(1, {.memory_limit_bytes = int64_t{4} << 20});
  auto held = set_->devices()[0]->memory().Allocate(int64_t{3} << 20, nullptr);
  ASSERT_TRUE(held.ok());
  CancelToken token;
  const Call call(Lengths(16, 16));
  std::thread caller([&] {
    EXPECT_EQ(RunForward(*backend_, call, &token).status().code(), absl::StatusCode::kCancelled);
  });
  token.Cancel();
  caller.join();
}

// A call that is cancelled while it is under way ends as usual: its result is whole.
TEST_F(HostBackendTest, ACallCancelledAfterLaunchFinishes) {
  Make(1);
  CancelToken token;
  path_->set_on_launch([&](const cuda::Launch&) {
    token.Cancel();
    return absl::OkStatus();
  });
  const Call call(Lengths(16, 16));
  EXPECT_TRUE(RunForward(*backend_, call, &token).ok());
}

// ---- failures

TEST_F(HostBackendTest, AStickyErrorFailsTheCallAndEndsTheDevice) {
  Make(2);
  std::vector<DeviceSet::Health> told;
  set_->set_on_unhealthy([&](const DeviceSet::Health& h) { told.push_back(h); });
  const Call call(Lengths(16, 16));
  driver_->FailNext("work", cudaErrorIllegalAddress, 1);
  const absl::Status failed = RunForward(*backend_, call).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("CUDA device 0"));
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].index, 0);
  EXPECT_EQ(set_->healthy_devices(), 1);

  std::set<int> used;
  path_->set_on_launch([&](const cuda::Launch& launch) {
    used.insert(launch.device->index);
    return absl::OkStatus();
  });
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(RunForward(*backend_, call).ok());
  EXPECT_THAT(used, ::testing::ElementsAre(1));

  driver_->FailNext("work", cudaErrorLaunchFailure);
  EXPECT_EQ(RunForward(*backend_, call).status().code(), absl::StatusCode::kInternal);
  const absl::Status refused = RunForward(*backend_, call).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("cudaErrorLaunchFailure"));
  EXPECT_EQ(set_->healthy_devices(), 0);
}

// FakePath aborts where the counters are not zero when its work runs.
TEST_F(HostBackendTest, CountersThatAFailedCallLeftAreZeroForTheNext) {
  Make(1, {.lanes = 1});
  const Call call(Lengths(16, 16));
  path_->set_on_launch([&](const cuda::Launch& launch) {
    driver_->Enqueue(launch.stream, [counters = launch.counters] { counters[1] = 7; });
    return absl::InternalError("half of the kernels were launched");
  });
  EXPECT_EQ(RunForward(*backend_, call).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(set_->healthy_devices(), 1);
  path_->set_on_launch(nullptr);
  EXPECT_TRUE(RunForward(*backend_, call).ok());
}

TEST_F(HostBackendTest, AnOrdinaryErrorFailsTheCallAlone) {
  Make(1);
  const Call call(Lengths(16, 16));
  for (const char* what : {"CopyToDevice", "CopyToHost", "RecordEvent", "TakeError"}) {
    SCOPED_TRACE(what);
    // The error of an earlier call of the thread is not this call's.
    driver_->FailNext(what, cudaErrorInvalidConfiguration,
                      what == std::string("TakeError") ? 1 : 0);
    const absl::Status failed = RunForward(*backend_, call).status();
    EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(failed.message()), HasSubstr("cudaErrorInvalidConfiguration"));
    EXPECT_TRUE(RunForward(*backend_, call).ok());
  }
  path_->set_on_launch([](const cuda::Launch&) { return absl::InternalError("no"); });
  EXPECT_EQ(RunForward(*backend_, call).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(set_->healthy_devices(), 1);
  EXPECT_EQ(set_->stats(*set_->devices()[0]).busy_lanes, 0);
}

// Every point at which a call touches the driver, failing once: never OK with a wrong result.
TEST_F(HostBackendTest, NoFailureYieldsAResult) {
  Case c = Lengths(700, 90);
  c.batch = 2;
  c.heads = 4;
  c.dim = c.dim_v = 20;
  c.storage = exactness::Storage::kGaps;
  const Call call(c);
  const auto want = RunForward(*cpu_, call);
  ASSERT_TRUE(want.ok());
  for (const char* what : {"CopyToDevice", "CopyToHost", "RecordEvent", "Pack", "work"}) {
    int failures = 0;
    for (int n = 0; n < 40; ++n) {
      Make(1);
      driver_->FailNext(what, cudaErrorIllegalAddress, n);
      const auto got = RunForward(*backend_, call);
      if (!got.ok()) {
        ++failures;
        EXPECT_EQ(got.status().code(), absl::StatusCode::kInternal);
        EXPECT_EQ(set_->healthy_devices(), 0) << what << n;
        continue;
      }
      EXPECT_TRUE(got->out == want->out) << what << n;
      EXPECT_TRUE(got->lse == want->lse) << what << n;
    }
    EXPECT_GT(failures, 0) << what;
  }
}

TEST_F(HostBackendTest, ConcurrentCallsGiveWhatThePathAloneGives) {
  Make(2, {.lanes = 2, .poison = true});
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t) {
    callers.emplace_back([this, t] {
      ThreadPool pool(1);
      const std::unique_ptr<Backend> cpu = MakeFlashCpuBackend(&pool);
      for (const Case& c : exactness::RandomCases(20, 100 + t)) ExpectSame(*backend_, *cpu, c);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// ---- nothing to compute

TEST_F(HostBackendTest, EmptyCallsNeverTouchADevice) {
  Make(1);
  const int copies = driver_->copies_to_device();
  for (const bool sinks : {false, true}) {
    for (const auto& [rows, keys] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 9}, {9, 0}, {0, 0}}) {
      Case c = Lengths(rows, keys);
      c.batch = 2;
      c.heads = 4;
      c.kv_heads = 2;
      c.sinks = sinks;
      c.dlse = true;
      ExpectSame(*backend_, *cpu_, c);
    }
  }
  Case none = Lengths(5, 5);
  none.batch = 0;
  none.bias = exactness::BiasShape::kSharedBatch;
  none.sinks = true;
  ExpectSame(*backend_, *cpu_, none);
  EXPECT_EQ(driver_->copies_to_device(), copies);
}

}  // namespace
}  // namespace attn::cuda
