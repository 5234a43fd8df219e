// The only file that includes spdlog: it is header-only and slow to compile.
#include "server/config/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>

#include "absl/strings/str_format.h"
#include "kernels/api/text.h"

namespace attn::server::log {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

spdlog::logger& Logger() {
  // Never destroyed: threads may log until the process ends.
  static spdlog::logger* logger = [] {
    auto* made = new spdlog::logger("attnd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");  // lines come complete from Format()
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

std::string_view LevelName(LogLevel level) {
  constexpr std::string_view kNames[] = {"debug", "info", "warn", "error", "off"};
  return kNames[static_cast<int>(level)];
}

// Escapes for a JSON string. Bytes over 0x7F pass: text in this process is UTF-8, and where a
// caller's bytes are not, they are replaced.
void AppendEscaped(std::string* out, std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += static_cast<char>(c);
    } else if (c == '\n') {
      *out += "\\n";
    } else if (c < 0x20 || c == 0x7F) {
      *out += absl::StrFormat("\\u%04x", c);
    } else if (c < 0x80) {
      *out += static_cast<char>(c);
    } else {
      const size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
      bool valid = c >= 0xC2 && c <= 0xF4 && i + length <= text.size();
      for (size_t k = 1; valid && k < length; ++k) valid = (text[i + k] & 0xC0) == 0x80;
      if (valid) {
        out->append(text.substr(i, length));
        i += length;
        continue;
      }
      *out += "\\ufffd";
    }
    ++i;
  }
}

void AppendQuoted(std::string* out, std::string_view text) {
  *out += '"';
  AppendEscaped(out, text);
  *out += '"';
}

void AppendValue(std::string* out, const Field& field, LogFormat format) {
  if (const auto* text = std::get_if<std::string_view>(&field.value)) {
    const bool plain = format == LogFormat::kText && !text->empty() &&
                       text->find_first_of(" \"\\=\n\t\r") == std::string_view::npos;
    if (plain) {
      AppendEscaped(out, *text);
    } else {
      AppendQuoted(out, *text);
    }
  } else if (const auto* flag = std::get_if<bool>(&field.value)) {
    *out += *flag ? "true" : "false";
  } else if (const auto* real = std::get_if<double>(&field.value)) {
    if (std::isfinite(*real)) {
      *out += absl::StrFormat("%.6g", *real);
    } else {
      *out += "null";  // JSON has no infinity
    }
  } else if (const auto* whole = std::get_if<int64_t>(&field.value)) {
    *out += Cat(*whole);
  } else {
    *out += Cat(std::get<uint64_t>(field.value));
  }
}

std::string Now() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() %
      1'000'000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%06dZ", utc.tm_year + 1900, utc.tm_mon + 1,
                         utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, micros);
}

}  // namespace

void Init(LogLevel level, LogFormat format) {
  g_level.store(level, std::memory_order_relaxed);
  g_format.store(format, std::memory_order_relaxed);
}

bool Enabled(LogLevel level) { return level >= g_level.load(std::memory_order_relaxed); }

std::string Format(LogFormat format, std::string_view time, LogLevel level, std::string_view event,
                   std::initializer_list<Field> fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line += Cat("{\"time\":\"", time, "\",\"level\":\"", LevelName(level), "\",\"event\":");
    AppendQuoted(&line, event);
    for (const Field& field : fields) {
      line += ',';
      AppendQuoted(&line, field.key);
      line += ':';
      AppendValue(&line, field, format);
    }
    line += '}';
    return line;
  }
  line += Cat(time, " ", LevelName(level), " ");
  AppendEscaped(&line, event);
  for (const Field& field : fields) {
    line += Cat(" ", field.key, "=");
    AppendValue(&line, field, format);
  }
  return line;
}

void Write(LogLevel level, std::string_view event, std::initializer_list<Field> fields) {
  if (!Enabled(level)) return;
  const std::string line =
      Format(g_format.load(std::memory_order_relaxed), Now(), level, event, fields);
  Logger().log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace attn::server::log
