#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <sstream>
#include <vector>

#include "kernels/api/mutex.h"
#include "kernels/api/text.h"
#include "server/config/config.h"

namespace attn::server {
namespace {

constexpr std::array<std::string_view, kNumStages> kStageNames = {
    "parse",  "gather",         "queue", "device_queue", "host_to_device",
    "kernel", "device_to_host", "reply", "handler"};
constexpr std::array<std::string_view, kNumByteLevels> kLevelNames = {
    "wire_request", "wire_response", "host_to_device", "device_to_host",
    "compulsory",   "tile",          "standard"};
constexpr std::array kPassList = {Pass::kForward, Pass::kBackward};
constexpr std::array kDTypeList = {DType::kFp32, DType::kFp16, DType::kBf16};

// 10 µs is under the shortest call measured over a Unix socket; 60 s is past any sensible deadline.
const prometheus::Histogram::BucketBoundaries& StageBuckets() {
  static const auto* buckets = new prometheus::Histogram::BucketBoundaries{
      10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3,
      50e-3, 0.1,   0.25,  0.5,    1.0,    2.5,    5.0,  10.0,   30.0, 60.0};
  return *buckets;
}

std::string Str(std::string_view text) { return std::string(text); }

template <typename T>
constexpr size_t Index(T value) {
  return static_cast<size_t>(value);
}

size_t CodeIndex(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kNumCodes ? index : Index(absl::StatusCode::kUnknown);
}

}  // namespace

std::string_view Name(Method method) {
  constexpr std::array<std::string_view, kNumMethods> kNames = {
      "Forward", "Backward", "ForwardStream", "BackwardStream", "Plan", "GetServerInfo"};
  return kNames[Index(method)];
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

struct Metrics::Registry {
  struct Live {
    std::string name;
    std::string help;
    std::vector<LiveSeries> series;
  };

  prometheus::Registry registry;
  mutable Mutex mutex;
  std::vector<Live> live ATTN_GUARDED_BY(mutex);

  prometheus::Family<prometheus::Counter>& Counters(const std::string& name,
                                                    const std::string& help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<prometheus::Gauge>& Gauges(const std::string& name, const std::string& help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
};

Metrics::Metrics() : registry_(std::make_unique<Registry>()) {
  Registry& r = *registry_;
  auto& requests = r.Counters("attn_requests_total", "Calls answered, by method and status code.");
  auto& errors = r.Counters("attn_errors_total",
                            "Calls answered with a code other than OK, over all methods.");
  for (size_t code = 0; code < kNumCodes; ++code) {
    const std::string code_name = Str(CodeName(static_cast<absl::StatusCode>(code)));
    for (size_t method = 0; method < kNumMethods; ++method) {
      requests_[method][code] =
          &requests.Add({{"method", Str(Name(static_cast<Method>(method)))}, {"code", code_name}});
    }
    if (code != 0) errors_[code] = &errors.Add({{"code", code_name}});
  }
  auto& executions = r.Counters("attn_executions_total",
                                "Attention calls run to the end, by pass, path and dtype of q.");
  auto& flops = r.Counters("attn_flops_total", "Floating-point operations of visible entries.");
  auto& seconds = r.Counters("attn_kernel_seconds_total", "Time spent running attention.");
  auto& rejections =
      r.Counters("attn_rejections_total", "Reasons for which a faster path was not taken.");
  auto& available = r.Gauges("attn_path_available", "1 where the path may be chosen.");
  for (PathId path : kAllPaths) {
    const std::string path_name = Str(Name(path));
    for (Pass pass : kPassList) {
      const std::string pass_name = Str(Name(pass));
      for (DType dtype : kDTypeList) {
        executions_[Index(pass)][Index(path)][Index(dtype)] = &executions.Add(
            {{"pass", pass_name}, {"path", path_name}, {"dtype", Str(LowerName(dtype))}});
      }
      flops_[Index(pass)][Index(path)] = &flops.Add({{"pass", pass_name}, {"path", path_name}});
      kernel_seconds_[Index(pass)][Index(path)] =
          &seconds.Add({{"pass", pass_name}, {"path", path_name}});
    }
    for (Reason reason : kAllReasons) {
      rejections_[Index(path)][Index(reason)] =
          &rejections.Add({{"path", path_name}, {"reason", Str(Name(reason))}});
    }
    available_[Index(path)] = &available.Add({{"path", path_name}});
  }
  auto& bytes =
      r.Counters("attn_bytes_total", "Bytes moved, by memory level; tile and standard are models.");
  for (size_t level = 0; level < kNumByteLevels; ++level) {
    bytes_[level] = &bytes.Add({{"level", Str(kLevelNames[level])}});
  }
  auto& stages = prometheus::BuildHistogram()
                     .Name("attn_stage_seconds")
                     .Help("Time of each stage of a call that the server can see.")
                     .Register(r.registry);
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    for (Pass pass : kPassList) {
      stages_[stage][Index(pass)] = &stages.Add(
          {{"stage", Str(kStageNames[stage])}, {"pass", Str(Name(pass))}}, StageBuckets());
    }
  }
  r.Gauges("attn_build_info", "Always 1; the labels say what runs.")
      .Add({{"version", Version()}, {"commit", GitCommit()}})
      .Set(1);
  r.Gauges("attn_start_time_seconds", "When this process started, Unix time.")
      .Add({})
      .Set(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
               .count());
}

Metrics::~Metrics() = default;

void Metrics::CountRequest(Method method, absl::StatusCode code) {
  const size_t index = CodeIndex(code);
  requests_[Index(method)][index]->Increment();
  if (index != 0) errors_[index]->Increment();
}

void Metrics::CountExecution(Pass pass, PathId path, DType dtype, uint64_t flops,
                             std::chrono::nanoseconds kernel) {
  if (Index(dtype) < kDTypes) executions_[Index(pass)][Index(path)][Index(dtype)]->Increment();
  flops_[Index(pass)][Index(path)]->Increment(static_cast<double>(flops));
  kernel_seconds_[Index(pass)][Index(path)]->Increment(
      std::chrono::duration<double>(kernel).count());
}

void Metrics::CountRejection(PathId path, Reason reason) {
  rejections_[Index(path)][Index(reason)]->Increment();
}

void Metrics::CountBytes(ByteLevel level, uint64_t bytes) {
  bytes_[Index(level)]->Increment(static_cast<double>(bytes));
}

void Metrics::ObserveStage(Stage stage, Pass pass, std::chrono::nanoseconds time) {
  stages_[Index(stage)][Index(pass)]->Observe(std::chrono::duration<double>(time).count());
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
                            const std::string& isa) {
  registry_->Gauges("attn_device_info", "Always 1; the labels say what the device is.")
      .Add({{"kind", Str(Name(kind))}, {"index", Cat(index)}, {"name", name}, {"isa", isa}})
      .Set(1);
}

void Metrics::SetPathAvailable(PathId path, bool available) {
  available_[Index(path)]->Set(available ? 1 : 0);
}

void Metrics::SetSelfTestPassed(PathId path, bool passed) {
  registry_->Gauges("attn_self_test_passed", "1 where the path passed its start-up self-test.")
      .Add({{"path", Str(Name(path))}})
      .Set(passed ? 1 : 0);
}

std::string Metrics::Scrape() const {
  std::vector<prometheus::MetricFamily> families = registry_->registry.Collect();
  {
    MutexLock lock(registry_->mutex);
    for (const Registry::Live& live : registry_->live) {
      prometheus::MetricFamily family;
      family.name = live.name;
      family.help = live.help;
      family.type = prometheus::MetricType::Gauge;
      for (const LiveSeries& series : live.series) {
        prometheus::ClientMetric metric;
        for (const auto& [name, value] : series.labels) metric.label.push_back({name, value});
        metric.gauge.value = series.read();
        family.metric.push_back(std::move(metric));
      }
      families.push_back(std::move(family));
    }
  }
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

double Metrics::RequestCount(Method method, absl::StatusCode code) const {
  return requests_[Index(method)][CodeIndex(code)]->Value();
}

double Metrics::ExecutionCount(Pass pass, PathId path, DType dtype) const {
  return executions_[Index(pass)][Index(path)][Index(dtype)]->Value();
}

double Metrics::RejectionCount(PathId path, Reason reason) const {
  return rejections_[Index(path)][Index(reason)]->Value();
}

}  // namespace attn::server
