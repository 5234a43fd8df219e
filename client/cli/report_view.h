// An ExecutionReport for people, and as JSON.
#ifndef ATTN_CLIENT_CLI_REPORT_VIEW_H_
#define ATTN_CLIENT_CLI_REPORT_VIEW_H_

#include <google/protobuf/message.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "client/cli/format.h"
#include "client/lib/client.h"

namespace attn::cli {

// What the client saw of a call.
struct CallFacts {
  std::chrono::nanoseconds latency{0};
  bool streamed = false;
  int attempts = 1;
};

// "flash", "CPU", "NO_CUDA_DEVICE" of enum values, "?" for one that this client does not know.
std::string ClassName(client::v1::PathClass path_class);
std::string DeviceName(client::v1::DeviceKind kind);
std::string ReasonName(client::v1::Reason reason);

// Rows "label path REASON detail" of every rejection, the label on the first only.
void AddRejections(const std::string& label,
                   const google::protobuf::RepeatedPtrField<client::v1::Rejection>& rejections,
                   const Style& style, Table* table);

// The report as a page: path, rejections, times with their shares, bytes, work.
std::string RenderReport(const client::v1::ExecutionReport& report, const CallFacts& facts,
                         const Style& style);

// A message as protobuf's JSON mapping has it (lowerCamelCase names, 64-bit integers as strings),
// zero-valued fields included so that keys are stable.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

// {"latencyNs", "wireNs", "streamed", "attempts"}; wireNs is latency less the server's handler
// time.
nlohmann::ordered_json ToJson(const client::v1::ExecutionReport& report, const CallFacts& facts);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_REPORT_VIEW_H_
