#include "server/config/config.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/api/text.h"
#include "server/config/version.h"

namespace attn::server {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;

std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string QuoteList(const std::vector<std::string>& list) {
  return Cat(
      "[",
      absl::StrJoin(list, ", ",
                    [](std::string* out, const std::string& text) { *out += Cat(Quote(text)); }),
      "]");
}

std::string_view Text(LogLevel level) {
  constexpr std::string_view kNames[] = {"debug", "info", "warn", "error", "off"};
  return kNames[static_cast<int>(level)];
}

absl::Status CheckRange(std::string_view flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Cat("--", flag, " is ", value, "; it must be ", low, " to ", high));
}

absl::Status CheckAddress(std::string_view flag, const std::string& address, bool unix_allowed) {
  if (unix_allowed &&
      (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:"))) {
    if (address.size() > address.find(':') + 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Cat("--", flag, " \"", address, "\" has no path after the colon"));
  }
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 || address.find('/') != std::string::npos ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(Cat("--", flag, " \"", address, "\" is not host:port",
                                          unix_allowed ? " or unix:/path" : "",
                                          "; the port must be 0 to 65535"));
  }
  return absl::OkStatus();
}

std::string Host(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return absl::AsciiStrToLower(host);
}

}  // namespace

void Config::Resolve(uint64_t memory_bytes) {
  if (max_request_bytes == 0) max_request_bytes = std::min(16 * kGiB, memory_bytes / 2);
  if (max_inflight_bytes == 0) max_inflight_bytes = memory_bytes / 2;
  if (workspace_limit_bytes == 0) workspace_limit_bytes = memory_bytes / 4;
  max_request_bytes = std::min(max_request_bytes, max_inflight_bytes);
  if (executor_workers == 0) executor_workers = 2;
  if (threads == 0) {
    cpu_set_t allowed;  // fewer than the host's where the process is pinned
    threads = sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  }
}

absl::Status Config::Check() const {
  if (listen.empty()) return absl::InvalidArgumentError("--listen: at least one address is needed");
  for (const std::string& address : listen) {
    if (absl::Status s = CheckAddress("listen", address, true); !s.ok()) return s;
    if (!tls() && !allow_insecure_public && !IsLoopback(address)) {
      return absl::InvalidArgumentError(Cat(
          "--listen ", address,
          " is reachable from other hosts and TLS is off: anyone there could use this server and "
          "read its traffic. Set --tls-cert and --tls-key, or listen on a loopback address, or "
          "accept the risk with --allow-insecure-public"));
    }
  }
  if (!metrics_listen.empty()) {
    if (absl::Status s = CheckAddress("metrics-listen", metrics_listen, false); !s.ok()) return s;
  }
  if (tls_cert.empty() != tls_key.empty()) {
    return absl::InvalidArgumentError(Cat("--tls-cert and --tls-key go together; --tls-",
                                          tls_cert.empty() ? "cert" : "key", " is missing"));
  }
  if (!tls_client_ca.empty() && tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  if (absl::Status s = ParseCudaDevices(cuda_devices).status(); !s.ok()) return s;
  if (max_unary_bytes < kMiB || max_unary_bytes > kUnaryHardCapBytes) {
    return absl::InvalidArgumentError(
        Cat("--max-unary-bytes is ", max_unary_bytes, "; it must be ", kMiB, " to ",
            kUnaryHardCapBytes, " (gRPC messages end below 2 GiB; ForwardStream takes any size)"));
  }
  for (absl::Status s :
       {CheckRange("threads", threads, 0, 4096),
        CheckRange("executor-workers", executor_workers, 0, 256),
        CheckRange("device-lanes", device_lanes, 1, 64),
        CheckRange("max-inflight-requests", max_inflight_requests, 1, 1'000'000),
        CheckRange("max-concurrent-streams", max_concurrent_streams, 1, 1'000'000),
        CheckRange("drain-timeout", drain_timeout.count(), 0, 86'400'000),
        CheckRange("stream-idle-timeout", stream_idle_timeout.count(), 0, 86'400'000),
        CheckRange("canary-interval", canary_interval.count(), 0, 86'400'000)}) {
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

std::string Config::ToFileText() const {
  std::string out;
  const auto line = [&out](std::string_view key, std::string_view value) {
    out += Cat(key, " = ", value, "\n");
  };
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  line("listen", QuoteList(listen));
  line("metrics-listen", Quote(metrics_listen));
  line("ports-file", Quote(ports_file));
  line("allow-insecure-public", flag(allow_insecure_public));
  line("tls-cert", Quote(tls_cert));
  line("tls-key", Quote(tls_key));
  line("tls-client-ca", Quote(tls_client_ca));
  line("log-level", Quote(std::string(Text(log_level))));
  line("log-format", log_format == LogFormat::kJson ? "\"json\"" : "\"text\"");
  line("threads", Cat(threads));
  line("executor-workers", Cat(executor_workers));
  line("cpu-fallback", flag(cpu_fallback));
  if (!disable_path.empty()) line("disable-path", QuoteList(disable_path));
  line("drain-timeout", Quote(Cat(drain_timeout.count(), "ms")));
  line("stream-idle-timeout", Quote(Cat(stream_idle_timeout.count(), "ms")));
  line("canary-interval", Quote(Cat(canary_interval.count(), "ms")));
  line("cuda-devices", Quote(cuda_devices));
  line("device-lanes", Cat(device_lanes));
  line("device-memory-limit", Quote(FormatBytes(device_memory_limit_bytes)));
  line("max-unary-bytes", Quote(FormatBytes(max_unary_bytes)));
  line("max-request-bytes", Quote(FormatBytes(max_request_bytes)));
  line("max-inflight-bytes", Quote(FormatBytes(max_inflight_bytes)));
  line("max-inflight-requests", Cat(max_inflight_requests));
  line("max-concurrent-streams", Cat(max_concurrent_streams));
  line("workspace-limit-bytes", Quote(FormatBytes(workspace_limit_bytes)));
  return out;
}

std::vector<std::string> DifferentSettings(const Config& a, const Config& b) {
  const auto values = [](const Config& config) {
    std::map<std::string, std::string> all;
    for (const std::string& line :
         std::vector<std::string>(absl::StrSplit(config.ToFileText(), '\n', absl::SkipEmpty()))) {
      const size_t equals = line.find(" = ");
      all[line.substr(0, equals)] = line.substr(equals + 3);
    }
    return all;
  };
  const auto before = values(a), after = values(b);
  std::vector<std::string> names;
  for (const auto& [name, value] : before) {
    const auto other = after.find(name);
    if (other == after.end() || other->second != value) names.push_back(name);
  }
  for (const auto& [name, value] : after) {
    if (before.count(name) == 0) names.push_back(name);
  }
  return names;
}

absl::StatusOr<std::optional<std::vector<int>>> ParseCudaDevices(const std::string& text) {
  if (text == "all") return std::nullopt;
  std::vector<int> indices;
  if (text == "none") return indices;
  for (const std::string& entry : std::vector<std::string>(absl::StrSplit(text, ','))) {
    int index = -1;
    if (!absl::SimpleAtoi(entry, &index) || index < 0) {
      return absl::InvalidArgumentError(Cat("--cuda-devices \"", text, "\": \"", entry,
                                            "\" is not the index of a device; write all, none, or "
                                            "indices with commas between them"));
    }
    if (std::find(indices.begin(), indices.end(), index) != indices.end()) {
      return absl::InvalidArgumentError(
          Cat("--cuda-devices \"", text, "\" names device ", index, " twice"));
    }
    indices.push_back(index);
  }
  return indices;
}

uint64_t AvailableMemoryBytes() {
  uint64_t bytes =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    uint64_t limit = 0;
    if (file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

bool IsLoopback(const std::string& address) {
  if (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:")) {
    return true;
  }
  const std::string host = Host(address);
  if (host == "localhost" || host == "::1") return true;
  // Only a dotted quad: 127.example.org is not loopback.
  const std::vector<std::string> parts = absl::StrSplit(host, '.');
  if (parts.size() != 4 || parts[0] != "127") return false;
  return std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
    int value = 0;
    return absl::SimpleAtoi(part, &value) && value >= 0 && value <= 255;
  });
}

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

std::string Version() { return ATTN_VERSION; }
std::string GitCommit() { return ATTN_GIT_COMMIT; }
std::string VersionText() { return Cat("attnd ", Version(), " (commit ", GitCommit(), ")"); }

absl::StatusOr<uint64_t> ParseBytes(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  const size_t unit_at = std::min(lower.find_first_not_of("0123456789."), lower.size());
  double number = 0;
  std::string unit = std::string(absl::StripAsciiWhitespace(lower.substr(unit_at)));
  bool ok = unit_at > 0 && absl::SimpleAtod(lower.substr(0, unit_at), &number);
  int shift = 0;
  constexpr std::string_view kUnits = "kmgt";
  if (!unit.empty() && kUnits.find(unit[0]) != std::string_view::npos) {
    shift = 10 * (static_cast<int>(kUnits.find(unit[0])) + 1);
    unit.erase(0, 1);
    if (!unit.empty() && unit[0] == 'i') unit.erase(0, 1);
  }
  ok = ok && (unit.empty() || unit == "b");
  const double bytes = std::ldexp(number, shift);
  if (!ok || !(bytes >= 0) || bytes >= 0x1p62) {
    return absl::InvalidArgumentError(
        Cat("\"", text, "\" is not a size; write bytes, or 64KiB, 256MiB, 1GiB, 1TiB"));
  }
  uint64_t exact = 0;  // a plain integer keeps all its digits
  if (absl::SimpleAtoi(lower, &exact)) return exact;
  return static_cast<uint64_t>(bytes);
}

std::string FormatBytes(uint64_t bytes) {
  if (bytes > 0 && bytes % kGiB == 0) return Cat(bytes / kGiB, "GiB");
  if (bytes > 0 && bytes % kMiB == 0) return Cat(bytes / kMiB, "MiB");
  return Cat(bytes);
}

absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text) {
  const size_t unit_at = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string unit = text.substr(unit_at);
  double number = 0;
  const double scale = unit.empty() || unit == "s" ? 1e3 : unit == "ms" ? 1 : unit == "m" ? 6e4 : 0;
  if (unit_at == 0 || !absl::SimpleAtod(text.substr(0, unit_at), &number) || scale == 0 ||
      number * scale > 1e12) {
    return absl::InvalidArgumentError(
        Cat("\"", text, "\" is not a duration; write 30s, 500ms or 2m"));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(number * scale));
}

}  // namespace attn::server
