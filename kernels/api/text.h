// Text of messages.
#ifndef ATTN_KERNELS_API_TEXT_H_
#define ATTN_KERNELS_API_TEXT_H_

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attn {
namespace internal {

// A distribution may build absl with a string_view of its own, which std::string_view does not
// convert to.
inline absl::string_view AsPiece(std::string_view text) { return {text.data(), text.size()}; }
template <typename T>
const T& AsPiece(const T& piece) {
  return piece;
}

}  // namespace internal

// absl::StrCat() that takes std::string_view with every build of absl. Thread-safe.
template <typename... Parts>
std::string Cat(const Parts&... parts) {
  return absl::StrCat(internal::AsPiece(parts)...);
}

}  // namespace attn

#endif  // ATTN_KERNELS_API_TEXT_H_
