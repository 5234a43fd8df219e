// C++ client of attention.v1: tensors in host memory in, tensors in host memory out.
#ifndef ATTN_CLIENT_LIB_CLIENT_H_
#define ATTN_CLIENT_LIB_CLIENT_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/v1/attention.pb.h"

namespace attn::client {

namespace v1 = ::attention::v1;

// A dense contiguous tensor in host memory. Bytes are shared, so copying a HostTensor copies no
// data.
struct HostTensor {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  // Keeps `bytes` alive. gRPC may hold on to bytes it was given after a call has failed, so with an
  // owner tensors are sent from where they lie, and without one (null: the caller keeps `bytes`
  // alive until the call returns) they are copied when sent.
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;

  bool empty() const { return dtype == v1::DTYPE_UNSPECIFIED; }
  // Product of the extents; -1 where one is negative or the product does not fit in 62 bits.
  int64_t NumElements() const;
  // Zero-filled, 64-byte aligned. Empty where the shape is not valid or dtype is unknown.
  static HostTensor Allocate(v1::DType dtype, std::vector<int64_t> shape);
  // Writable bytes of a tensor made by Allocate() and not yet shared.
  std::span<std::byte> mutable_bytes();
};
int64_t SizeOf(v1::DType dtype);  // bytes; 0: unknown

struct ChannelOptions {
  std::string target = "127.0.0.1:50051";  // host:port, or unix:/path
  // TLS where any of these is set. Paths of PEM files.
  std::string tls_ca;             // server's authority; empty with the others set: the system's
  std::string tls_cert, tls_key;  // this client's, for mTLS
  std::string tls_server_name;    // override of the name to check
  int channels = 1;               // connections, used round robin
  std::chrono::milliseconds connect_timeout{10'000};
  // Calls whose tensors, in or out, exceed this go by the streaming methods. Default: the server's
  // max_unary_bytes, at most 64 MiB. Messages over the server's max_unary_bytes are streamed
  // whatever this says.
  std::optional<uint64_t> stream_threshold_bytes;
  // RESOURCE_EXHAUSTED with pushback, and UNAVAILABLE, are retried this many times with jittered
  // exponential backoff, honouring grpc-retry-pushback-ms. Attention is a pure function, so every
  // method is safe to retry. No other status is retried.
  int max_retries = 3;
};

struct CallOptions {
  // From now, for the whole call, retries included.
  std::optional<std::chrono::nanoseconds> deadline;
  // Bytes sent and received so far of the current attempt, and their totals where known (0: not
  // yet). Called from the calling thread during streaming calls, at most a few times per second.
  std::function<void(uint64_t sent, uint64_t sent_total, uint64_t received,
                     uint64_t received_total)>
      progress;
  // Force the streaming or the unary method. A unary message over the server's max_unary_bytes, or
  // over 2 GiB, is refused here with RESOURCE_EXHAUSTED before anything is sent.
  std::optional<bool> streaming;
  // Asked to stop: set from any thread; the call ends with CANCELLED.
  const std::atomic<bool>* cancel = nullptr;
  // W3C Trace Context of the span that makes the call, "00-<trace id>-<span id>-<flags>"; sent with
  // each attempt. The report then has trace_id and the server's span_id. Empty: none. A malformed
  // one is refused with INVALID_ARGUMENT.
  std::string traceparent = {};
};

// Tensors of a call. `header` carries shape, options, policy and report level; its tensor fields
// are filled in by the client from the tensors here. Optional tensors may be empty.
struct AttentionInputs {
  HostTensor q, k, v;
  HostTensor alibi_slopes, bias, sinks, block_mask;
};

struct ForwardCall {
  v1::ForwardRequestHeader header;
  AttentionInputs inputs;
};
struct ForwardResult {
  HostTensor out, lse;
  v1::ExecutionReport report;
  std::chrono::nanoseconds latency{0};  // of the last attempt, from send to the last byte
  bool streamed = false;
  int attempts = 1;
};

struct BackwardCall {
  v1::BackwardRequestHeader header;
  AttentionInputs inputs;
  HostTensor out, lse, dout, dlse;  // dlse may be empty
};
struct BackwardResult {
  HostTensor dq, dk, dv, dbias, dsink;  // dbias, dsink: empty where not asked for
  v1::ExecutionReport report;
  std::chrono::nanoseconds latency{0};
  bool streamed = false;
  int attempts = 1;
};

// Thread-safe. Statuses carry the server's code and message; those that arise here are:
// INVALID_ARGUMENT (a tensor's bytes do not match its dtype and shape), RESOURCE_EXHAUSTED (a
// forced unary message is too large), DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE (no connection) and
// INTERNAL (the reply is not what the request asked for: a shape, dtype or size differs, bytes are
// missing, repeated or surplus). A result is returned only when it is whole.
class Client {
 public:
  // Connects, checks that the server answers GetServerInfo, and keeps its limits. Tries again until
  // connect_timeout while the server cannot be reached. Errors: INVALID_ARGUMENT (an option),
  // NOT_FOUND (a PEM file), UNAVAILABLE, and what GetServerInfo answers.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ChannelOptions& options);
  virtual ~Client() = default;

  virtual absl::StatusOr<ForwardResult> Forward(const ForwardCall& call,
                                                const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<BackwardResult> Backward(const BackwardCall& call,
                                                  const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<v1::PlanResponse> Plan(const v1::PlanRequest& request,
                                                const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<v1::GetServerInfoResponse> ServerInfo(const CallOptions& options = {}) = 0;
  // grpc.health.v1: true where SERVING.
  virtual absl::StatusOr<bool> Healthy(const std::string& service = "",
                                       const CallOptions& options = {}) = 0;
};

}  // namespace attn::client

#endif  // ATTN_CLIENT_LIB_CLIENT_H_
