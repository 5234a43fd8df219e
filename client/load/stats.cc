#include "client/load/stats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/api/text.h"

namespace attn::load {

const char* Name(Stage stage) {
  static constexpr const char* kNames[kNumStages] = {
      "wait",        "client",       "wire",   "parse",        "gather", "queue",
      "deviceQueue", "hostToDevice", "kernel", "deviceToHost", "reply",  "other"};
  return kNames[static_cast<size_t>(stage)];
}

bool IsOnServer(Stage stage) { return stage >= Stage::kParse; }

PhaseStats::PhaseStats(size_t number_of_entries, int64_t measure_from_ns, int64_t window_ns)
    : entries(number_of_entries),
      measure_from_ns_(measure_from_ns),
      window_ns_(window_ns),
      end_ns_(std::numeric_limits<int64_t>::max()) {}

// Null where the time is outside of what is measured.
Window* PhaseStats::WindowAt(int64_t time_ns) {
  if (time_ns < measure_from_ns_ || time_ns >= end_ns_) return nullptr;
  const auto index = static_cast<size_t>((time_ns - measure_from_ns_) / window_ns_);
  while (windows.size() <= index) {
    Window window;
    window.start_seconds = static_cast<double>(windows.size()) * window_ns_ * 1e-9;
    windows.push_back(window);
  }
  return &windows[index];
}

void PhaseStats::Add(const CallRecord& record) {
  if (record.intended_ns < measure_from_ns_) return;
  if (Window* window = WindowAt(record.intended_ns)) ++window->offered;
  if (record.paced) lateness.Record(record.sent_ns - record.intended_ns);
  if (absl::IsCancelled(record.reply.status)) {
    ++cancelled;  // by us, at the end
    return;
  }
  Window* const window = WindowAt(record.done_ns);
  if (record.reply.status.ok()) {
    AddOk(record);
    if (window == nullptr) return;
    const size_t index = std::max(closed_, static_cast<size_t>(window - windows.data()));
    Window* const place = WindowAt(measure_from_ns_ + static_cast<int64_t>(index) * window_ns_);
    if (place != nullptr) ++place->ok;
    open_[index].Record(record.done_ns - record.intended_ns);
    return;
  }
  ++failed;
  ++entries[record.entry].failed;
  failed_latency.Record(record.done_ns - record.intended_ns);
  Failure& failure = failures[absl::StatusCodeToString(record.reply.status.code())];
  if (failure.count++ == 0) failure.first_message = std::string(record.reply.status.message());
  if (window != nullptr) ++window->failed;
}

void PhaseStats::AddOk(const CallRecord& record) {
  const int64_t latency_ns = record.done_ns - record.intended_ns;
  const int64_t service_ns = record.done_ns - record.sent_ns;
  ++ok;
  latency.Record(latency_ns);
  service.Record(service_ns);
  EntryStats& entry = entries[record.entry];
  ++entry.ok;
  entry.latency.Record(latency_ns);
  entry.service.Record(service_ns);
  const v1::ExecutionReport& report = record.reply.report;
  const v1::Traffic& traffic = report.traffic();
  wire_request_bytes += static_cast<double>(traffic.wire_request_bytes());
  wire_response_bytes += static_cast<double>(traffic.wire_response_bytes());
  if (record.done_ns < end_ns_) {
    ++ok_in_time;
    flops_in_time += static_cast<double>(report.flops());
    bytes_in_time +=
        static_cast<double>(traffic.wire_request_bytes() + traffic.wire_response_bytes());
  }
  if (record.reply.attempts > 1) ++retried;
  if (record.reply.streamed) ++streamed;
  AddStages(record);
  AddPath(report);
  AddSlow(record);
}

void PhaseStats::AddStages(const CallRecord& record) {
  const v1::StageTimes& times = record.reply.report.times();
  const auto handler = static_cast<double>(times.handler_ns());
  const auto call = static_cast<double>(record.reply.call_ns);
  const auto service = static_cast<double>(record.done_ns - record.sent_ns);
  std::array<double, kNumStages> ns{};
  const auto at = [&ns](Stage stage) -> double& { return ns[static_cast<size_t>(stage)]; };
  at(Stage::kWait) = static_cast<double>(record.sent_ns - record.intended_ns);
  at(Stage::kClient) = std::max(0.0, service - call);
  at(Stage::kWire) = std::max(0.0, call - handler);
  at(Stage::kParse) = static_cast<double>(times.parse_ns());
  at(Stage::kGather) = static_cast<double>(times.gather_ns());
  at(Stage::kQueue) = static_cast<double>(times.queue_ns());
  at(Stage::kDeviceQueue) = static_cast<double>(times.device_queue_ns());
  at(Stage::kHostToDevice) = static_cast<double>(times.host_to_device_ns());
  at(Stage::kKernel) = static_cast<double>(times.kernel_ns());
  at(Stage::kDeviceToHost) = static_cast<double>(times.device_to_host_ns());
  at(Stage::kReply) = static_cast<double>(times.reply_ns());
  double known = 0;
  for (size_t i = 0; i < kNumStages; ++i) {
    if (IsOnServer(static_cast<Stage>(i))) known += ns[i];
  }
  at(Stage::kOther) = std::max(0.0, handler - known);
  for (size_t i = 0; i < kNumStages; ++i) stage_ns[i] += ns[i];
  handler_ns += handler;
}

void PhaseStats::AddPath(const v1::ExecutionReport& report) {
  PathCount& path = paths[report.path()];
  path.path_class = report.path_class();
  path.device_kind = report.device_kind();
  ++path.calls;
  path.flops += static_cast<double>(report.flops());
  for (const v1::Rejection& rejection : report.rejections()) {
    std::string reason = v1::Reason_Name(rejection.reason());
    if (reason.starts_with("REASON_")) reason.erase(0, 7);
    ++rejections[Cat(rejection.path(), ":", reason)];
  }
}

void PhaseStats::AddSlow(const CallRecord& record) {
  const int64_t latency_ns = record.done_ns - record.intended_ns;
  if (slowest.size() == kSlowest && latency_ns <= slowest.back().latency_ns) return;
  SlowCall call;
  call.latency_ns = latency_ns;
  call.service_ns = record.done_ns - record.sent_ns;
  call.handler_ns = static_cast<int64_t>(record.reply.report.times().handler_ns());
  call.at_seconds = static_cast<double>(record.intended_ns - measure_from_ns_) * 1e-9;
  call.entry = record.entry;
  call.trace_id = record.trace_id;
  call.request_id = record.reply.report.request_id();
  call.path = record.reply.report.path();
  const auto place = std::upper_bound(
      slowest.begin(), slowest.end(), latency_ns,
      [](int64_t value, const SlowCall& other) { return value > other.latency_ns; });
  slowest.insert(place, std::move(call));
  if (slowest.size() > kSlowest) slowest.pop_back();
}

size_t PhaseStats::CloseWindows(int64_t now_ns) {
  const int64_t until_ns = std::min(now_ns, end_ns_);
  // The last window may be cut short by the end; it closes when that has passed.
  while (measure_from_ns_ + static_cast<int64_t>(closed_ + 1) * window_ns_ <= until_ns ||
         (now_ns >= end_ns_ && closed_ < windows.size())) {
    WindowAt(measure_from_ns_ + static_cast<int64_t>(closed_) * window_ns_);
    if (closed_ >= windows.size()) break;
    if (const auto found = open_.find(closed_); found != open_.end()) {
      const Histogram& histogram = found->second;
      Window& window = windows[closed_];
      window.mean_ns = histogram.Mean();
      window.p50_ns = histogram.ValueAt(0.5);
      window.p99_ns = histogram.ValueAt(0.99);
      window.max_ns = histogram.max();
      open_.erase(found);
    }
    ++closed_;
  }
  return closed_;
}

Stability JudgeStability(const std::vector<Window>& windows, bool open_loop, double tolerance) {
  Stability result;
  if (windows.size() < kStableWindows) return result;
  std::array<double, kStableWindows> throughput{}, latency{};
  for (size_t i = 0; i < kStableWindows; ++i) {
    const Window& window = windows[windows.size() - kStableWindows + i];
    if (window.ok == 0 || (open_loop && window.offered == 0)) return result;
    throughput[i] =
        static_cast<double>(window.ok) / (open_loop ? static_cast<double>(window.offered) : 1.0);
    latency[i] = window.mean_ns;
  }
  const auto worst = [](const std::array<double, kStableWindows>& values) {
    double mean = 0;
    for (const double value : values) mean += value / kStableWindows;
    double deviation = 0;
    for (const double value : values) {
      deviation = std::max(deviation, std::abs(value - mean) / mean);
    }
    return deviation;
  };
  result.judged = true;
  result.worst_throughput = worst(throughput);
  result.worst_latency = worst(latency);
  result.stable = result.worst_throughput <= tolerance && result.worst_latency <= tolerance;
  return result;
}

}  // namespace attn::load
