#include "client/cli/safetensors.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

absl::Status Bad(std::string_view what) {
  return absl::InvalidArgumentError(Cat("not a usable safetensors file: ", what));
}

constexpr FileDType kNamedDTypes[] = {
    FileDType::kF64, FileDType::kF32, FileDType::kF16, FileDType::kBF16, FileDType::kI64,
    FileDType::kI32, FileDType::kI16, FileDType::kI8,  FileDType::kU64,  FileDType::kU32,
    FileDType::kU16, FileDType::kU8,  FileDType::kBool};

FileDType DTypeFromName(std::string_view name) {
  for (const FileDType dtype : kNamedDTypes) {
    if (Name(dtype) == name) return dtype;
  }
  return FileDType::kOther;
}

// A tensor as the header states it.
struct Stated {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;
};

// Takes the header as a stream of events, because a parsed JSON document would have hidden
// duplicate keys. Every handler returns false, with status_ set, at the first thing that is not of
// the format.
class HeaderHandler {
 public:
  absl::Status status() const { return status_; }
  std::vector<Stated>& tensors() { return tensors_; }

  bool null() { return Value("null"); }
  bool boolean(bool) { return Value("a boolean"); }
  bool number_integer(int64_t) { return Value("a negative number"); }
  bool number_float(double, const std::string&) { return Value("a fraction"); }
  bool binary(std::vector<uint8_t>&) { return Value("binary data"); }

  bool number_unsigned(uint64_t value) {
    if (state_ != State::kArray) return Value("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail(Cat(Where(), " holds ", value, ", which is over 2^63"));
    }
    if (array_->size() == kMaxFileRank) {
      return Fail(Cat(Where(), " has more than ", kMaxFileRank, " entries"));
    }
    array_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) {
    if (state_ == State::kMetadata) return true;
    if (state_ == State::kTensor && key_ == "dtype") {
      tensors_.back().dtype = value;
      return true;
    }
    return Value("a string");
  }

  bool start_object(size_t) {
    if (state_ == State::kStart) {
      state_ = State::kTop;
      return true;
    }
    if (state_ == State::kTop) {
      if (key_ == "__metadata__") {
        state_ = State::kMetadata;
      } else {
        state_ = State::kTensor;
        tensors_.push_back({.name = key_, .dtype = {}, .shape = {}, .offsets = {}});
      }
      return true;
    }
    return Value("an object");
  }

  bool key(std::string& value) {
    key_ = value;
    if (state_ == State::kTop && !names_.insert(value).second) {
      return Fail(Cat("'", value.substr(0, 128), "' is there twice"));
    }
    if (state_ == State::kTensor) {
      const Stated& tensor = tensors_.back();
      if (value != "dtype" && value != "shape" && value != "data_offsets") {
        return Fail(Cat(Where(), " is not a field of the format"));
      }
      if ((value == "dtype" && tensor.dtype) || (value == "shape" && tensor.shape) ||
          (value == "data_offsets" && tensor.offsets)) {
        return Fail(Cat(Where(), " is there twice"));
      }
    }
    return true;
  }

  bool end_object() {
    if (state_ == State::kTensor) {
      const Stated& tensor = tensors_.back();
      if (!tensor.dtype || !tensor.shape || !tensor.offsets) {
        return Fail(
            Cat("tensor '", tensor.name.substr(0, 128), "' lacks dtype, shape or data_offsets"));
      }
    }
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }

  bool start_array(size_t) {
    if (state_ != State::kTensor || key_ == "dtype") return Value("an array");
    Stated& tensor = tensors_.back();
    std::optional<std::vector<int64_t>>& target = key_ == "shape" ? tensor.shape : tensor.offsets;
    array_ = &target.emplace();
    state_ = State::kArray;
    return true;
  }

  bool end_array() {
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return Fail(Cat("the header is not JSON at byte ", position));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kTensor, kArray, kEnd };

  bool Value(std::string_view what) { return Fail(Cat(Where(), " is ", what)); }
  bool Fail(std::string what) {
    if (status_.ok()) status_ = Bad(what);
    return false;
  }
  std::string Where() const {
    if (state_ == State::kStart) return "the header";
    const std::string key = key_.substr(0, 128);
    if (state_ == State::kTop) return Cat("'", key, "'");
    if (state_ == State::kMetadata) return Cat("__metadata__ '", key, "'");
    return Cat("'", key, "' of tensor '", tensors_.back().name.substr(0, 128), "'");
  }

  State state_ = State::kStart;
  std::string key_;
  std::vector<int64_t>* array_ = nullptr;
  std::vector<Stated> tensors_;
  std::unordered_set<std::string> names_;
  absl::Status status_;
};

absl::StatusOr<SafetensorsEntry> Check(Stated stated, std::span<const std::byte> data) {
  const std::string where = Cat("tensor '", stated.name.substr(0, 128), "': ");
  if (stated.offsets->size() != 2) {
    return Bad(Cat(where, "data_offsets has ", stated.offsets->size(), " entries instead of 2"));
  }
  const int64_t begin = (*stated.offsets)[0];
  const int64_t end = (*stated.offsets)[1];
  if (begin > end) return Bad(Cat(where, "data_offsets run from ", begin, " to ", end));
  if (static_cast<uint64_t>(end) > data.size()) {
    return Bad(Cat(where, "data_offsets end at ", end, ", but the file holds ", data.size(),
                   " bytes of data"));
  }
  SafetensorsEntry entry;
  entry.name = std::move(stated.name);
  entry.dtype_name = *std::move(stated.dtype);
  entry.dtype = DTypeFromName(entry.dtype_name);
  entry.shape = *std::move(stated.shape);
  entry.data = data.subspan(begin, end - begin);
  // The element size of kOther is unknown, so only overflow is checked there.
  absl::StatusOr<int64_t> size =
      CheckedByteSize(entry.shape, std::max<int64_t>(SizeOf(entry.dtype), 1));
  if (!size.ok()) return Bad(Cat(where, Message(size.status())));
  if (entry.dtype != FileDType::kOther && *size != end - begin) {
    return Bad(Cat(where, "shape ", ShapeString(entry.shape), " of ", entry.dtype_name, " takes ",
                   *size, " bytes, but data_offsets hold ", end - begin));
  }
  return entry;
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensors(std::span<const std::byte> bytes) {
  if (bytes.size() < 8) return Bad("it is shorter than 8 bytes");
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | static_cast<uint8_t>(bytes[i]);
  if (header_size > kMaxSafetensorsHeaderBytes) {
    return Bad(Cat("a header of ", header_size, " bytes; at most ", kMaxSafetensorsHeaderBytes));
  }
  if (header_size > bytes.size() - 8) {
    return Bad(Cat("a header of ", header_size, " bytes, but only ", bytes.size() - 8, " follow"));
  }
  const char* text = reinterpret_cast<const char*>(bytes.data()) + 8;
  // The format asks for '{' as the first byte, so that other files are told apart at once.
  if (header_size == 0 || text[0] != '{') return Bad("the header does not start with '{'");
  HeaderHandler handler;
  const bool parsed = nlohmann::json::sax_parse(text, text + header_size, &handler);
  if (!handler.status().ok()) return handler.status();
  if (!parsed) return Bad("the header is not JSON");

  const std::span<const std::byte> data = bytes.subspan(8 + header_size);
  std::vector<SafetensorsEntry> entries;
  entries.reserve(handler.tensors().size());
  for (Stated& stated : handler.tensors()) {
    absl::StatusOr<SafetensorsEntry> entry = Check(std::move(stated), data);
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::stable_sort(
      entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
        return std::pair(a.data.data(), a.data.size()) < std::pair(b.data.data(), b.data.size());
      });
  const std::byte* expected = data.data();
  for (const SafetensorsEntry& entry : entries) {
    if (entry.data.data() != expected) {
      return Bad(Cat("tensor '", entry.name.substr(0, 128), "' starts at ",
                     entry.data.data() - data.data(), ", but the data before it end at ",
                     expected - data.data()));
    }
    expected += entry.data.size();
  }
  if (expected != data.data() + data.size()) {
    return Bad(
        Cat(data.data() + data.size() - expected, " bytes after the last tensor belong to none"));
  }
  return entries;
}

std::string SafetensorsPrefix(std::vector<SafetensorsEntry>* entries,
                              const std::map<std::string, std::string>& metadata) {
  std::stable_sort(entries->begin(), entries->end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return SizeOf(a.dtype) > SizeOf(b.dtype);
                   });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const SafetensorsEntry& entry : *entries) {
    nlohmann::ordered_json& stated = header[entry.name];
    stated["dtype"] = std::string(Name(entry.dtype));
    stated["shape"] = entry.shape;
    stated["data_offsets"] = {offset, offset + entry.data.size()};
    offset += entry.data.size();
  }
  // Names may hold bytes that are not UTF-8; they are replaced rather than thrown over.
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix.push_back(static_cast<char>(text.size() >> (8 * i) & 0xFF));
  return prefix + text;
}

}  // namespace attn::cli
