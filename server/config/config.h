// What attnd is told by flags, environment and file.
#ifndef ATTN_SERVER_CONFIG_CONFIG_H_
#define ATTN_SERVER_CONFIG_CONFIG_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attn::server {

enum class LogLevel { kDebug, kInfo, kWarn, kError, kOff };
enum class LogFormat { kText, kJson };

// A protobuf message of 2 GiB or more aborts the process that serializes it, so no unary message
// may come near: this leaves 1 MiB for what stands beside tensors.
inline constexpr uint64_t kUnaryHardCapBytes = (uint64_t{2} << 30) - (uint64_t{1} << 20);

// Values as given. 0 in a field marked "auto" is replaced by Resolve().
struct Config {
  // Listening.
  std::vector<std::string> listen = {"127.0.0.1:50051"};  // host:port, [v6]:port or unix:/path
  std::string metrics_listen = "127.0.0.1:9464";          // host:port; empty: no HTTP
  std::string ports_file;                                 // JSON with the bound addresses
  bool allow_insecure_public = false;

  // TLS. PEM files.
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;  // set: clients must show a certificate of this authority

  // Logs, to standard error.
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;

  // Work.
  int threads = 0;           // compute threads; 0: one per core
  int executor_workers = 0;  // calls that run at once; auto: 2, with GPUs enough for all lanes
  bool cpu_fallback = false;
  std::vector<std::string> disable_path;
  std::chrono::milliseconds drain_timeout{30'000};
  std::chrono::milliseconds stream_idle_timeout{60'000};  // 0: none
  std::chrono::milliseconds canary_interval{15'000};      // 0: no canary

  // GPUs. Without CUDA paths in the binary these change nothing.
  std::string cuda_devices = "all";        // "all", "none", or indices: "0,2"
  int device_lanes = 4;                    // calls under way at once on each GPU
  uint64_t device_memory_limit_bytes = 0;  // of each GPU; 0: nine tenths of what is free

  // Limits.
  uint64_t max_unary_bytes = uint64_t{256} << 20;
  uint64_t max_request_bytes = 0;   // auto: 16 GiB, at most half of memory
  uint64_t max_inflight_bytes = 0;  // auto: half of memory
  int max_inflight_requests = 256;
  int max_concurrent_streams = 256;    // of one connection
  uint64_t workspace_limit_bytes = 0;  // auto: a quarter of memory

  // Modes.
  bool self_test_only = false;
  bool check_config = false;

  bool tls() const { return !tls_cert.empty(); }

  // Replaces automatic values, given the memory this process may use.
  void Resolve(uint64_t memory_bytes);

  // Checks what can be checked without touching the system. Errors: INVALID_ARGUMENT, naming the
  // flag, the value and the limit.
  absl::Status Check() const;

  // All settings in the syntax of the config file, one a line.
  std::string ToFileText() const;
};

// Names of the settings that differ. Both resolved, or neither.
std::vector<std::string> DifferentSettings(const Config& a, const Config& b);

// What --cuda-devices says. nullopt: every device. Errors: INVALID_ARGUMENT, naming the entry.
absl::StatusOr<std::optional<std::vector<int>>> ParseCudaDevices(const std::string& text);

// Memory this process may use: of the host, or of its cgroup where that is less.
uint64_t AvailableMemoryBytes();

// Whether an address of --listen is reachable from this host only: unix sockets, localhost,
// 127.0.0.0/8 and ::1. Other host names count as public.
bool IsLoopback(const std::string& address);

struct CommandLine {
  Config config;
  std::optional<std::string> print;  // --help, --version: print this and exit with status 0
};

// Looks up an environment variable; nullopt: not set.
using Environment = std::function<std::optional<std::string>(const std::string&)>;

// Precedence: flag, then environment variable ATTND_<NAME>, then config file, then default. A list
// (listen, disable_path) is taken whole from the first of these that has it; in the environment its
// entries are separated by commas. `arguments` exclude the program name. Errors: INVALID_ARGUMENT.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const Environment& environment);

// The process environment.
std::optional<std::string> ProcessEnvironment(const std::string& name);

// "attnd 0.1.0 (commit abcdef0)".
std::string VersionText();
std::string Version();
std::string GitCommit();

// "256MiB", "1GiB", "4096", … Powers of 1024 with or without the "i"; errors name the text.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text);
std::string FormatBytes(uint64_t bytes);
// "30s", "500ms", "2m"; a number alone is seconds.
absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text);

}  // namespace attn::server

#endif  // ATTN_SERVER_CONFIG_CONFIG_H_
