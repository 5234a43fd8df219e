#include "client/cli/npy.h"

#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

absl::Status Bad(std::string_view what) {
  return absl::InvalidArgumentError(Cat("not a usable .npy file: ", what));
}

// The header's fields, as text or value.
struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// Reads the subset of Python literals that numpy writes: {'key': value, …} with strings, booleans
// and tuples of integers.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  absl::StatusOr<Header> Read() {
    Header header;
    if (!Take('{')) return Bad("the header does not start with '{'");
    while (!Take('}')) {
      absl::StatusOr<std::string> key = String();
      if (!key.ok()) return key.status();
      if (!Take(':')) return Bad(Cat("no ':' after header key '", *key, "'"));
      if (absl::Status status = Value(*key, &header); !status.ok()) return status;
      if (!Take(',') && Peek() != '}') return Bad("no ',' or '}' after a header value");
    }
    SkipSpace();
    if (at_ != text_.size()) return Bad("text after the header's dictionary");
    if (!header.descr) return Bad("the header has no 'descr'");
    if (!header.fortran_order) return Bad("the header has no 'fortran_order'");
    if (!header.shape) return Bad("the header has no 'shape'");
    return header;
  }

 private:
  absl::Status Value(const std::string& key, Header* header) {
    if (key == "descr") {
      if (header->descr) return Bad("the header has 'descr' twice");
      if (Peek() == '[') return Bad("structured element types are not supported");
      absl::StatusOr<std::string> descr = String();
      if (!descr.ok()) return descr.status();
      header->descr = *std::move(descr);
      return absl::OkStatus();
    }
    if (key == "fortran_order") {
      if (header->fortran_order) return Bad("the header has 'fortran_order' twice");
      if (TakeWord("True")) {
        header->fortran_order = true;
      } else if (TakeWord("False")) {
        header->fortran_order = false;
      } else {
        return Bad("'fortran_order' is neither True nor False");
      }
      return absl::OkStatus();
    }
    if (key == "shape") {
      if (header->shape) return Bad("the header has 'shape' twice");
      absl::StatusOr<std::vector<int64_t>> shape = Tuple();
      if (!shape.ok()) return shape.status();
      header->shape = *std::move(shape);
      return absl::OkStatus();
    }
    return Bad(Cat("unknown header key '", key.substr(0, 64), "'"));
  }

  absl::StatusOr<std::vector<int64_t>> Tuple() {
    std::vector<int64_t> values;
    if (!Take('(')) return Bad("'shape' is not a tuple");
    while (!Take(')')) {
      if (values.size() == kMaxFileRank) {
        return Bad(Cat("'shape' has more than ", kMaxFileRank, " axes"));
      }
      SkipSpace();
      int64_t value = 0;
      const char* first = text_.data() + at_;
      const auto [end, error] = std::from_chars(first, text_.data() + text_.size(), value);
      if (error == std::errc::result_out_of_range) return Bad("an extent of 'shape' is over 2^63");
      if (error != std::errc{}) return Bad("'shape' holds something that is not an integer");
      at_ += end - first;
      if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote long integers so
      values.push_back(value);
      if (!Take(',') && Peek() != ')') return Bad("no ',' or ')' after an extent of 'shape'");
    }
    return values;
  }

  absl::StatusOr<std::string> String() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return Bad("a string was expected in the header");
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return Bad("a string in the header does not end");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    if (value.find('\\') != std::string::npos) return Bad("a string in the header has an escape");
    at_ = end + 1;
    return value;
  }

  void SkipSpace() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) != nullptr && text_[at_] != 0) {
      ++at_;
    }
  }
  // The next character that is not white space; 0 at the end.
  char Peek() {
    SkipSpace();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Take(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }
  bool TakeWord(std::string_view word) {
    SkipSpace();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

struct DescrName {
  std::string_view code;  // without the byte order
  FileDType dtype;
};
constexpr DescrName kDescrs[] = {
    {"f8", FileDType::kF64},   {"f4", FileDType::kF32}, {"f2", FileDType::kF16},
    {"i8", FileDType::kI64},   {"i4", FileDType::kI32}, {"i2", FileDType::kI16},
    {"i1", FileDType::kI8},    {"u8", FileDType::kU64}, {"u4", FileDType::kU32},
    {"u2", FileDType::kU16},   {"u1", FileDType::kU8},  {"b1", FileDType::kBool},
    {"V2", FileDType::kVoid2},
};

absl::StatusOr<FileDType> DTypeFromDescr(std::string_view descr) {
  if (descr.size() >= 2) {
    const char order = descr[0];
    const std::string_view code = descr.substr(1);
    for (const DescrName& known : kDescrs) {
      if (known.code != code) continue;
      if (SizeOf(known.dtype) > 1 && order == '>') {
        return Bad(Cat("big-endian elements ('", descr, "') are not supported"));
      }
      if (order == '<' || order == '|' || order == '>') return known.dtype;
    }
  }
  return Bad(Cat("element type '", descr.substr(0, 32), "' is not supported"));
}

uint64_t LittleEndian(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i - 1]);
  return value;
}

}  // namespace

absl::StatusOr<NpyView> ParseNpy(std::span<const std::byte> bytes) {
  if (bytes.size() < kMagic.size() + 4 ||
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return Bad("it does not start with the .npy magic");
  }
  const int major = static_cast<int>(bytes[6]);
  const int minor = static_cast<int>(bytes[7]);
  if (major < 1 || major > 3 || minor != 0) {
    return Bad(Cat("version ", major, ".", minor, "; 1.0, 2.0 and 3.0 are supported"));
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t header_at = 8 + length_bytes;
  if (bytes.size() < header_at) return Bad("it ends within the header");
  const uint64_t header_size = LittleEndian(bytes.subspan(8, length_bytes));
  if (header_size > kMaxNpyHeaderBytes) {
    return Bad(Cat("a header of ", header_size, " bytes; at most ", kMaxNpyHeaderBytes));
  }
  if (header_size > bytes.size() - header_at) {
    return Bad(
        Cat("a header of ", header_size, " bytes, but only ", bytes.size() - header_at, " follow"));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + header_at, header_size);
  absl::StatusOr<Header> header = HeaderReader(text).Read();
  if (!header.ok()) return header.status();

  NpyView view;
  absl::StatusOr<FileDType> dtype = DTypeFromDescr(*header->descr);
  if (!dtype.ok()) return dtype.status();
  if (*header->fortran_order) {
    return Bad("Fortran order is not supported; save numpy.ascontiguousarray(array)");
  }
  view.dtype = *dtype;
  view.shape = *std::move(header->shape);
  absl::StatusOr<int64_t> size = CheckedByteSize(view.shape, SizeOf(view.dtype));
  if (!size.ok()) return Bad(Message(size.status()));
  view.data = bytes.subspan(header_at + header_size);
  if (view.data.size() != static_cast<uint64_t>(*size)) {
    return Bad(Cat("shape ", ShapeString(view.shape), " of ", Name(view.dtype), " takes ", *size,
                   " bytes, but ", view.data.size(), " follow the header"));
  }
  return view;
}

std::string NpyPrefix(FileDType dtype, std::span<const int64_t> shape) {
  std::string_view code = "V2";
  const FileDType written = dtype == FileDType::kBF16 ? FileDType::kU16 : dtype;
  for (const DescrName& known : kDescrs) {
    if (known.dtype == written) code = known.code;
  }
  const char order = SizeOf(dtype) == 1 || written == FileDType::kVoid2 ? '|' : '<';
  std::string header =
      Cat("{'descr': '", std::string_view(&order, 1), code, "', 'fortran_order': False, 'shape': (",
          JoinExtents(shape), shape.size() == 1 ? ",), }" : "), }");
  // The format asks for a newline at the end and data at a multiple of 64 bytes.
  const bool long_header = header.size() + 1 + 64 > 0xFFFF;
  const size_t before = 8 + (long_header ? 4 : 2);
  header.append((64 - (before + header.size() + 1) % 64) % 64, ' ');
  header.push_back('\n');
  std::string prefix(kMagic);
  prefix.push_back(long_header ? 2 : 1);
  prefix.push_back(0);
  for (size_t i = 0; i < (long_header ? 4 : 2); ++i) {
    prefix.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
  }
  return prefix + header;
}

}  // namespace attn::cli
