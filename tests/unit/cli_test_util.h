// What the tests of the command share: files to read, and flags from a command line.
#ifndef ATTN_TESTS_UNIT_CLI_TEST_UTIL_H_
#define ATTN_TESTS_UNIT_CLI_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/flags.h"
#include "client/cli/safetensors.h"

namespace attn::cli {

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

template <typename T>
std::string Raw(std::initializer_list<T> values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

template <typename T>
std::string Raw(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A folder that goes with the test.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "attn_cli_XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string Write(const std::string& name, std::string_view contents) const {
    const std::string path = *this / name;
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

// A whole .safetensors file. `data` of the entries must stay alive.
inline std::string SafetensorsFile(std::vector<SafetensorsEntry> entries) {
  std::string file = SafetensorsPrefix(&entries, {});
  for (const SafetensorsEntry& entry : entries) {
    file.append(reinterpret_cast<const char*>(entry.data.data()), entry.data.size());
  }
  return file;
}

// The flags of a command line, which must be valid.
inline Flags MustParse(const std::vector<std::string>& arguments) {
  Flags flags;
  const absl::Status status = ParseFlags(arguments, &flags);
  EXPECT_TRUE(status.ok()) << status;
  return flags;
}

// A run of the command in this process.
struct Ran {
  int exit_code = -1;
  std::string out, err;
};
inline Ran RunCommand(const std::vector<std::string>& arguments) {
  std::ostringstream out, err;
  Ran ran;
  ran.exit_code = RunAttn(arguments, Console{out, err, false});
  ran.out = out.str();
  ran.err = err.str();
  return ran;
}

}  // namespace attn::cli

#endif  // ATTN_TESTS_UNIT_CLI_TEST_UTIL_H_
