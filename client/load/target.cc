#include "client/load/target.h"

#include <cstdio>
#include <random>
#include <utility>

#include "kernels/api/text.h"

namespace attn::load {
namespace {

// Everything that both kinds of results say alike.
template <typename Result>
CallReply Begin(Result* result) {
  CallReply reply;
  reply.call_ns = result->latency.count();
  reply.attempts = result->attempts;
  reply.streamed = result->streamed;
  reply.report = std::move(result->report);
  return reply;
}

CallReply Failed(const absl::Status& status) {
  CallReply reply;
  reply.status = status;
  return reply;
}

absl::Status InEntry(const MixEntry& entry, const absl::Status& status) {
  return absl::Status(status.code(),
                      Cat("entry '", entry.name, "': ", std::string(status.message())));
}

}  // namespace

TraceContext MakeTraceContext() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  // Ids of zeros alone are invalid (W3C Trace Context, 3.2.2.3 and 3.2.2.4).
  const auto number = [] {
    for (;;) {
      if (const uint64_t drawn = random(); drawn != 0)
        return static_cast<unsigned long long>(drawn);
    }
  };
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", number(), number());
  TraceContext context;
  context.trace_id = text;
  std::snprintf(text, sizeof text, "%016llx", number());
  context.traceparent = Cat("00-", context.trace_id, "-", text, "-01");
  return context;
}

absl::Status ClientTarget::Prepare(std::vector<MixEntry>* entries,
                                   const std::atomic<bool>* cancel) {
  client::CallOptions options = options_;
  options.cancel = cancel;
  for (MixEntry& entry : *entries) {
    const bool backward = entry.pass == v1::PASS_BACKWARD;
    if (!backward || entry.backward.out.empty()) {
      absl::StatusOr<client::ForwardResult> result = client_->Forward(entry.forward, options);
      if (!result.ok()) return InEntry(entry, result.status());
      if (backward) {
        entry.backward.out = result->out;
        entry.backward.lse = result->lse;
      }
    }
    if (!backward) continue;
    if (const auto result = client_->Backward(entry.backward, options); !result.ok()) {
      return InEntry(entry, result.status());
    }
  }
  entries_ = entries;
  return absl::OkStatus();
}

CallReply ClientTarget::Call(const CallRequest& request) {
  const MixEntry& entry = (*entries_)[request.entry];
  client::CallOptions options = options_;
  options.cancel = request.cancel;
  options.traceparent = request.traceparent;
  return entry.pass == v1::PASS_BACKWARD ? CallBackward(entry, request, options)
                                         : CallForward(entry, request, options);
}

CallReply ClientTarget::CallForward(const MixEntry& entry, const CallRequest& request,
                                    const client::CallOptions& options) {
  absl::StatusOr<client::ForwardResult> result = client_->Forward(entry.forward, options);
  if (!result.ok()) return Failed(result.status());
  CallReply reply = Begin(&*result);
  if (request.keep_results) reply.results = {std::move(result->out), std::move(result->lse)};
  return reply;
}

CallReply ClientTarget::CallBackward(const MixEntry& entry, const CallRequest& request,
                                     const client::CallOptions& options) {
  absl::StatusOr<client::BackwardResult> result = client_->Backward(entry.backward, options);
  if (!result.ok()) return Failed(result.status());
  CallReply reply = Begin(&*result);
  if (request.keep_results) {
    reply.results = {std::move(result->dq), std::move(result->dk), std::move(result->dv)};
    for (client::HostTensor* tensor : {&result->dbias, &result->dsink}) {
      if (!tensor->empty()) reply.results.push_back(std::move(*tensor));
    }
  }
  return reply;
}

}  // namespace attn::load
