#include "proto/wire/trace_context.h"

#include <algorithm>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

namespace attn::wire {
namespace {

// "00-", 32 digits, "-", 16 digits, "-", 2 digits.
constexpr size_t kVersionSize = 2, kTraceAt = 3, kTraceSize = 32, kParentAt = 36, kParentSize = 16,
                 kFlagsAt = 53, kSize = 55;
constexpr uint8_t kKnownFlags = 0x03;

// Upper-case digits are not valid.
int Digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

bool AllHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return Digit(c) >= 0; });
}

bool AllZero(std::string_view text) { return text.find_first_not_of('0') == text.npos; }

std::string_view Strip(std::string_view text) {
  constexpr std::string_view kBlanks = " \t";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

}  // namespace

std::optional<TraceContext> TraceContext::Parse(std::string_view value) {
  value = Strip(value);
  if (value.size() < kSize) return std::nullopt;
  const std::string_view version = value.substr(0, kVersionSize);
  if (!AllHex(version) || version == "ff") return std::nullopt;
  if (value.size() > kSize && (version == "00" || value[kSize] != '-')) return std::nullopt;
  if (value[kTraceAt - 1] != '-' || value[kParentAt - 1] != '-' || value[kFlagsAt - 1] != '-') {
    return std::nullopt;
  }
  const std::string_view trace = value.substr(kTraceAt, kTraceSize);
  const std::string_view parent = value.substr(kParentAt, kParentSize);
  const std::string_view flags = value.substr(kFlagsAt, kSize - kFlagsAt);
  if (!AllHex(trace) || AllZero(trace) || !AllHex(parent) || AllZero(parent) || !AllHex(flags)) {
    return std::nullopt;
  }
  TraceContext context;
  context.trace_id_ = trace;
  context.span_id_ = parent;
  context.flags_ = static_cast<uint8_t>(Digit(flags[0]) * 16 + Digit(flags[1]));
  return context;
}

TraceContext TraceContext::Child() const {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  uint64_t id = 0;
  while (id == 0) id = random();  // 0 is not valid
  TraceContext child = *this;
  child.span_id_ = absl::StrFormat("%016x", id);
  return child;
}

std::string TraceContext::ToString() const {
  return absl::StrFormat("00-%s-%s-%02x", trace_id_, span_id_, flags_ & kKnownFlags);
}

absl::Status CheckTraceparent(std::string_view value) {
  if (TraceContext::Parse(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "traceparent \"%s\" is not valid; it is 00-<32 hex digits>-<16 hex digits>-<2 "
      "hex digits>, lower-case, with ids that are not 0",
      absl::CHexEscape(std::string(value))));
}

}  // namespace attn::wire
