// Strings and statuses. A distribution may build absl with a string_view of its own, so text
// crosses into absl as std::string.
#ifndef ATTN_CLIENT_CLI_TEXT_H_
#define ATTN_CLIENT_CLI_TEXT_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/text.h"

namespace attn::cli {

using attn::Cat;

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

// `status` with "where: " before its message.
inline absl::Status Within(std::string_view where, const absl::Status& status) {
  return absl::Status(status.code(), Cat(where, ": ", Message(status)));
}

// Whether `text` ends with `suffix` / holds `part`.
inline bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.ends_with(suffix);
}
inline bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// ASCII letters in lower case.
std::string Lower(std::string_view text);

// The pieces between separators; at least one, possibly empty.
std::vector<std::string> Split(std::string_view text, char separator);

// The whole of `text` as a decimal number.
bool ParseInteger(std::string_view text, int64_t* value);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_TEXT_H_
