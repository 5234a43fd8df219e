// Text for people: numbers with units, aligned columns, bars, wrapped lines. Nothing here knows of
// attention.
#ifndef ATTN_CLIENT_CLI_FORMAT_H_
#define ATTN_CLIENT_CLI_FORMAT_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace attn::cli {

// Widest line that attn prints, in columns.
inline constexpr int kPageWidth = 80;

// What the terminal can show. Colour only ever repeats what the text says.
struct Style {
  bool unicode = true;
  bool color = false;

  std::string Bold(std::string_view text) const;
  std::string Dim(std::string_view text) const;
  std::string Red(std::string_view text) const;
  std::string Green(std::string_view text) const;
  std::string Yellow(std::string_view text) const;
  std::string Cyan(std::string_view text) const;

  // One glyph or its ASCII stand-in.
  std::string_view Times() const { return unicode ? "×" : "x"; }
  std::string_view Dot() const { return unicode ? "·" : "-"; }
  std::string_view Arrow() const { return unicode ? "→" : "->"; }
  std::string_view Squared() const { return unicode ? "²" : "^2"; }
};

enum class ColorMode { kAuto, kAlways, kNever };

// Unicode: unless `ascii`, or LC_ALL, LC_CTYPE, LANG (the first that is set and not empty) names a
// locale that is not UTF-8. Colour: kAuto means stdout is a terminal, NO_COLOR is unset or empty,
// and TERM is not "dumb".
Style DetectStyle(bool ascii, ColorMode color);

// Columns that `text` takes: UTF-8 code points, escape sequences not counted.
int DisplayWidth(std::string_view text);
std::string PadRight(std::string_view text, int width);
std::string PadLeft(std::string_view text, int width);

// "512 B", "1.50 KiB", "3.00 MiB".
std::string FormatBytes(double bytes);
// "850 ns", "12.3 µs" ("us" in ASCII), "4.10 ms", "1.25 s".
std::string FormatNanos(double nanos, const Style& style);
// "1,048,576".
std::string FormatCount(uint64_t value);
// `value` with an SI prefix: FormatSi(2.1e9, "FLOP") is "2.10 GFLOP".
std::string FormatSi(double value, std::string_view unit);
// "63.6%".
std::string FormatPercent(double fraction);
// "11.0", "8.04", "1,204": a ratio at three digits.
std::string FormatRatio(double ratio);

// A bar of `fraction` (clamped to [0, 1]) of `width` columns, padded to `width`; where fraction > 0
// at least a sliver shows. Unicode draws eighths of a column.
std::string Bar(double fraction, int width, const Style& style);

// A horizontal rule of the page's width.
std::string Rule(const Style& style);

// Breaks at spaces into lines of at most `width` columns; a longer word stays whole.
std::vector<std::string> Wrap(std::string_view text, int width);

// Rows of cells, columns padded to their widest cell, two spaces between. The last column is
// wrapped to what is left of the page, and may be given fewer cells than there are columns.
class Table {
 public:
  explicit Table(int indent) : indent_(indent) {}
  void Add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.empty(); }
  std::string ToString() const;

 private:
  int indent_;
  std::vector<std::vector<std::string>> rows_;
};

// "500ms", "30s", "2m", "1h", "250us"; a number alone is seconds. Over 0, at most 24 h. Errors:
// INVALID_ARGUMENT.
absl::StatusOr<std::chrono::nanoseconds> ParseDuration(std::string_view text);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_FORMAT_H_
