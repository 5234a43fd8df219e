// From the wire's words to the attention library's, and back.
#ifndef ATTN_SERVER_RPC_CONVERT_H_
#define ATTN_SERVER_RPC_CONVERT_H_

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "attention/v1/attention.pb.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "kernels/api/spec.h"
#include "proto/wire/framing.h"

namespace attn::server {

namespace v1 = ::attention::v1;

// The tensors that a request can carry.
enum class Input : uint8_t {
  kQ,
  kK,
  kV,
  kAlibiSlopes,
  kBias,
  kSinks,
  kBlockMask,
  kOut,
  kLse,
  kDout,
  kDlse
};
inline constexpr size_t kNumInputs = 11;
std::string_view Name(Input input);  // the field's name in the header: "options.bias"

// Where a tensor's bytes are: [offset_bytes, offset_bytes + span_bytes) of a payload.
struct TensorRef {
  bool present = false;
  bool has_source = false;
  uint32_t payload = 0;
  uint64_t offset_bytes = 0;
  uint64_t span_bytes = 0;  // set by LocatePayloads()
};

// A request header, understood but not yet validated.
struct ConvertedHeader {
  AttentionSpec spec;
  std::array<TensorRef, kNumInputs> tensors;
  PathPolicy policy;
  bool full_report = false;

  TensorRef& operator[](Input input) { return tensors[static_cast<size_t>(input)]; }
  const TensorRef& operator[](Input input) const { return tensors[static_cast<size_t>(input)]; }
};

// Whether the tensors must be there: Plan needs shapes alone.
enum class Purpose : uint8_t { kRun, kPlan };

// A forward header is parsed as a BackwardRequestHeader: its fields are the first seven of that
// message, with the same numbers and types. The fields that only backward has are not looked at for
// a forward. Errors: INVALID_ARGUMENT (a required field is missing or malformed, names it),
// UNIMPLEMENTED (an enum value this server does not know, names field and value). Thread-safe.
absl::Status Convert(const v1::BackwardRequestHeader& header, Pass pass, Purpose purpose,
                     ConvertedHeader* out);

// Errors: INVALID_ARGUMENT where a result would have 2^60 bytes or more, so that sizes can be added
// up without overflow afterwards. Inputs can be small and results large: strides may be 0.
absl::Status CheckOutputSizes(const AttentionProblem& problem);

// Bytes of the request's tensors by their shapes: without stride gaps, and with every repetition
// that a stride of 0 makes, since those are read too. At most 2^60 a tensor. Call after Validate().
uint64_t RequestBytes(const AttentionSpec& spec);

// RESOURCE_EXHAUSTED for a call over --max-request-bytes; names both.
absl::Status TooManyBytesError(uint64_t bytes, uint64_t limit);

// How many bytes of each payload the tensors need: (*sizes)[i] for payload i, one entry per payload
// named. Call after Validate() accepted the spec. Errors: INVALID_ARGUMENT: an index over
// kMaxPayloads, an offset that is not a multiple of the element size, an offset or extent out of
// range, a payload between that no tensor names.
absl::Status LocatePayloads(ConvertedHeader* header, std::vector<uint64_t>* sizes);

// Whether payloads of these sizes hold what the tensors need. Errors: INVALID_ARGUMENT, naming the
// tensor, its payload, offset and size, and the payload's size.
absl::Status CheckPayloadSizes(const ConvertedHeader& header, std::span<const uint64_t> sizes);

v1::DType ToProto(DType dtype);
v1::Pass ToProto(Pass pass);
v1::PathClass ToProto(PathClass path_class);
v1::DeviceKind ToProto(DeviceKind kind);
v1::Reason ToProto(Reason reason);
// `sentence` is filled in where `full`.
void ToProto(const Rejection& rejection, bool full, v1::Rejection* out);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_CONVERT_H_
