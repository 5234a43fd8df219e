// The paths of this server and why some of them are off.
#ifndef ATTN_SERVER_EXECUTION_PATH_TABLE_H_
#define ATTN_SERVER_EXECUTION_PATH_TABLE_H_

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"

namespace attn::server {

// Changed during start-up only; read by all threads afterwards.
class PathTable {
 public:
  // A candidate for each path, fastest first. Paths without a backend stand with what `absent` says
  // of them (a path that is compiled in and finds no device), others as NOT_BUILT; paths named in
  // `disabled` as DISABLED_BY_CONFIG; with a CUDA backend present and `cpu_fallback` false, CPU
  // paths as CPU_FALLBACK_DISABLED. Errors: INVALID_ARGUMENT: `disabled` names no path (lists
  // them).
  static absl::StatusOr<PathTable> Create(std::vector<std::unique_ptr<Backend>> backends,
                                          const std::vector<std::string>& disabled,
                                          bool cpu_fallback,
                                          const std::vector<Rejection>& absent = {});

  // Adds a reason that holds for every request.
  void Disable(PathId path, Reason reason, const std::string& detail);

  std::span<const PathCandidate> candidates() const { return candidates_; }
  bool available(PathId path) const;
  bool any_available() const;

 private:
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<PathCandidate> candidates_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_PATH_TABLE_H_
