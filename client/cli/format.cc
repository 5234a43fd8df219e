#include "client/cli/format.h"

#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

std::string Escape(bool color, std::string_view code, std::string_view text) {
  if (!color) return std::string(text);
  return Cat("\x1b[", code, "m", text, "\x1b[0m");
}

// Three significant digits, for values below 1,000 or so.
std::string ThreeDigits(double value) {
  if (value < 9.995) return absl::StrFormat("%.2f", value);
  if (value < 99.95) return absl::StrFormat("%.1f", value);
  return absl::StrFormat("%.0f", value);
}

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

void TrimRight(std::string* text) { text->resize(text->find_last_not_of(' ') + 1); }

bool LocaleIsUtf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = Environment(name);
    if (value.empty()) continue;
    const std::string lower = Lower(value);
    return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
  }
  return false;
}

}  // namespace

std::string Style::Bold(std::string_view text) const { return Escape(color, "1", text); }
std::string Style::Dim(std::string_view text) const { return Escape(color, "2", text); }
std::string Style::Red(std::string_view text) const { return Escape(color, "31", text); }
std::string Style::Green(std::string_view text) const { return Escape(color, "32", text); }
std::string Style::Yellow(std::string_view text) const { return Escape(color, "33", text); }
std::string Style::Cyan(std::string_view text) const { return Escape(color, "36", text); }

Style DetectStyle(bool ascii, ColorMode color) {
  Style style;
  style.unicode = !ascii && LocaleIsUtf8();
  style.color = color == ColorMode::kAlways ||
                (color == ColorMode::kAuto && isatty(STDOUT_FILENO) != 0 &&
                 Environment("NO_COLOR").empty() && Environment("TERM") != "dumb");
  return style;
}

int DisplayWidth(std::string_view text) {
  int width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
      continue;
    }
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) ++width;
  }
  return width;
}

std::string PadRight(std::string_view text, int width) {
  std::string padded(text);
  padded.append(std::max(0, width - DisplayWidth(text)), ' ');
  return padded;
}

std::string PadLeft(std::string_view text, int width) {
  return std::string(std::max(0, width - DisplayWidth(text)), ' ').append(text);
}

std::string FormatBytes(double bytes) {
  static constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrFormat("%.0f B", bytes);
  size_t unit = 0;
  while (bytes >= 1023.5 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return Cat(ThreeDigits(bytes), " ", kUnits[unit]);
}

std::string FormatNanos(double nanos, const Style& style) {
  if (nanos < 999.5) return absl::StrFormat("%.0f ns", nanos);
  if (nanos < 999.5e3) return Cat(ThreeDigits(nanos / 1e3), style.unicode ? " µs" : " us");
  if (nanos < 999.5e6) return Cat(ThreeDigits(nanos / 1e6), " ms");
  if (nanos < 9999.5e9) return Cat(ThreeDigits(nanos / 1e9), " s");
  return Cat(FormatCount(static_cast<uint64_t>(std::llround(nanos / 1e9))), " s");
}

std::string FormatCount(uint64_t value) {
  std::string digits = Cat(value);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, 1, ',');
  return digits;
}

std::string FormatSi(double value, std::string_view unit) {
  static constexpr std::string_view kPrefixes[] = {"", "K", "M", "G", "T", "P", "E"};
  if (value < 999.5)
    return Cat(value < 100 && value != std::floor(value) ? ThreeDigits(value)
                                                         : absl::StrFormat("%.0f", value),
               " ", unit);
  size_t prefix = 0;
  while (value >= 999.5 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1000;
    ++prefix;
  }
  return Cat(ThreeDigits(value), " ", kPrefixes[prefix], unit);
}

std::string FormatPercent(double fraction) { return absl::StrFormat("%.1f%%", 100 * fraction); }

std::string FormatRatio(double ratio) {
  if (!std::isfinite(ratio)) return "-";
  if (ratio >= 999.5 && ratio < 1e18) return FormatCount(static_cast<uint64_t>(ratio + 0.5));
  return ThreeDigits(ratio);
}

std::string Bar(double fraction, int width, const Style& style) {
  static constexpr std::string_view kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  if (!(fraction > 0)) return std::string(width, ' ');
  const int steps = style.unicode ? 8 : 1;
  const int filled =
      std::clamp(static_cast<int>(std::lround(fraction * width * steps)), 1, width * steps);
  std::string bar;
  for (int i = 0; i < filled / steps; ++i) bar.append(style.unicode ? "█" : "#");
  bar.append(kEighths[filled % steps]);
  return PadRight(bar, width);
}

std::string Rule(const Style& style) {
  std::string rule;
  for (int i = 0; i < kPageWidth; ++i) rule.append(style.unicode ? "─" : "-");
  return rule;
}

std::vector<std::string> Wrap(std::string_view text, int width) {
  std::vector<std::string> lines;
  std::string line;
  for (const std::string& word : Split(text, ' ')) {
    if (word.empty()) continue;
    if (!line.empty() && DisplayWidth(line) + 1 + DisplayWidth(word) > width) {
      lines.push_back(std::exchange(line, ""));
    }
    if (!line.empty()) line.push_back(' ');
    line.append(word);
  }
  if (!line.empty() || lines.empty()) lines.push_back(line);
  return lines;
}

std::string Table::ToString() const {
  std::vector<int> widths;
  for (const std::vector<std::string>& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) {
      if (c == widths.size()) widths.push_back(0);
      // A row's last cell flows to the edge of the page, so it does not widen its column.
      if (c + 1 < row.size()) widths[c] = std::max(widths[c], DisplayWidth(row[c]));
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line(indent_, ' ');
    for (size_t c = 0; c + 1 < row.size(); ++c) line += PadRight(row[c], widths[c] + 2);
    if (!row.empty()) {
      const int left = DisplayWidth(line);
      const std::string& last = row.back();
      const std::vector<std::string> lines = left + DisplayWidth(last) <= kPageWidth
                                                 ? std::vector<std::string>{last}
                                                 : Wrap(last, std::max(20, kPageWidth - left));
      line += lines[0];
      for (size_t i = 1; i < lines.size(); ++i) {
        TrimRight(&line);
        line += Cat("\n", std::string(left, ' '), lines[i]);
      }
    }
    TrimRight(&line);
    text += line + "\n";
  }
  return text;
}

absl::StatusOr<std::chrono::nanoseconds> ParseDuration(std::string_view text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {"m", 60e9}, {"h", 3600e9}};
  const size_t digits = text.find_first_not_of("0123456789.");
  const std::string_view unit = digits == std::string_view::npos ? "s" : text.substr(digits);
  double value = 0;
  const std::string_view number = text.substr(0, digits);
  const char* end = number.data() + number.size();
  const auto [stop, error] = std::from_chars(number.data(), end, value);
  if (error == std::errc{} && stop == end) {
    for (const auto& [name, scale] : kUnits) {
      if (name != unit) continue;
      const double nanos = value * scale;
      if (nanos >= 1 && nanos <= 24 * 3600e9) {
        return std::chrono::nanoseconds(static_cast<int64_t>(nanos));
      }
      return absl::InvalidArgumentError(Cat("'", text, "' is not within 1 ns and 24 h"));
    }
  }
  return absl::InvalidArgumentError(Cat("'", text, "' is not a duration such as 500ms, 30s or 2m"));
}

}  // namespace attn::cli
