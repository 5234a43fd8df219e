// What the load tester calls, and what it learns from a call.
#ifndef ATTN_CLIENT_LOAD_TARGET_H_
#define ATTN_CLIENT_LOAD_TARGET_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/lib/client.h"

namespace attn::load {

namespace v1 = client::v1;

// Where tensor bytes come from. Grows with the server.
enum class PayloadSource : uint8_t { kInline };

// One kind of request in the mix. All calls of an entry send the same tensors.
struct MixEntry {
  std::string name;
  double weight = 1;
  v1::Pass pass = v1::PASS_FORWARD;
  PayloadSource payload = PayloadSource::kInline;
  std::string summary;            // for people
  client::ForwardCall forward;    // PASS_FORWARD; also makes out and lse for a backward
  client::BackwardCall backward;  // PASS_BACKWARD
};

// Id of a W3C trace, 32 lower-case hex digits, and the metadata that carries it.
struct TraceContext {
  std::string trace_id;
  std::string traceparent;  // "00-<trace id>-<span id>-01"
};
// Random ids. Thread-safe.
TraceContext MakeTraceContext();

struct CallRequest {
  uint32_t entry = 0;
  std::string traceparent;
  bool keep_results = false;
  const std::atomic<bool>* cancel = nullptr;
};

struct CallReply {
  absl::Status status;
  int64_t call_ns = 0;  // last attempt, from handing the request to gRPC to the last byte
  int attempts = 1;
  bool streamed = false;
  v1::ExecutionReport report;
  // With keep_results: out, lse, or dq, dk, dv and, where they exist, dbias, dsink.
  std::vector<client::HostTensor> results;
};

class Target {
 public:
  virtual ~Target() = default;
  // Blocks until the call has ended. Thread-safe.
  virtual CallReply Call(const CallRequest& request) = 0;
};

// Calls a server through the client library.
class ClientTarget final : public Target {
 public:
  ClientTarget(client::Client* client, client::CallOptions options)
      : client_(client), options_(std::move(options)) {}

  // Calls each entry once, so that a request the server refuses is known before the load begins;
  // fills in out and lse of backward entries from a forward call. Errors: the server's; names the
  // entry.
  absl::Status Prepare(std::vector<MixEntry>* entries, const std::atomic<bool>* cancel);

  CallReply Call(const CallRequest& request) override;

 private:
  CallReply CallForward(const MixEntry& entry, const CallRequest& request,
                        const client::CallOptions& options);
  CallReply CallBackward(const MixEntry& entry, const CallRequest& request,
                         const client::CallOptions& options);

  client::Client* const client_;
  const client::CallOptions options_;
  const std::vector<MixEntry>* entries_ = nullptr;
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_TARGET_H_
