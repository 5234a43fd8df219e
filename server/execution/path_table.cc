#include "server/execution/path_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/api/text.h"

namespace attn::server {
namespace {

absl::StatusOr<std::vector<PathId>> PathsNamed(const std::vector<std::string>& names) {
  std::vector<PathId> paths;
  for (const std::string& name : names) {
    const std::optional<PathId> path = PathFromName(name);
    if (!path) {
      const std::string all =
          absl::StrJoin(kAllPaths, ", ", [](std::string* out, PathId p) { *out += Cat(Name(p)); });
      return absl::InvalidArgumentError(
          Cat("--disable-path \"", name, "\" is not a path; paths are ", all));
    }
    if (std::find(paths.begin(), paths.end(), *path) == paths.end()) paths.push_back(*path);
  }
  return paths;
}

}  // namespace

absl::StatusOr<PathTable> PathTable::Create(std::vector<std::unique_ptr<Backend>> backends,
                                            const std::vector<std::string>& disabled,
                                            bool cpu_fallback,
                                            const std::vector<Rejection>& absent) {
  PathTable table;
  table.backends_ = std::move(backends);
  const bool has_cuda = table.has_cuda();
  {
    MutexLock lock(table.mutex_);
    for (PathId path : kAllPaths) {
      PathCandidate candidate{.path = path, .backend = table.backend(path), .standing = {}};
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
      table.base_.push_back(std::move(candidate));
    }
  }
  if (absl::Status s = table.SetDisabled(disabled); !s.ok()) return s;
  return table;
}

PathTable::PathTable(PathTable&& other) noexcept : backends_(std::move(other.backends_)) {
  MutexLock theirs(other.mutex_);
  MutexLock ours(mutex_);
  base_ = std::move(other.base_);
  disabled_ = std::move(other.disabled_);
  current_ = std::move(other.current_);
  version_.store(other.version());
}

PathTable::Snapshot PathTable::Build() const {
  auto all = std::make_shared<std::vector<PathCandidate>>(base_);
  for (PathCandidate& candidate : *all) {
    if (std::find(disabled_.begin(), disabled_.end(), candidate.path) == disabled_.end()) continue;
    candidate.standing.push_back({candidate.path, Reason::kDisabledByConfig, "--disable-path"});
  }
  return all;
}

void PathTable::Publish() {
  current_ = Build();
  version_.fetch_add(1, std::memory_order_release);
}

void PathTable::Disable(PathId path, Reason reason, const std::string& detail) {
  MutexLock lock(mutex_);
  for (PathCandidate& candidate : base_) {
    if (candidate.path == path) candidate.standing.push_back({path, reason, detail});
  }
  Publish();
}

absl::Status PathTable::SetDisabled(const std::vector<std::string>& disabled) {
  absl::StatusOr<std::vector<PathId>> paths = PathsNamed(disabled);
  if (!paths.ok()) return paths.status();
  MutexLock lock(mutex_);
  disabled_ = *std::move(paths);
  Publish();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PathId>> PathTable::WouldEnable(
    const std::vector<std::string>& disabled) const {
  absl::StatusOr<std::vector<PathId>> off = PathsNamed(disabled);
  if (!off.ok()) return off.status();
  const auto in = [](const std::vector<PathId>& list, PathId path) {
    return std::find(list.begin(), list.end(), path) != list.end();
  };
  MutexLock lock(mutex_);
  std::vector<PathId> enabled;
  for (const PathCandidate& candidate : base_) {
    if (candidate.backend != nullptr && candidate.standing.empty() &&
        in(disabled_, candidate.path) && !in(*off, candidate.path)) {
      enabled.push_back(candidate.path);
    }
  }
  return enabled;
}

PathTable::Snapshot PathTable::candidates() const {
  MutexLock lock(mutex_);
  return current_;
}

const Backend* PathTable::backend(PathId path) const {
  for (const auto& backend : backends_) {
    if (backend->path() == path) return backend.get();
  }
  return nullptr;
}

bool PathTable::has_cuda() const {
  return std::any_of(backends_.begin(), backends_.end(),
                     [](const auto& b) { return DeviceOf(b->path()) == DeviceKind::kCuda; });
}

bool PathTable::available(PathId path) const {
  const Snapshot all = candidates();
  return std::any_of(all->begin(), all->end(), [path](const PathCandidate& c) {
    return c.path == path && c.backend != nullptr && c.standing.empty();
  });
}

bool PathTable::any_available() const {
  return std::any_of(kAllPaths.begin(), kAllPaths.end(),
                     [this](PathId path) { return available(path); });
}

}  // namespace attn::server
