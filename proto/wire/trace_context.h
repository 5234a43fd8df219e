// W3C Trace Context: where a call stands in its caller's trace.
#ifndef ATTN_PROTO_WIRE_TRACE_CONTEXT_H_
#define ATTN_PROTO_WIRE_TRACE_CONTEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace attn::wire {

// The name of the metadata; its value is "00-<trace id>-<parent id>-<flags>".
inline constexpr char kTraceparent[] = "traceparent";

// A valid one. Source: W3C Trace Context, "traceparent Header".
class TraceContext {
 public:
  // nullopt: not valid, and to be ignored as the specification asks. Blanks around the value are
  // none of its part. Of a version that is not known yet the fields of version 00 are read.
  static std::optional<TraceContext> Parse(std::string_view value);

  const std::string& trace_id() const { return trace_id_; }  // 32 lower-case hex digits
  const std::string& span_id() const { return span_id_; }    // 16: of the parent, or of this span
  bool sampled() const { return (flags_ & 1) != 0; }

  // A span below this one, with an id of its own. Thread-safe.
  TraceContext Child() const;

  // Version 00, with the flags that this version knows: sampled and random.
  std::string ToString() const;

 private:
  TraceContext() = default;
  std::string trace_id_, span_id_;
  uint8_t flags_ = 0;
};

// For a value that somebody states: INVALID_ARGUMENT where it is not valid, with the value and the
// form it must have.
absl::Status CheckTraceparent(std::string_view value);

}  // namespace attn::wire

#endif  // ATTN_PROTO_WIRE_TRACE_CONTEXT_H_
