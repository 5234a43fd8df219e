// The paths of this server and why some of them are off.
#ifndef ATTN_SERVER_EXECUTION_PATH_TABLE_H_
#define ATTN_SERVER_EXECUTION_PATH_TABLE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "kernels/api/path.h"

namespace attn::server {

// Thread-safe, except that it may be moved only before it is shared. A change makes new candidates;
// who holds the ones before may go on with them.
class PathTable {
 public:
  using Snapshot = std::shared_ptr<const std::vector<PathCandidate>>;

  // A candidate for each path, fastest first. Paths without a backend stand with what `absent` says
  // of them (a path that is compiled in and finds no device), others as NOT_BUILT; paths named in
  // `disabled` as DISABLED_BY_CONFIG; with a CUDA backend present and `cpu_fallback` false, CPU
  // paths as CPU_FALLBACK_DISABLED. Errors: INVALID_ARGUMENT: `disabled` names no path (lists
  // them).
  static absl::StatusOr<PathTable> Create(std::vector<std::unique_ptr<Backend>> backends,
                                          const std::vector<std::string>& disabled,
                                          bool cpu_fallback,
                                          const std::vector<Rejection>& absent = {});
  PathTable(PathTable&& other) noexcept;

  // Adds a reason that holds for every request, for good.
  void Disable(PathId path, Reason reason, const std::string& detail) ATTN_EXCLUDES(mutex_);

  // Replaces the list of paths that stand as DISABLED_BY_CONFIG. Errors: INVALID_ARGUMENT, as
  // Create(); nothing is changed then.
  absl::Status SetDisabled(const std::vector<std::string>& disabled) ATTN_EXCLUDES(mutex_);

  // The paths that SetDisabled() would make available and that are not now.
  absl::StatusOr<std::vector<PathId>> WouldEnable(const std::vector<std::string>& disabled) const
      ATTN_EXCLUDES(mutex_);

  // Never null.
  Snapshot candidates() const ATTN_EXCLUDES(mutex_);
  // Rises with every change. A choice made between two equal readings is up to date.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

  const Backend* backend(PathId path) const;  // null: there is none
  bool has_cuda() const;                      // whether any CUDA path has a backend
  bool available(PathId path) const;
  bool any_available() const;

 private:
  PathTable() = default;
  // With what SetDisabled() says of each path.
  Snapshot Build() const ATTN_REQUIRES(mutex_);
  void Publish() ATTN_REQUIRES(mutex_);

  std::vector<std::unique_ptr<Backend>> backends_;  // constant once created
  mutable Mutex mutex_;
  std::vector<PathCandidate> base_ ATTN_GUARDED_BY(mutex_);  // without what is disabled by config
  std::vector<PathId> disabled_ ATTN_GUARDED_BY(mutex_);
  Snapshot current_ ATTN_GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{0};
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_PATH_TABLE_H_
