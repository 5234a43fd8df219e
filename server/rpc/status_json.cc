#include "server/rpc/status_json.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "kernels/api/text.h"
#include "server/rpc/service.h"
#include "server/rpc/status_calls.h"
#include "server/rpc/status_plans.h"

namespace attn::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kPasses = {Pass::kForward, Pass::kBackward};

double Seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

// Four digits are more than a chart shows, and most of the document would be digits.
double Short(double value) {
  double result = 0;
  return absl::SimpleAtod(absl::StrFormat("%.4g", value), &result) ? result : 0;
}

// Valid JSON whatever bytes the strings hold, and without '<', so that no parser of HTML finds a
// tag in it.
std::string Dump(const Json& json) {
  return absl::StrReplaceAll(json.dump(-1, ' ', true, Json::error_handler_t::replace),
                             {{"<", "\\u003c"}});
}

Json ServerJson(const ServiceContext& context, bool serving) {
  return {{"version", Version()},
          {"commit", GitCommit()},
          {"uptime_s", Seconds(context.clock->Now() - context.started)},
          {"now_ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count()},
          {"serving", serving},
          {"draining", context.admission->draining()},
          {"cuda", context.metrics->has_cuda()},
          {"cpu_fallback", context.config.cpu_fallback}};
}

Json LoadJson(const ServiceContext& context) {
  const Admission::Stats admitted = context.admission->stats();
  const Executor::Stats executor = context.executor->stats();
  const BufferPool::Stats buffers = context.buffers->stats();
  return {{"inflight_requests", admitted.requests},
          {"inflight_requests_limit", context.config.max_inflight_requests},
          {"inflight_bytes", admitted.bytes},
          {"inflight_bytes_limit", context.config.max_inflight_bytes},
          {"queued_requests", executor.queued_requests},
          {"running", executor.running},
          {"workers", context.config.executor_workers},
          {"pool_in_use_bytes", buffers.in_use_bytes},
          {"pool_retained_bytes", buffers.retained_bytes}};
}

// Devices with the rates of their rooflines, those that `attn_device_roofline_…` have.
Json DevicesJson(const ServiceContext& context) {
  std::vector<DeviceStatus> live;
  if (context.device_hooks.present()) live = context.device_hooks.status();
  Json all = Json::array();
  for (const v1::DeviceInfo& device : context.devices) {
    const bool cuda = device.kind() == v1::DEVICE_KIND_CUDA;
    Json json = {
        {"kind", Name(cuda ? DeviceKind::kCuda : DeviceKind::kCpu)},
        {"index", device.index()},
        {"name", device.name()},
        {"isa", device.isa()},
        {"cores", device.cores()},
        {"memory_bytes", device.memory_bytes()},
        {"roofline_tflops", Short(cuda ? device.matrix_tflops() : context.host_tflops)},
        {"roofline_gb_per_s", Short(cuda ? device.copy_gb_per_s() : context.host_copy_gb_per_s)},
        {"healthy", true},
        {"error", ""}};
    for (const DeviceStatus& status : live) {
      if (!cuda || status.index != device.index()) continue;
      json["healthy"] = status.healthy;
      json["error"] = status.error;
      json["busy_lanes"] = status.busy_lanes;
      json["memory_in_use_bytes"] = status.memory_in_use_bytes;
      json["memory_retained_bytes"] = status.memory_retained_bytes;
      json["memory_limit_bytes"] = status.memory_limit_bytes;
    }
    all.push_back(std::move(json));
  }
  return all;
}

Json PathsJson(const ServiceContext& context, const std::vector<SelfTestResult>& tests) {
  v1::GetServerInfoResponse info;
  FillServerInfo(context, &info);
  Json all = Json::array();
  for (const v1::PathInfo& path : info.paths()) {
    Json reasons = Json::array();
    for (const v1::Rejection& rejection : path.rejections()) {
      reasons.push_back({{"reason", Name(static_cast<Reason>(rejection.reason()))},
                         {"detail", rejection.detail()},
                         {"sentence", rejection.sentence()}});
    }
    int passed = 0;
    Json failed = Json::array();
    for (const SelfTestResult& test : tests) {
      if (Name(test.path) != path.path()) continue;
      if (test.status.ok()) {
        ++passed;
      } else {
        failed.push_back(Cat(FailureDetail(test), ": ", test.status.message()));
      }
    }
    const PathId id = *PathFromName(path.path());
    all.push_back({{"path", path.path()},
                   {"flash", path.path_class() == v1::PATH_CLASS_FLASH},
                   {"counts_as_flash", CountsAsFlash(id, context.metrics->has_cuda())},
                   {"device", Name(DeviceOf(id))},
                   {"available", path.available()},
                   {"reasons", std::move(reasons)},
                   {"self_test_passed", passed},
                   {"self_test_failed", std::move(failed)}});
  }
  return all;
}

Json CanaryJson(const ServiceContext& context, const CanaryReport* canary) {
  if (canary == nullptr) return Json();
  Json results = Json::array();
  for (const CanaryReport::Last& last : canary->last()) {
    results.push_back({{"device", last.device}, {"pass", Name(last.pass)}, {"ok", last.ok}});
  }
  Json runs = Json::object();
  for (CanaryResult result : {CanaryResult::kOk, CanaryResult::kFailed, CanaryResult::kLate}) {
    runs[std::string(Name(result))] = context.metrics->CanaryCount(result);
  }
  return {{"interval_s", Seconds(context.config.canary_interval)},
          {"age_s", Seconds(canary->age())},
          {"runs", std::move(runs)},
          {"last", std::move(results)}};
}

// Sums since the server started.
Json TotalsJson(const Metrics& metrics) {
  Json codes = Json::object();
  double requests = 0;
  for (size_t code = 0; code < kNumCodes; ++code) {
    double n = 0;
    for (size_t m = 0; m < kNumMethods; ++m) {
      n += metrics.RequestCount(static_cast<Method>(m), static_cast<absl::StatusCode>(code));
    }
    requests += n;
    if (n > 0) codes[std::string(CodeName(static_cast<absl::StatusCode>(code)))] = n;
  }
  const Metrics::FlashTotals flash = metrics.flash_totals();
  Json paths = Json::array(), fallbacks = Json::array();
  for (Pass pass : kPasses) {
    for (PathId path : kAllPaths) {
      const Metrics::Work work = metrics.work(pass, path);
      if (work.calls == 0) continue;
      paths.push_back({{"pass", Name(pass)},
                       {"path", Name(path)},
                       {"flash", CountsAsFlash(path, metrics.has_cuda())},
                       {"calls", work.calls},
                       {"flops", work.flops},
                       {"kernel_s", work.kernel_seconds},
                       {"roofline_s", work.roofline_seconds},
                       {"compulsory_bytes", metrics.bytes(ByteLevel::kCompulsory, pass, path)},
                       {"tile_bytes", metrics.bytes(ByteLevel::kTile, pass, path)},
                       {"standard_bytes", metrics.bytes(ByteLevel::kStandard, pass, path)}});
    }
    const auto add = [&](std::optional<Reason> reason) {
      const double calls = metrics.FallbackCount(pass, reason);
      if (calls == 0) return;
      fallbacks.push_back({{"pass", Name(pass)},
                           {"reason", reason ? Name(*reason) : std::string_view("UNKNOWN")},
                           {"calls", calls}});
    };
    add(std::nullopt);
    for (Reason reason : kAllReasons) add(reason);
  }
  return {{"requests", requests},
          {"codes", std::move(codes)},
          {"flash",
           {{"calls", flash.calls},
            {"flash_calls", flash.flash_calls},
            {"flops", flash.flops},
            {"flash_flops", flash.flash_flops}}},
          {"paths", std::move(paths)},
          {"fallbacks", std::move(fallbacks)}};
}

// A column for each figure, so that names stand once.
Json HistoryJson(const std::vector<Interval>& intervals, TimePoint now) {
  Json columns = Json::object();
  const auto add = [&](const char* name, auto value) {
    Json& column = columns[name] = Json::array();
    for (const Interval& interval : intervals) column.push_back(Short(value(interval)));
  };
  add("age_s", [now](const Interval& i) { return Seconds(now - i.end); });
  add("seconds", [](const Interval& i) { return i.seconds; });
  add("requests", [](const Interval& i) { return i.requests; });
  add("errors", [](const Interval& i) { return i.errors; });
  add("calls", [](const Interval& i) { return i.flash.calls; });
  add("flash_calls", [](const Interval& i) { return i.flash.flash_calls; });
  add("flops", [](const Interval& i) { return i.flash.flops; });
  add("flash_flops", [](const Interval& i) { return i.flash.flash_flops; });
  add("kernel_s", [](const Interval& i) { return i.kernel_seconds; });
  add("roofline_s", [](const Interval& i) { return i.roofline_seconds; });
  add("compulsory_bytes", [](const Interval& i) { return i.compulsory_bytes; });
  add("tile_bytes", [](const Interval& i) { return i.tile_bytes; });
  add("standard_bytes", [](const Interval& i) { return i.standard_bytes; });
  add("wire_in_bytes", [](const Interval& i) { return i.wire_in_bytes; });
  add("wire_out_bytes", [](const Interval& i) { return i.wire_out_bytes; });
  add("handler_calls", [](const Interval& i) { return i.handler_calls; });
  add("handler_mean_s", [](const Interval& i) { return i.handler_mean; });
  add("handler_p50_s", [](const Interval& i) { return i.handler_p50; });
  add("handler_p99_s", [](const Interval& i) { return i.handler_p99; });
  return columns;
}

}  // namespace

StatusJson::StatusJson(const ServiceContext* context, const ServingState* serving,
                       const History* history)
    : context_(context), serving_(serving), history_(history) {}

void StatusJson::NoteSelfTest(const std::vector<SelfTestResult>& results) {
  MutexLock lock(mutex_);
  self_test_.insert(self_test_.end(), results.begin(), results.end());
}

std::string StatusJson::Json() {
  MutexLock lock(mutex_);
  const TimePoint now = context_->clock->Now();
  if (made_.empty() || now >= made_at_ + kMaxAge) {
    made_ = Make();
    made_at_ = now;
  }
  return made_;
}

std::string StatusJson::Make() {
  const uint64_t version = context_->paths->version();
  if (plans_version_ != version) {
    plans_ = Dump(PlansJson(*context_));
    plans_version_ = version;
  }
  const auto calls = context_->recent.Snapshot();
  nlohmann::ordered_json json = {
      {"server", ServerJson(*context_, serving_->serving())},
      {"load", LoadJson(*context_)},
      {"devices", DevicesJson(*context_)},
      {"paths", PathsJson(*context_, self_test_)},
      {"canary", CanaryJson(*context_, canary_)},
      {"totals", TotalsJson(*context_->metrics)},
      {"history", HistoryJson(history_->Snapshot(), context_->clock->Now())},
      {"shapes", ShapesJson(calls)},
      {"calls", CallsJson(calls)}};
  // What is rarely made anew is kept as text.
  std::string text = Dump(json);
  text.pop_back();
  return Cat(text, ",\"plans_version\":", version, ",\"plans\":", plans_, "}");
}

}  // namespace attn::server
