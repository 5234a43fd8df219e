#include "server/rpc/status_calls.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/api/text.h"

namespace attn::server {
namespace {

using Json = nlohmann::ordered_json;
namespace v1 = ::attention::v1;

std::string_view PassName(v1::Pass pass) {
  return Name(pass == v1::PASS_BACKWARD ? Pass::kBackward : Pass::kForward);
}

std::string_view DeviceName(v1::DeviceKind kind) {
  return Name(kind == v1::DEVICE_KIND_CUDA ? DeviceKind::kCuda : DeviceKind::kCpu);
}

// "REASON_NOT_BUILT" as everywhere else: without the prefix.
std::string ReasonName(v1::Reason reason) {
  const std::string name = v1::Reason_Name(reason);
  const std::string prefix = "REASON_";
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

Json ShapeJson(const CallShape& shape) {
  return {{"layout", shape.layout == Layout::kThd ? "THD" : "BSHD"},
          {"dtype", Name(shape.dtype)},
          {"batch", shape.batch},
          {"seqlen_q", shape.seqlen_q},
          {"seqlen_k", shape.seqlen_k},
          {"num_heads", shape.num_heads},
          {"num_kv_heads", shape.num_kv_heads},
          {"head_dim", shape.head_dim},
          {"head_dim_v", shape.head_dim_v},
          {"causal", shape.causal}};
}

Json TimesJson(const v1::StageTimes& times) {
  return {{"parse_ns", times.parse_ns()},
          {"gather_ns", times.gather_ns()},
          {"queue_ns", times.queue_ns()},
          {"device_queue_ns", times.device_queue_ns()},
          {"host_to_device_ns", times.host_to_device_ns()},
          {"kernel_ns", times.kernel_ns()},
          {"device_to_host_ns", times.device_to_host_ns()},
          {"reply_ns", times.reply_ns()},
          {"handler_ns", times.handler_ns()}};
}

Json TrafficJson(const v1::Traffic& traffic) {
  return {{"wire_request_bytes", traffic.wire_request_bytes()},
          {"wire_response_bytes", traffic.wire_response_bytes()},
          {"host_to_device_bytes", traffic.host_to_device_bytes()},
          {"device_to_host_bytes", traffic.device_to_host_bytes()},
          {"compulsory_bytes", traffic.compulsory_bytes()},
          {"tile_bytes", traffic.tile_bytes()},
          {"standard_bytes", traffic.standard_bytes()}};
}

Json ReportJson(const v1::ExecutionReport& report) {
  Json rejections = Json::array();
  for (const v1::Rejection& rejection : report.rejections()) {
    rejections.push_back({{"path", rejection.path()},
                          {"reason", ReasonName(rejection.reason())},
                          {"detail", rejection.detail()}});
  }
  return {{"pass", PassName(report.pass())},
          {"flash", report.path_class() == v1::PATH_CLASS_FLASH},
          {"device", DeviceName(report.device_kind())},
          {"device_index", report.device_index()},
          {"path", report.path()},
          {"kernel", report.kernel()},
          {"rejections", std::move(rejections)},
          {"fused_batch", report.fused_batch()},
          {"times", TimesJson(report.times())},
          {"traffic", TrafficJson(report.traffic())},
          {"flops", report.flops()},
          {"achieved_tflops", report.achieved_tflops()},
          {"achieved_gb_per_s", report.achieved_gb_per_s()},
          {"fraction_of_roofline", report.fraction_of_roofline()},
          {"trace_id", report.trace_id()},
          {"span_id", report.span_id()}};
}

bool Answered(const CallRecord& call) {
  return call.code == absl::StatusCode::kOk && !call.report.empty();
}

auto Key(const CallShape& s, const v1::ExecutionReport& report) {
  return std::tuple(std::string_view(report.path()), report.pass(), s.layout, s.dtype, s.batch,
                    s.seqlen_q, s.seqlen_k, s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim_v,
                    s.causal);
}

struct Group {
  CallShape shape;
  v1::ExecutionReport report;  // of the first of them
  double calls = 0, kernel_ns = 0, handler_ns = 0, flops = 0;
  double compulsory_bytes = 0, tile_bytes = 0, standard_bytes = 0;

  void Add(std::chrono::nanoseconds handler, const v1::ExecutionReport& one) {
    ++calls;
    kernel_ns += static_cast<double>(one.times().kernel_ns());
    handler_ns += static_cast<double>(handler.count());
    flops += static_cast<double>(one.flops());
    compulsory_bytes += static_cast<double>(one.traffic().compulsory_bytes());
    tile_bytes += static_cast<double>(one.traffic().tile_bytes());
    standard_bytes += static_cast<double>(one.traffic().standard_bytes());
  }
};

}  // namespace

nlohmann::ordered_json CallsJson(CallRecords calls) {
  Json all = Json::array();
  for (const CallRecord& call : calls) {
    Json json = {{"id", call.request_id},
                 {"ended_ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                                  call.ended.time_since_epoch())
                                  .count()},
                 {"method", Name(call.method)},
                 {"code", CodeName(call.code)},
                 {"handler_ns", call.handler.count()},
                 {"shape", call.shape.head_dim > 0 ? ShapeJson(call.shape) : Json()}};
    if (Answered(call)) {
      json["report"] = ReportJson(call.ParseReport());
    } else {
      json["error"] = call.error;
      json["rejections"] = call.rejections;
    }
    all.push_back(std::move(json));
  }
  return all;
}

nlohmann::ordered_json ShapesJson(CallRecords calls) {
  std::vector<Group> groups;  // a few: a search is as good as a map
  for (const CallRecord& call : calls) {
    if (!Answered(call)) continue;
    v1::ExecutionReport report = call.ParseReport();
    const auto same = [&](const Group& group) {
      return Key(group.shape, group.report) == Key(call.shape, report);
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      groups.push_back({.shape = call.shape, .report = report});
      group = groups.end() - 1;
    }
    group->Add(call.handler, report);
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& a, const Group& b) { return a.calls > b.calls; });
  Json all = Json::array();
  for (const Group& group : groups) {
    const v1::ExecutionReport& report = group.report;
    const auto mean = [&group](double sum) { return std::round(sum / group.calls); };
    all.push_back({{"shape", ShapeJson(group.shape)},
                   {"pass", PassName(report.pass())},
                   {"path", report.path()},
                   {"flash", report.path_class() == v1::PATH_CLASS_FLASH},
                   {"device", DeviceName(report.device_kind())},
                   {"calls", group.calls},
                   {"kernel_ns", mean(group.kernel_ns)},
                   {"handler_ns", mean(group.handler_ns)},
                   {"flops", mean(group.flops)},
                   {"compulsory_bytes", mean(group.compulsory_bytes)},
                   {"tile_bytes", mean(group.tile_bytes)},
                   {"standard_bytes", mean(group.standard_bytes)}});
  }
  return all;
}

}  // namespace attn::server
