#include "server/execution/path_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/api/text.h"

namespace attn::server {

absl::StatusOr<PathTable> PathTable::Create(std::vector<std::unique_ptr<Backend>> backends,
                                            const std::vector<std::string>& disabled,
                                            bool cpu_fallback,
                                            const std::vector<Rejection>& absent) {
  PathTable table;
  table.backends_ = std::move(backends);
  const bool has_cuda =
      std::any_of(table.backends_.begin(), table.backends_.end(),
                  [](const auto& b) { return DeviceOf(b->path()) == DeviceKind::kCuda; });
  for (PathId path : kAllPaths) {
    PathCandidate candidate{.path = path, .backend = nullptr, .standing = {}};
    for (const auto& backend : table.backends_) {
      if (backend->path() == path) candidate.backend = backend.get();
    }
    if (candidate.backend == nullptr) {
      for (const Rejection& reason : absent) {
        if (reason.path == path) candidate.standing.push_back(reason);
      }
      if (candidate.standing.empty()) {
        candidate.standing.push_back({path, Reason::kNotBuilt, "not compiled in"});
      }
    } else if (has_cuda && !cpu_fallback && DeviceOf(path) == DeviceKind::kCpu) {
      candidate.standing.push_back({path, Reason::kCpuFallbackDisabled, "--cpu-fallback is off"});
    }
    table.candidates_.push_back(std::move(candidate));
  }
  for (const std::string& name : disabled) {
    const std::optional<PathId> path = PathFromName(name);
    if (!path) {
      const std::string names =
          absl::StrJoin(kAllPaths, ", ", [](std::string* out, PathId p) { *out += Cat(Name(p)); });
      return absl::InvalidArgumentError(
          Cat("--disable-path \"", name, "\" is not a path; paths are ", names));
    }
    table.Disable(*path, Reason::kDisabledByConfig, "--disable-path");
  }
  return table;
}

void PathTable::Disable(PathId path, Reason reason, const std::string& detail) {
  for (PathCandidate& candidate : candidates_) {
    if (candidate.path == path) candidate.standing.push_back({path, reason, detail});
  }
}

bool PathTable::available(PathId path) const {
  return std::any_of(candidates_.begin(), candidates_.end(), [path](const PathCandidate& c) {
    return c.path == path && c.backend != nullptr && c.standing.empty();
  });
}

bool PathTable::any_available() const {
  return std::any_of(kAllPaths.begin(), kAllPaths.end(),
                     [this](PathId path) { return available(path); });
}

}  // namespace attn::server
