// Structured logs: an event and fields, as text or as one JSON object a line, to standard error.
#ifndef ATTN_SERVER_CONFIG_LOG_H_
#define ATTN_SERVER_CONFIG_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/config/config.h"

namespace attn::server::log {

struct Field {
  std::string_view key;
  std::variant<std::string_view, int64_t, uint64_t, double, bool> value;

  Field(std::string_view k, std::string_view v) : key(k), value(v) {}
  Field(std::string_view k, const char* v) : key(k), value(std::string_view(v)) {}
  Field(std::string_view k, const std::string& v) : key(k), value(std::string_view(v)) {}
  Field(std::string_view k, bool v) : key(k), value(v) {}
  Field(std::string_view k, double v) : key(k), value(v) {}
  // absl may have a string_view of its own.
  template <typename T>
  requires(std::same_as<T, absl::string_view> && !std::same_as<T, std::string_view>)
      Field(std::string_view k, T v)
      : key(k), value(std::string_view(v.data(), v.size())) {}
  template <std::signed_integral T>
  Field(std::string_view k, T v) : key(k), value(static_cast<int64_t>(v)) {}
  template <std::unsigned_integral T>
  requires(!std::same_as<T, bool>) Field(std::string_view k, T v)
      : key(k), value(static_cast<uint64_t>(v)) {}
};

// Sets level and format for the process. Before the first call: info, text. Thread-safe.
void Init(LogLevel level, LogFormat format);

// Whether Write() at this level writes anything. Cheap. Thread-safe.
bool Enabled(LogLevel level);

// Thread-safe.
void Write(LogLevel level, std::string_view event, std::initializer_list<Field> fields = {});

// The line that Write() makes, without its end; `time` is printed as given. For tests.
std::string Format(LogFormat format, std::string_view time, LogLevel level, std::string_view event,
                   std::initializer_list<Field> fields);

inline void Debug(std::string_view event, std::initializer_list<Field> fields = {}) {
  if (Enabled(LogLevel::kDebug)) Write(LogLevel::kDebug, event, fields);
}
inline void Info(std::string_view event, std::initializer_list<Field> fields = {}) {
  Write(LogLevel::kInfo, event, fields);
}
inline void Warn(std::string_view event, std::initializer_list<Field> fields = {}) {
  Write(LogLevel::kWarn, event, fields);
}
inline void Error(std::string_view event, std::initializer_list<Field> fields = {}) {
  Write(LogLevel::kError, event, fields);
}

}  // namespace attn::server::log

#endif  // ATTN_SERVER_CONFIG_LOG_H_
