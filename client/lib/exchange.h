// What a call sends and what its reply must be.
#ifndef ATTN_CLIENT_LIB_EXCHANGE_H_
#define ATTN_CLIENT_LIB_EXCHANGE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/lib/client.h"
#include "proto/wire/byte_buffer.h"

namespace attn::client {

// A tensor that the reply must hold, dense.
struct ExpectedTensor {
  const char* name = "";
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
};

// What the reply must hold, in the order in which its header names the tensors.
struct ReplySpec {
  v1::Pass pass = v1::PASS_UNSPECIFIED;
  std::vector<ExpectedTensor> tensors;
  uint64_t bytes = 0;  // of all tensors
  // Not OK where the request has no valid reply (a rank is wrong, say). It is sent all the same, so
  // that the server's own message tells the caller why.
  absl::Status answerable;
};

// A call ready to be sent. The header points into nothing; payloads share the tensors' memory.
template <typename Header>
struct Exchange {
  Header header;
  std::vector<wire::OutgoingPayload> payloads;
  uint64_t payload_bytes = 0;
  ReplySpec reply;
};

// Fills in the header's tensors and says what the reply must be. Tensors that are the same bytes
// share a payload. Errors: INVALID_ARGUMENT: q, k or v (backward: out, lse or dout too) is missing,
// or a tensor's bytes do not match its dtype and shape; names the tensor.
absl::StatusOr<Exchange<v1::ForwardRequestHeader>> PrepareForward(const ForwardCall& call);
absl::StatusOr<Exchange<v1::BackwardRequestHeader>> PrepareBackward(const BackwardCall& call);

// A reply that is being received: checks it against the spec piece by piece and gathers each
// payload once, into aligned memory. Every error is INTERNAL: the server broke the contract. Not
// thread-safe.
class ReplyReader {
 public:
  explicit ReplyReader(const ReplySpec& spec) : spec_(spec) {}

  absl::Status ReadUnary(const grpc::ByteBuffer& message);
  absl::Status ReadStreamMessage(const grpc::ByteBuffer& message);

  // After the last message. Not OK where anything is missing.
  absl::Status Finish();

  uint64_t received_bytes() const { return received_bytes_; }
  std::vector<HostTensor>& tensors() { return tensors_; }  // as ReplySpec::tensors
  v1::ExecutionReport& report() { return report_; }

 private:
  struct Payload {
    uint64_t size = 0;      // what the tensors in it need
    uint64_t received = 0;  // contiguous from 0
    std::shared_ptr<std::byte> memory;
  };

  absl::Status ReadHeader(std::string_view serialized);
  absl::Status ReadReport(std::string_view serialized);
  absl::Status PlaceTensor(const ExpectedTensor& expected, const v1::Tensor& tensor);
  absl::Status Append(uint64_t index, uint64_t offset, const wire::Bytes& data);

  const ReplySpec& spec_;
  bool have_header_ = false;
  bool have_report_ = false;
  uint64_t received_bytes_ = 0;
  std::vector<Payload> payloads_;
  struct Place {
    uint32_t payload = 0;
    uint64_t offset = 0;
  };
  std::vector<Place> places_;  // as spec_.tensors
  std::vector<HostTensor> tensors_;
  v1::ExecutionReport report_;
};

}  // namespace attn::client

#endif  // ATTN_CLIENT_LIB_EXCHANGE_H_
