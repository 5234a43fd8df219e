#include "client/cli/report_view.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

constexpr int kBarWidth = 40;

// The wire's share of a call: what the client saw less what the handler took.
uint64_t WireNanos(const v1::ExecutionReport& report, const CallFacts& facts) {
  const uint64_t latency = std::max<int64_t>(0, facts.latency.count());
  return latency - std::min<uint64_t>(latency, report.times().handler_ns());
}

std::string StripPrefix(const std::string& name, std::string_view prefix) {
  if (name.empty()) return "?";
  return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

std::string RenderTimes(const v1::ExecutionReport& report, const CallFacts& facts,
                        const Style& style) {
  const v1::StageTimes& times = report.times();
  const bool device = report.device_kind() == v1::DEVICE_KIND_CUDA;
  std::vector<std::pair<std::string, uint64_t>> stages = {{"wire", WireNanos(report, facts)},
                                                          {"parse", times.parse_ns()},
                                                          {"gather", times.gather_ns()},
                                                          {"queue", times.queue_ns()}};
  if (device) {
    stages.push_back({"for lane", times.device_queue_ns()});
    stages.push_back({"to device", times.host_to_device_ns()});
  }
  stages.push_back({"kernel", times.kernel_ns()});
  if (device) stages.push_back({"to host", times.device_to_host_ns()});
  stages.push_back({"reply", times.reply_ns()});
  uint64_t staged = 0;
  for (size_t i = 1; i < stages.size(); ++i) staged += stages[i].second;  // the wire's is outside
  if (times.handler_ns() > staged) stages.push_back({"between", times.handler_ns() - staged});
  uint64_t total = 0;
  for (const auto& [name, nanos] : stages) total += nanos;
  const auto row = [&](const std::string& name, uint64_t nanos, const std::string& bar) {
    const double share = total == 0 ? 0 : static_cast<double>(nanos) / static_cast<double>(total);
    return Cat("  ", PadRight(name, 10), PadLeft(FormatNanos(static_cast<double>(nanos), style), 9),
               " ", PadLeft(FormatPercent(share), 7), "  ", bar);
  };
  std::string text = style.Bold("time") + "\n";
  for (const auto& [name, nanos] : stages) {
    const double share = total == 0 ? 0 : static_cast<double>(nanos) / static_cast<double>(total);
    std::string line = row(name, nanos,
                           name == "kernel" ? style.Green(Bar(share, kBarWidth, style))
                                            : Bar(share, kBarWidth, style));
    if (!style.color) line.resize(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return Cat(text,
             row("client", std::max<int64_t>(0, facts.latency.count()),
                 Cat("latency; ", facts.streamed ? "streamed" : "unary",
                     facts.attempts > 1 ? Cat(", attempt ", facts.attempts) : "")),
             "\n");
}

std::string RenderBytes(const v1::ExecutionReport& report, const Style& style) {
  const v1::Traffic& traffic = report.traffic();
  const double most = static_cast<double>(std::max(
      {traffic.wire_request_bytes() + traffic.wire_response_bytes(),
       traffic.host_to_device_bytes() + traffic.device_to_host_bytes(), traffic.compulsory_bytes(),
       traffic.tile_bytes(), traffic.standard_bytes(), uint64_t{1}}));
  std::string text = style.Bold("bytes") + "\n";
  const auto add = [&](const std::string& name, uint64_t bytes, const std::string& note) {
    std::string line =
        Cat("  ", PadRight(name, 10), PadLeft(FormatBytes(static_cast<double>(bytes)), 9), "  ",
            Bar(static_cast<double>(bytes) / most, 20, style), "  ", note);
    line.resize(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add("wire", traffic.wire_request_bytes() + traffic.wire_response_bytes(),
      Cat("in ", FormatBytes(static_cast<double>(traffic.wire_request_bytes())), ", out ",
          FormatBytes(static_cast<double>(traffic.wire_response_bytes()))));
  if (report.device_kind() == v1::DEVICE_KIND_CUDA) {
    add("bus", traffic.host_to_device_bytes() + traffic.device_to_host_bytes(),
        Cat("to the device ", FormatBytes(static_cast<double>(traffic.host_to_device_bytes())),
            ", back ", FormatBytes(static_cast<double>(traffic.device_to_host_bytes()))));
  }
  add("compulsory", traffic.compulsory_bytes(), "inputs read once, outputs written");
  add("tiles", traffic.tile_bytes(), "what this path's loops move");
  const std::string ratio = traffic.tile_bytes() == 0
                                ? "what standard would move"
                                : Cat("standard: ",
                                      FormatRatio(static_cast<double>(traffic.standard_bytes()) /
                                                  static_cast<double>(traffic.tile_bytes())),
                                      style.Times(), " the tiles");
  add("standard", traffic.standard_bytes(), ratio);
  return text;
}

}  // namespace

std::string ClassName(v1::PathClass path_class) {
  return Lower(StripPrefix(v1::PathClass_Name(path_class), "PATH_CLASS_"));
}

std::string DeviceName(v1::DeviceKind kind) {
  return StripPrefix(v1::DeviceKind_Name(kind), "DEVICE_KIND_");
}

std::string ReasonName(v1::Reason reason) {
  return StripPrefix(v1::Reason_Name(reason), "REASON_");
}

void AddRejections(const std::string& label,
                   const google::protobuf::RepeatedPtrField<v1::Rejection>& rejections,
                   const Style& style, Table* table) {
  bool first = true;
  std::string path;
  for (const v1::Rejection& rejection : rejections) {
    table->Add({std::exchange(first, false) ? label : "",
                rejection.path() == path ? "" : rejection.path(),
                style.Yellow(ReasonName(rejection.reason())),
                rejection.sentence().empty() ? rejection.detail() : rejection.sentence()});
    path = rejection.path();
  }
}

std::string RenderReport(const v1::ExecutionReport& report, const CallFacts& facts,
                         const Style& style) {
  const bool flash = report.path_class() == v1::PATH_CLASS_FLASH;
  std::string head;
  const auto line = [&](const std::string& name, const std::string& value) {
    head += Cat(PadRight(name, 12), value, "\n");
  };
  line("path", Cat(flash ? style.Green(report.path()) : style.Yellow(report.path()), "  (",
                   ClassName(report.path_class()), ", ", DeviceName(report.device_kind()), " ",
                   report.device_index(), ")"));
  line("kernel", report.kernel());
  line("request", Cat(report.request_id(), report.fused_batch() > 1
                                               ? Cat(", in a batch of ", report.fused_batch())
                                               : ", ran alone"));
  if (!report.trace_id().empty()) {
    line("trace", Cat(report.trace_id(), ", span ", report.span_id()));
  }
  Table rejected(0);
  AddRejections(PadRight("not taken", 10), report.rejections(), style, &rejected);
  const std::string fastest =
      rejected.empty() ? Cat(PadRight("not taken", 12), "none: this is the fastest path\n") : "";
  std::string work =
      Cat(PadRight("work", 12), FormatSi(static_cast<double>(report.flops()), "FLOP"), " at ",
          FormatSi(report.achieved_tflops() * 1e12, "FLOP/s"), ", ",
          FormatSi(report.achieved_gb_per_s() * 1e9, "B/s"), " of compulsory bytes",
          report.fraction_of_roofline() > 0
              ? Cat(", ", FormatPercent(report.fraction_of_roofline()), " of the device's roofline")
              : "",
          "\n");
  return Cat(head, fastest, rejected.ToString(), "\n", RenderTimes(report, facts, style), "\n",
             RenderBytes(report, style), "\n", work);
}

nlohmann::ordered_json ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return nullptr;
  return nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
}

nlohmann::ordered_json ToJson(const v1::ExecutionReport& report, const CallFacts& facts) {
  return {{"latencyNs", facts.latency.count()},
          {"wireNs", WireNanos(report, facts)},
          {"streamed", facts.streamed},
          {"attempts", facts.attempts}};
}

}  // namespace attn::cli
