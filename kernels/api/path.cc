#include "kernels/api/path.h"

#include <algorithm>
#include <utility>

#include "kernels/api/backend.h"
#include "kernels/api/text.h"

namespace attn {
namespace {

// What a rejection without a detail says.
std::string_view DefaultDetail(Reason reason) {
  switch (reason) {
    case Reason::kNotBuilt:
      return "this binary does not contain it";
    case Reason::kNoCudaDevice:
      return "this host has no usable CUDA device";
    case Reason::kArchUnsupported:
      return "it does not run on the device's compute capability";
    case Reason::kDtypeUnsupported:
      return "it does not take the request's dtype";
    case Reason::kHeadDimUnsupported:
      return "it does not take the request's head_dim";
    case Reason::kOptionUnsupported:
      return "it does not take one of the request's options";
    case Reason::kAlignment:
      return "it cannot load the request's strides or offsets";
    case Reason::kWorkspaceLimit:
      return "it needs more scratch memory than the server allows";
    case Reason::kDisabledByConfig:
      return "the server's configuration disables it";
    case Reason::kSelfTestFailed:
      return "it failed its start-up self-test";
    case Reason::kPolicy:
      return "the request's path policy excludes it";
    case Reason::kCpuFallbackDisabled:
      return "this server has GPUs and cpu_fallback is off";
  }
  return "of an unknown reason";
}

std::string PolicyName(const PathPolicy& policy) {
  switch (policy.mode) {
    case PolicyMode::kAuto:
      return "AUTO";
    case PolicyMode::kRequireFlash:
      return "REQUIRE_FLASH";
    case PolicyMode::kForceStandard:
      return "FORCE_STANDARD";
    case PolicyMode::kNamed:
      return Cat("NAMED ", Name(policy.path));
  }
  return "UNKNOWN";
}

void AppendPolicyRejections(const PathPolicy& policy, PathId path, bool host_has_cuda,
                            std::vector<Rejection>* rejections) {
  auto reject = [&](std::string detail) {
    rejections->push_back({path, Reason::kPolicy, std::move(detail)});
  };
  switch (policy.mode) {
    case PolicyMode::kAuto:
      return;
    case PolicyMode::kRequireFlash:
      if (ClassOf(path) != PathClass::kFlash) {
        reject("REQUIRE_FLASH, and this is a standard path");
      } else if (DeviceOf(path) == DeviceKind::kCpu && host_has_cuda) {
        reject("REQUIRE_FLASH, which a CPU path does not meet on a server with GPUs");
      }
      return;
    case PolicyMode::kForceStandard:
      if (ClassOf(path) != PathClass::kStandard) reject("FORCE_STANDARD, and this is a flash path");
      return;
    case PolicyMode::kNamed:
      if (path != policy.path) reject(Cat("the request names ", Name(policy.path)));
      return;
  }
}

std::vector<Rejection> RejectionsOf(const PathCandidate& candidate, const AttentionProblem& problem,
                                    Pass pass, const PathPolicy& policy, bool host_has_cuda,
                                    int64_t workspace_limit_bytes) {
  std::vector<Rejection> rejections = candidate.standing;
  if (candidate.backend == nullptr && rejections.empty()) {
    rejections.push_back({candidate.path, Reason::kNotBuilt, ""});
  }
  AppendPolicyRejections(policy, candidate.path, host_has_cuda, &rejections);
  if (candidate.backend == nullptr) return rejections;
  const size_t before = rejections.size();
  candidate.backend->AppendRejections(problem, pass, &rejections);
  // The scratch memory of a problem that the backend cannot run means nothing.
  if (rejections.size() == before && !candidate.backend->WorkspaceOnDevice()) {
    const int64_t needed = candidate.backend->WorkspaceBytes(problem, pass);
    if (needed > workspace_limit_bytes) {
      rejections.push_back(
          {candidate.path, Reason::kWorkspaceLimit,
           Cat("workspace ", needed, " bytes > ", workspace_limit_bytes, " bytes")});
    }
  }
  return rejections;
}

}  // namespace

std::string_view Name(PathId path) {
  switch (path) {
    case PathId::kFlashSm90:
      return "flash_sm90";
    case PathId::kFlashSm80:
      return "flash_sm80";
    case PathId::kStandardCuda:
      return "standard_cuda";
    case PathId::kFlashCpu:
      return "flash_cpu";
    case PathId::kStandardCpu:
      return "standard_cpu";
  }
  return "unknown";
}

std::optional<PathId> PathFromName(std::string_view name) {
  for (PathId path : kAllPaths) {
    if (Name(path) == name) return path;
  }
  return std::nullopt;
}

PathClass ClassOf(PathId path) {
  return path == PathId::kStandardCuda || path == PathId::kStandardCpu ? PathClass::kStandard
                                                                       : PathClass::kFlash;
}

DeviceKind DeviceOf(PathId path) {
  return path == PathId::kFlashCpu || path == PathId::kStandardCpu ? DeviceKind::kCpu
                                                                   : DeviceKind::kCuda;
}

std::string_view Name(PathClass path_class) {
  return path_class == PathClass::kFlash ? "flash" : "standard";
}

std::string_view Name(DeviceKind kind) { return kind == DeviceKind::kCpu ? "cpu" : "cuda"; }

std::string_view Name(Reason reason) {
  switch (reason) {
    case Reason::kNotBuilt:
      return "NOT_BUILT";
    case Reason::kNoCudaDevice:
      return "NO_CUDA_DEVICE";
    case Reason::kArchUnsupported:
      return "ARCH_UNSUPPORTED";
    case Reason::kDtypeUnsupported:
      return "DTYPE_UNSUPPORTED";
    case Reason::kHeadDimUnsupported:
      return "HEAD_DIM_UNSUPPORTED";
    case Reason::kOptionUnsupported:
      return "OPTION_UNSUPPORTED";
    case Reason::kAlignment:
      return "ALIGNMENT";
    case Reason::kWorkspaceLimit:
      return "WORKSPACE_LIMIT";
    case Reason::kDisabledByConfig:
      return "DISABLED_BY_CONFIG";
    case Reason::kSelfTestFailed:
      return "SELF_TEST_FAILED";
    case Reason::kPolicy:
      return "POLICY";
    case Reason::kCpuFallbackDisabled:
      return "CPU_FALLBACK_DISABLED";
  }
  return "UNKNOWN";
}

std::string Sentence(const Rejection& rejection) {
  const std::string_view why = rejection.detail.empty() ? DefaultDetail(rejection.reason)
                                                        : std::string_view(rejection.detail);
  return Cat(Name(rejection.path), " is not used because ", why, " (", Name(rejection.reason),
             ").");
}

PathChoice SelectPath(const AttentionProblem& problem, Pass pass, const PathPolicy& policy,
                      std::span<const PathCandidate> candidates, int64_t workspace_limit_bytes) {
  const bool host_has_cuda =
      std::any_of(candidates.begin(), candidates.end(), [](const PathCandidate& candidate) {
        return candidate.backend != nullptr && DeviceOf(candidate.path) == DeviceKind::kCuda;
      });
  PathChoice choice;
  for (const PathCandidate& candidate : candidates) {
    std::vector<Rejection> rejections =
        RejectionsOf(candidate, problem, pass, policy, host_has_cuda, workspace_limit_bytes);
    if (rejections.empty()) {
      choice.backend = candidate.backend;
      choice.path = candidate.path;
      return choice;
    }
    std::move(rejections.begin(), rejections.end(), std::back_inserter(choice.rejections));
  }
  return choice;
}

absl::Status UnmetPolicyError(const PathPolicy& policy, const PathChoice& choice) {
  std::string message = Cat("path_policy ", PolicyName(policy), " cannot be met");
  if (choice.rejections.empty()) message += Cat(": this server has no path");
  std::string_view separator = ": ";
  for (const Rejection& rejection : choice.rejections) {
    message += Cat(separator, Name(rejection.path), ": ", Name(rejection.reason));
    if (!rejection.detail.empty()) message += Cat(" (", rejection.detail, ")");
    separator = "; ";
  }
  return absl::FailedPreconditionError(message);
}

}  // namespace attn
