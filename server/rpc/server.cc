#include "server/rpc/server.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/api/text.h"
#include "server/config/log.h"
#include "server/execution/allocator.h"
#include "server/execution/periodic.h"
#include "server/metrics/http.h"
#include "server/rpc/canary_report.h"
#include "server/rpc/listener.h"
#include "server/rpc/server_metrics.h"
#include "server/rpc/service.h"
#include "server/rpc/service_context.h"
#include "server/rpc/status_json.h"
#include "server/status/history.h"
#include "server/status/page.h"
#include "server/status/serving_state.h"

namespace attn::server {
namespace {

constexpr std::chrono::milliseconds kRateBudget{150};
// Memory goes back to the system after this long without a call: long against the pauses of a busy
// server, short against the patience of whoever looks at its memory.
constexpr std::chrono::seconds kTrimAfter{5};
constexpr std::chrono::milliseconds kHousekeeping{1000};
constexpr std::chrono::milliseconds kLastWords{250};

std::string RequestIdPrefix() {
  std::random_device random;
  return absl::StrFormat("%08x-", random());
}

class ServerImpl final : public Server {
 public:
  ServerImpl(const ServerOptions& options, PathTable paths)
      : config_(options.config),
        metrics_(paths.has_cuda()),
        sensors_(options.sensors),
        paths_(std::move(paths)),
        buffers_(std::make_shared<BufferPool>(config_.max_inflight_bytes / 2,
                                              options.device_hooks.pinning)),
        admission_({.max_requests = config_.max_inflight_requests,
                    .max_bytes = config_.max_inflight_bytes,
                    .max_request_bytes = config_.max_request_bytes},
                   options.clock),
        executor_(config_.executor_workers, options.clock),
        watch_(config_.stream_idle_timeout),
        history_(&metrics_, options.clock),
        status_(&context_, &state_, &history_) {
    context_.config = config_;
    context_.clock = options.clock;
    context_.metrics = &metrics_;
    context_.buffers = buffers_;
    context_.admission = &admission_;
    context_.executor = &executor_;
    context_.watch = &watch_;
    context_.paths = &paths_;
    context_.rates = &rates_;
    context_.devices = options.devices;
    context_.device_hooks = options.device_hooks;
    context_.started = options.clock->Now();
    context_.request_id_prefix = RequestIdPrefix();
  }

  ~ServerImpl() override {
    if (!drained_) Stop(std::chrono::milliseconds(0));
    if (context_.device_hooks.present()) context_.device_hooks.on_unhealthy(nullptr);
    metrics_.RemoveLive();
    http_.reset();
    canary_.reset();
  }

  // Before any call: what the paths can do.
  void Prepare(const ServerOptions& options) {
    if (context_.device_hooks.present()) {
      context_.device_hooks.on_unhealthy([this] { NoteUnhealthyDevice(); });
    }
    if (options.self_test) {
      self_test_ = SelfTestAll(&paths_, CudaIndices(context_.devices));
      NoteSelfTest(self_test_);
    }
    if (options.measure_rates) {
      MeasureRates(paths_, config_.threads, kRateBudget, &rates_);
      context_.host_tflops = rates_.BestForwardFlopsPerSecond() * 1e-12;
      context_.host_copy_gb_per_s = rates_.copy_bytes_per_second() * 1e-9;
    }
    for (PathId path : kAllPaths) metrics_.SetPathAvailable(path, paths_.available(path));
    for (const auto& device : options.devices) {
      const bool cuda = device.kind() == ::attention::v1::DEVICE_KIND_CUDA;
      metrics_.SetDeviceInfo(cuda ? DeviceKind::kCuda : DeviceKind::kCpu, device.index(),
                             device.name(), device.isa(),
                             (cuda ? device.matrix_tflops() : context_.host_tflops) * 1e12,
                             (cuda ? device.copy_gb_per_s() : context_.host_copy_gb_per_s) * 1e9);
    }
    AddServerMetrics(context_, state_, sensors_, &metrics_);
  }

  absl::Status Serve() {
    if (config_.canary_interval.count() > 0) canary_ = std::make_unique<CanaryReport>(context_);
    status_.SetCanary(canary_.get());
    if (!config_.metrics_listen.empty()) {
      absl::StatusOr<std::unique_ptr<HttpServer>> http = HttpServer::Start(
          config_.metrics_listen, {.metrics = [this] { return metrics_.Scrape(); },
                                   .alive = [] { return true; },
                                   .ready = [this] { return state_.serving(); },
                                   .status = &StatusPage,
                                   .json = [this] { return status_.Json(); }});
      if (!http.ok()) return http.status();
      http_ = *std::move(http);
    }
    service_ = MakeAttentionService(&context_);
    absl::StatusOr<Listener> listener = StartListening(config_, service_.get());
    if (!listener.ok()) return listener.status();
    grpc_ = std::move(listener->server);
    addresses_ = std::move(listener->addresses);
    housekeeping_ = std::make_unique<Periodic>(kHousekeeping, [this] { KeepHouse(); });
    state_.Attach(grpc_.get());
    UpdateHealth();
    if (!paths_.any_available()) {
      log::Error("no path is available: health is NOT_SERVING, every call will be refused");
    } else if (!CanServe()) {
      log::Error("no CUDA device is healthy: health is NOT_SERVING");
    }
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return addresses_; }
  std::string metrics_address() const override {
    return http_ == nullptr ? "" : http_->bound_address();
  }

  bool Drain() override {
    {
      // Together, in this order: whoever has seen NOT_SERVING is refused from then on.
      MutexLock lock(health_mutex_);
      admission_.BeginDrain();
      state_.Set(false);
    }
    const Admission::Stats before = admission_.stats();
    log::Info("draining", {{"in_flight_requests", before.requests},
                           {"in_flight_bytes", before.bytes},
                           {"timeout_ms", config_.drain_timeout.count()}});
    const bool finished =
        admission_.WaitIdle(std::chrono::steady_clock::now() + config_.drain_timeout);
    if (!finished) {
      log::Warn("drain cut short: cancelling calls in flight",
                {{"in_flight_requests", admission_.stats().requests}});
    }
    // What has just been answered may still be on its way out; open health watches end here.
    Stop(finished ? kLastWords : std::chrono::milliseconds(0));
    drained_ = true;
    log::Info("stopped", {{"all_calls_finished", finished}});
    return finished;
  }
  void Hasten() override { admission_.Hasten(); }

  absl::Status Reload(const Config& config) override;

  Metrics& metrics() override { return metrics_; }
  const PathTable& paths() const override { return paths_; }
  const RecentCalls& recent_calls() const override { return context_.recent; }
  const std::vector<SelfTestResult>& self_test_results() const override { return self_test_; }

 private:
  // With CUDA paths there must be a device to run them: calls go there, whatever else the server
  // has.
  bool CanServe() const {
    if (!paths_.any_available()) return false;
    const bool cuda = std::any_of(kAllPaths.begin(), kAllPaths.end(), [this](PathId path) {
      return DeviceOf(path) == DeviceKind::kCuda && paths_.available(path);
    });
    if (!cuda || !context_.device_hooks.present()) return true;
    const std::vector<DeviceStatus> devices = context_.device_hooks.status();
    return std::any_of(devices.begin(), devices.end(),
                       [](const DeviceStatus& device) { return device.healthy; });
  }

  void UpdateHealth() ATTN_EXCLUDES(health_mutex_) {
    MutexLock lock(health_mutex_);
    if (!admission_.draining()) state_.Set(CanServe());
  }

  void NoteUnhealthyDevice() {
    if (CanServe()) return;
    log::Error("no CUDA device is healthy: health is NOT_SERVING");
    UpdateHealth();
  }

  // Logs failures and exports results.
  void NoteSelfTest(const std::vector<SelfTestResult>& results) {
    status_.NoteSelfTest(results);
    for (PathId path : kAllPaths) {
      bool tested = false, passed = true;
      for (const SelfTestResult& result : results) {
        if (result.path != path) continue;
        tested = true;
        if (result.status.ok()) continue;
        passed = false;
        log::Error("self-test failed: the path is disabled", {{"path", Name(path)},
                                                              {"pass", Name(result.pass)},
                                                              {"dtype", Name(result.dtype)},
                                                              {"device", result.device},
                                                              {"error", result.status.message()}});
      }
      if (!tested) continue;
      metrics_.SetSelfTestPassed(path, passed);
      tested_.insert(path);
    }
  }

  // Ends idle streams; reads the counters for the status page; gives memory back where no call came
  // for a while.
  void KeepHouse() {
    const TimePoint now = context_.clock->Now();
    watch_.Sweep(now);
    history_.Sample();
    const uint64_t calls = context_.next_request.load(std::memory_order_relaxed);
    if (calls != calls_seen_ || admission_.stats().requests > 0) {
      calls_seen_ = calls;
      last_call_ = now;
      return;
    }
    if (now < last_call_ + kTrimAfter) return;
    // The allocator keeps freed memory, and after a call of a gigabyte that is much. Also without a
    // call since the last time: messages that gRPC refuses leave memory, too.
    buffers_->Trim();
    if (context_.device_hooks.present()) context_.device_hooks.trim();
    ReleaseFreeMemory();
  }

  // Cancels what is left after `grace`, closes the listeners, stops the workers. The HTTP side
  // stays up until the end, so that a last scrape is possible.
  void Stop(std::chrono::milliseconds grace) {
    admission_.BeginDrain();
    if (canary_ != nullptr) canary_->Stop();
    if (grpc_ != nullptr) {
      grpc_->Shutdown(std::chrono::system_clock::now() + grace);
      grpc_->Wait();
    }
    executor_.Shutdown();
  }

  const Config config_;
  Metrics metrics_;
  const std::shared_ptr<const DeviceSensors> sensors_;
  Mutex health_mutex_;  // health, and what it follows from
  ServingState state_;
  Rates rates_;
  PathTable paths_;
  std::shared_ptr<BufferPool> buffers_;
  Admission admission_;
  Executor executor_;
  StreamWatch watch_;
  ServiceContext context_;
  History history_;
  StatusJson status_;
  std::vector<SelfTestResult> self_test_;
  std::set<PathId> tested_;  // Prepare() and Reload() only
  std::unique_ptr<CanaryReport> canary_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> grpc_;
  std::vector<std::string> addresses_;
  std::unique_ptr<HttpServer> http_;  // goes before what its pages read
  bool drained_ = false;
  uint64_t calls_seen_ = 0;  // KeepHouse() only, as is the next
  TimePoint last_call_{};
  std::unique_ptr<Periodic> housekeeping_;  // goes before what it uses
};

absl::Status ServerImpl::Reload(const Config& config) {
  absl::StatusOr<std::vector<PathId>> enabled = paths_.WouldEnable(config.disable_path);
  if (!enabled.ok()) return enabled.status();
  for (PathId path : *enabled) {
    if (tested_.count(path) > 0) continue;
    const std::vector<SelfTestResult> results =
        SelfTestOn(*paths_.backend(path), CudaIndices(context_.devices));
    for (const SelfTestResult& result : results) {
      if (result.status.ok()) continue;
      paths_.Disable(path, Reason::kSelfTestFailed, FailureDetail(result));
      break;
    }
    NoteSelfTest(results);
  }
  if (absl::Status s = paths_.SetDisabled(config.disable_path); !s.ok()) return s;
  for (PathId path : kAllPaths) metrics_.SetPathAvailable(path, paths_.available(path));
  UpdateHealth();
  log::Init(config.log_level, config.log_format);
  log::Info("settings read again", {{"disable-path", absl::StrJoin(config.disable_path, ",")}});
  for (const std::string& name : DifferentSettings(config_, config)) {
    if (name == "disable-path" || name == "log-level" || name == "log-format") continue;
    log::Warn("a setting has changed that needs a restart", {{"name", name}});
  }
  return absl::OkStatus();
}

std::string JsonString(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  if (absl::Status s = options.config.Check(); !s.ok()) return s;
  options.config.Resolve(AvailableMemoryBytes());
  absl::StatusOr<PathTable> paths =
      PathTable::Create(std::move(options.backends), options.config.disable_path,
                        options.config.cpu_fallback, options.absent);
  if (!paths.ok()) return paths.status();
  auto server = std::make_unique<ServerImpl>(options, *std::move(paths));
  server->Prepare(options);
  if (absl::Status s = server->Serve(); !s.ok()) return s;
  if (!options.config.ports_file.empty()) {
    if (absl::Status s = WritePortsFile(options.config.ports_file, *server); !s.ok()) return s;
  }
  return server;
}

std::vector<int> CudaIndices(const std::vector<::attention::v1::DeviceInfo>& devices) {
  std::vector<int> indices;
  for (const auto& device : devices) {
    if (device.kind() == ::attention::v1::DEVICE_KIND_CUDA) indices.push_back(device.index());
  }
  return indices;
}

absl::Status WritePortsFile(const std::string& path, const Server& server) {
  const std::string temporary = Cat(path, ".", getpid(), ".tmp");
  const std::string listen = absl::StrJoin(
      server.addresses(), ", ",
      [](std::string* out, const std::string& address) { *out += Cat(JsonString(address)); });
  std::ofstream file(temporary, std::ios::trunc);
  file << "{\"listen\": [" << listen << "], \"metrics\": " << JsonString(server.metrics_address())
       << "}\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(temporary.c_str());
    return absl::UnavailableError(Cat("--ports-file ", path, " cannot be written: ", why));
  }
  return absl::OkStatus();
}

}  // namespace attn::server
