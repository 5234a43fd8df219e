// Paths, reasons, and the choice between paths. Pure: nothing here needs a GPU.
#ifndef ATTN_KERNELS_API_PATH_H_
#define ATTN_KERNELS_API_PATH_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/problem.h"

namespace attn {

// Fastest first: the order in which SelectPath() tries them.
enum class PathId : uint8_t { kFlashSm90, kFlashSm80, kStandardCuda, kFlashCpu, kStandardCpu };
inline constexpr std::array kAllPaths = {PathId::kFlashSm90, PathId::kFlashSm80,
                                         PathId::kStandardCuda, PathId::kFlashCpu,
                                         PathId::kStandardCpu};

enum class PathClass : uint8_t { kFlash, kStandard };
enum class DeviceKind : uint8_t { kCpu, kCuda };

std::string_view Name(PathId path);  // "flash_sm90", …
std::optional<PathId> PathFromName(std::string_view name);
PathClass ClassOf(PathId path);
DeviceKind DeviceOf(PathId path);
std::string_view Name(PathClass path_class);  // "flash", "standard"
std::string_view Name(DeviceKind kind);       // "cpu", "cuda"

// Same values as attention.v1.Reason; kernels/README.md explains each.
enum class Reason : uint8_t {
  kNotBuilt = 1,
  kNoCudaDevice,
  kArchUnsupported,
  kDtypeUnsupported,
  kHeadDimUnsupported,
  kOptionUnsupported,
  kAlignment,
  kWorkspaceLimit,
  kDisabledByConfig,
  kSelfTestFailed,
  kPolicy,
  kCpuFallbackDisabled,
};
inline constexpr std::array kAllReasons = {Reason::kNotBuilt,
                                           Reason::kNoCudaDevice,
                                           Reason::kArchUnsupported,
                                           Reason::kDtypeUnsupported,
                                           Reason::kHeadDimUnsupported,
                                           Reason::kOptionUnsupported,
                                           Reason::kAlignment,
                                           Reason::kWorkspaceLimit,
                                           Reason::kDisabledByConfig,
                                           Reason::kSelfTestFailed,
                                           Reason::kPolicy,
                                           Reason::kCpuFallbackDisabled};
std::string_view Name(Reason reason);  // "NOT_BUILT", …

struct Rejection {
  PathId path;
  Reason reason;
  std::string detail;  // the option, value and limit, short: "head_dim 264 > 256"; may be empty

  friend bool operator==(const Rejection&, const Rejection&) = default;
};

// "flash_cpu is not used because head_dim 264 > 256 (HEAD_DIM_UNSUPPORTED)."
std::string Sentence(const Rejection& rejection);

enum class PolicyMode : uint8_t { kAuto, kRequireFlash, kForceStandard, kNamed };
struct PathPolicy {
  PolicyMode mode = PolicyMode::kAuto;
  PathId path = PathId::kFlashCpu;  // kNamed only
};

class Backend;

// A path as this server has it.
struct PathCandidate {
  PathId path;
  const Backend* backend = nullptr;  // null: cannot run; `standing` says why
  std::vector<Rejection> standing;   // reasons that hold for every request; not empty: never chosen
};

struct PathChoice {
  const Backend* backend = nullptr;  // null: the policy cannot be met
  std::optional<PathId> path;
  // Every reason for every path ranked above the chosen one, fastest path first; where nothing was
  // chosen, for every path.
  std::vector<Rejection> rejections;
};

// Chooses the first candidate that has no reason against it. Candidates are fastest first. On a
// host where any candidate of DeviceKind::kCuda has a backend, a CPU path never satisfies
// kRequireFlash. `workspace_limit_bytes` is host memory: it does not concern backends whose scratch
// memory is the device's. Pure and thread-safe.
PathChoice SelectPath(const AttentionProblem& problem, Pass pass, const PathPolicy& policy,
                      std::span<const PathCandidate> candidates, int64_t workspace_limit_bytes);

// FAILED_PRECONDITION for a choice without a backend: names the policy and every reason.
absl::Status UnmetPolicyError(const PathPolicy& policy, const PathChoice& choice);

}  // namespace attn

#endif  // ATTN_KERNELS_API_PATH_H_
