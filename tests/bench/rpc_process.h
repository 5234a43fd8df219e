// A real attnd process, seen from outside: its ports, its metrics page, its memory.
#ifndef ATTN_TESTS_BENCH_RPC_PROCESS_H_
#define ATTN_TESTS_BENCH_RPC_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attn::bench {

// Starts `arguments[0]` with the rest as arguments; standard output and error go to `log` (empty:
// inherited). The child is killed when the calling thread ends. Returns the process id; a program
// that cannot be executed ends with status 127.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& arguments, const std::string& log);

// A directory that goes with its owner.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class ServerProcess {
 public:
  // Starts attnd on free ports of 127.0.0.1 and waits until it serves.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::string& attnd,
                                                              std::vector<std::string> flags);
  // Kills the process where Stop() has not ended it.
  ~ServerProcess();

  const std::string& target() const { return target_; }
  std::string log() const;

  // Sum of all samples of a metric. Errors: UNAVAILABLE, NOT_FOUND.
  absl::StatusOr<double> Metric(const std::string& name) const;
  // Waits until nothing is in flight or queued. Errors: DEADLINE_EXCEEDED, naming a gauge.
  absl::Status WaitIdle(std::chrono::milliseconds timeout) const;
  // Resident memory now. Unit: bytes; 0: the process is gone.
  uint64_t ResidentBytes() const;

  // SIGTERM, and waits. Errors: an exit status other than 0 (INTERNAL), DEADLINE_EXCEEDED.
  absl::Status Stop(std::chrono::seconds timeout);

 private:
  ServerProcess() = default;

  TemporaryDirectory directory_;
  std::string log_path_;
  std::string target_;
  int metrics_port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace attn::bench

#endif  // ATTN_TESTS_BENCH_RPC_PROCESS_H_
