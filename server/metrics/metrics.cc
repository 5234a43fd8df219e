#include "server/metrics/metrics.h"

#include <algorithm>

#include "kernels/api/text.h"
#include "server/config/config.h"
#include "server/metrics/registry.h"

namespace attn::server {
namespace {

// 10 µs is under the shortest call measured over a Unix socket; 60 s is past any sensible deadline.
constexpr double kStageBounds[] = {10e-6,  25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3,
                                   2.5e-3, 5e-3,  10e-3, 25e-3,  50e-3,  0.1,    0.25,
                                   0.5,    1.0,   2.5,   5.0,    10.0,   30.0,   60.0};
constexpr double kBatchBounds[] = {1, 2, 4, 8, 16, 32, 64, 128};

template <typename T>
constexpr size_t Index(T value) {
  return static_cast<size_t>(value);
}

size_t CodeIndex(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kNumCodes ? index : Index(absl::StatusCode::kUnknown);
}

size_t ReasonIndex(std::optional<Reason> reason) { return reason ? Index(*reason) : 0; }

double Seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::string_view Name(Method method) {
  constexpr std::array<std::string_view, kNumMethods> kNames = {
      "Forward", "Backward", "ForwardStream", "BackwardStream", "Plan", "GetServerInfo"};
  return kNames[Index(method)];
}

std::string_view Name(CanaryResult result) {
  constexpr std::array<std::string_view, kNumCanaryResults> kNames = {"ok", "failed", "late"};
  return kNames[Index(result)];
}

std::string_view CodeName(absl::StatusCode code) {
  constexpr std::array<std::string_view, kNumCodes> kNames = {"OK",
                                                              "CANCELLED",
                                                              "UNKNOWN",
                                                              "INVALID_ARGUMENT",
                                                              "DEADLINE_EXCEEDED",
                                                              "NOT_FOUND",
                                                              "ALREADY_EXISTS",
                                                              "PERMISSION_DENIED",
                                                              "RESOURCE_EXHAUSTED",
                                                              "FAILED_PRECONDITION",
                                                              "ABORTED",
                                                              "OUT_OF_RANGE",
                                                              "UNIMPLEMENTED",
                                                              "INTERNAL",
                                                              "UNAVAILABLE",
                                                              "DATA_LOSS",
                                                              "UNAUTHENTICATED"};
  return kNames[CodeIndex(code)];
}

size_t HeadDimRange(int64_t head_dim) {
  const auto at = std::lower_bound(kHeadDimBounds.begin(), kHeadDimBounds.end(), head_dim);
  return std::min<size_t>(at - kHeadDimBounds.begin(), kHeadDimBounds.size() - 1);
}

std::string_view HeadDimLabel(size_t range) {
  constexpr std::array<std::string_view, kHeadDimBounds.size()> kNames = {"1-32", "33-64", "65-128",
                                                                          "129-256", "257-512"};
  return kNames[range];
}

bool CountsAsFlash(PathId path, bool has_cuda) {
  return ClassOf(path) == PathClass::kFlash && (!has_cuda || DeviceOf(path) == DeviceKind::kCuda);
}

std::optional<Reason> FallbackReason(std::span<const Rejection> rejections, bool has_cuda) {
  std::optional<PathId> path;
  std::optional<Reason> reason;
  for (const Rejection& rejection : rejections) {  // fastest path first
    if (!CountsAsFlash(rejection.path, has_cuda) || path == rejection.path) continue;
    path = rejection.path;
    reason = rejection.reason;
  }
  return reason;
}

Metrics::Metrics(bool has_cuda) : has_cuda_(has_cuda), registry_(std::make_unique<Registry>()) {
  for (auto& stage : stages_) {
    for (HistogramCells& histogram : stage) histogram.SetBounds(kStageBounds);
  }
  for (HistogramCells& histogram : batches_) histogram.SetBounds(kBatchBounds);
  for (HistogramCells& histogram : canary_seconds_) histogram.SetBounds(kStageBounds);

  auto& available = registry_->Gauges("attn_path_available", "1 where the path may be chosen.");
  for (PathId path : kAllPaths) {
    registry_->available[Index(path)] = &available.Add({{"path", std::string(Name(path))}});
  }
  registry_->Gauges("attn_build_info", "Always 1; the labels say what runs.")
      .Add({{"version", Version()}, {"commit", GitCommit()}})
      .Set(1);
  registry_->Gauges("attn_start_time_seconds", "When this process started, Unix time.")
      .Add({})
      .Set(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
               .count());
}

Metrics::~Metrics() = default;

void Metrics::CountRequest(Method method, absl::StatusCode code) {
  requests_[Index(method)][CodeIndex(code)].Add(1);
}

void Metrics::CountExecution(const Execution& e) {
  const size_t pass = Index(e.pass), path = Index(e.path);
  if (Index(e.dtype) < kDTypes) {
    ExecutionCells& cells = executions_[pass][path][Index(e.dtype)][HeadDimRange(e.head_dim)];
    cells.calls.Add(1);
    cells.flops.Add(e.flops);
    cells.kernel_seconds.Add(Seconds(e.kernel));
    cells.roofline_seconds.Add(e.roofline_seconds);
  }
  bytes_[Index(ByteLevel::kCompulsory)][pass][path].Add(e.compulsory_bytes);
  bytes_[Index(ByteLevel::kTile)][pass][path].Add(e.tile_bytes);
  bytes_[Index(ByteLevel::kStandard)][pass][path].Add(e.standard_bytes);
  batches_[pass].Observe(static_cast<double>(e.batch));
  if (!CountsAsFlash(e.path, has_cuda_)) {
    fallbacks_[pass][ReasonIndex(FallbackReason(e.rejections, has_cuda_))].Add(1);
  }
  const DeviceKind kind = DeviceOf(e.path);
  for (const auto& device : devices_) {
    if (device->kind != kind || (kind == DeviceKind::kCuda && device->index != e.device)) continue;
    device->calls.Add(1);
    device->flops.Add(e.flops);
    device->bytes.Add(e.compulsory_bytes);
    device->kernel_seconds.Add(Seconds(e.kernel));
    device->roofline_seconds.Add(e.roofline_seconds);
    break;
  }
}

void Metrics::CountRejection(PathId path, Reason reason) {
  rejections_[Index(path)][Index(reason)].Add(1);
}

void Metrics::CountRefusal(Refusal refusal) { refusals_[Index(refusal)].Add(1); }

void Metrics::CountBytes(ByteLevel level, Pass pass, PathId path, uint64_t bytes) {
  bytes_[Index(level)][Index(pass)][Index(path)].Add(static_cast<double>(bytes));
}

void Metrics::ObserveStage(Stage stage, Pass pass, std::chrono::nanoseconds time) {
  stages_[Index(stage)][Index(pass)].Observe(Seconds(time));
}

void Metrics::CountCanary(Pass pass, std::optional<PathId> path, CanaryResult result,
                          std::chrono::nanoseconds latency) {
  canary_runs_[Index(pass)][path ? Index(*path) : kPaths][Index(result)].Add(1);
  canary_seconds_[Index(pass)].Observe(Seconds(latency));
}

void Metrics::AddLive(const std::string& name, const std::string& help,
                      std::vector<LiveSeries> series) {
  MutexLock lock(registry_->mutex);
  registry_->live.push_back({name, help, std::move(series)});
}

void Metrics::RemoveLive() {
  MutexLock lock(registry_->mutex);
  registry_->live.clear();
}

void Metrics::SetDeviceInfo(DeviceKind kind, int index, const std::string& name,
                            const std::string& isa, double flops_per_second,
                            double bytes_per_second) {
  const std::string kind_name(Name(kind));
  registry_->Gauges("attn_device_info", "Always 1; the labels say what the device is.")
      .Add({{"kind", kind_name}, {"index", Cat(index)}, {"name", name}, {"isa", isa}})
      .Set(1);
  registry_
      ->Gauges("attn_device_roofline_flops_per_second",
               "Matrix products at start-up; on a CPU, of its fastest path. 0: not measured.")
      .Add({{"kind", kind_name}, {"index", Cat(index)}})
      .Set(flops_per_second);
  registry_
      ->Gauges("attn_device_roofline_bytes_per_second",
               "Copying within the device's memory at start-up. 0: not measured.")
      .Add({{"kind", kind_name}, {"index", Cat(index)}})
      .Set(bytes_per_second);
  devices_.push_back(std::make_unique<DeviceCells>());
  devices_.back()->kind = kind;
  devices_.back()->index = index;
}

void Metrics::SetPathAvailable(PathId path, bool available) {
  registry_->available[Index(path)]->Set(available ? 1 : 0);
}

void Metrics::SetSelfTestPassed(PathId path, bool passed) {
  registry_->Gauges("attn_self_test_passed", "1 where the path passed its self-test.")
      .Add({{"path", std::string(Name(path))}})
      .Set(passed ? 1 : 0);
}

double Metrics::RequestCount(Method method, absl::StatusCode code) const {
  return requests_[Index(method)][CodeIndex(code)].value();
}

double Metrics::ExecutionCount(Pass pass, PathId path, DType dtype) const {
  double calls = 0;
  for (const ExecutionCells& cells : executions_[Index(pass)][Index(path)][Index(dtype)]) {
    calls += cells.calls.value();
  }
  return calls;
}

double Metrics::RejectionCount(PathId path, Reason reason) const {
  return rejections_[Index(path)][Index(reason)].value();
}

double Metrics::FallbackCount(Pass pass, std::optional<Reason> reason) const {
  return fallbacks_[Index(pass)][ReasonIndex(reason)].value();
}

Metrics::Work Metrics::work(Pass pass, PathId path) const {
  Work work;
  for (const auto& by_head_dim : executions_[Index(pass)][Index(path)]) {
    for (const ExecutionCells& cells : by_head_dim) {
      work.calls += cells.calls.value();
      work.flops += cells.flops.value();
      work.kernel_seconds += cells.kernel_seconds.value();
      work.roofline_seconds += cells.roofline_seconds.value();
    }
  }
  return work;
}

double Metrics::bytes(ByteLevel level, Pass pass, PathId path) const {
  return bytes_[Index(level)][Index(pass)][Index(path)].value();
}

const HistogramCells& Metrics::stage(Stage stage, Pass pass) const {
  return stages_[Index(stage)][Index(pass)];
}

double Metrics::CanaryCount(CanaryResult result) const {
  double runs = 0;
  for (const auto& by_path : canary_runs_) {
    for (const auto& by_result : by_path) runs += by_result[Index(result)].value();
  }
  return runs;
}

Metrics::FlashTotals Metrics::flash_totals() const {
  FlashTotals totals;
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (PathId path : kAllPaths) {
      const Work work = this->work(pass, path);
      totals.calls += work.calls;
      totals.flops += work.flops;
      if (!CountsAsFlash(path, has_cuda_)) continue;
      totals.flash_calls += work.calls;
      totals.flash_flops += work.flops;
    }
  }
  return totals;
}

}  // namespace attn::server
