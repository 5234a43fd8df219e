#include "server/execution/canary.h"

#include <limits>
#include <utility>

#include "server/execution/self_test.h"

namespace attn::server {
namespace {

// Every path takes it.
constexpr DType kDType = DType::kBf16;

}  // namespace

Canary::Canary(const PathTable* paths, Executor* executor, const Clock* clock,
               std::vector<int> cuda_devices, std::chrono::nanoseconds timeout,
               std::function<void(const Result&)> report)
    : paths_(paths),
      executor_(executor),
      clock_(clock),
      cuda_devices_(std::move(cuda_devices)),
      timeout_(timeout),
      report_(std::move(report)),
      last_ran_(clock->Now()) {}

void Canary::Start() {
  {
    MutexLock lock(mutex_);
    if (under_way_) return;
    under_way_ = true;
  }
  started_ = clock_->Now();
  executor_->Submit(this);
}

std::chrono::nanoseconds Canary::age() const {
  MutexLock lock(mutex_);
  return clock_->Now() - last_ran_;
}

void Canary::Run() {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) RunPass(pass);
  MutexLock lock(mutex_);
  last_ran_ = clock_->Now();
  under_way_ = false;
}

void Canary::Drop(const absl::Status& status) {
  // At the end of the server rounds are dropped, too; that says nothing of it.
  if (absl::IsDeadlineExceeded(status)) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) Report(pass, std::nullopt, -1, status);
  }
  MutexLock lock(mutex_);
  under_way_ = false;
}

void Canary::RunPass(Pass pass) {
  const absl::StatusOr<AttentionProblem> problem = SelfTestProblem(pass, kDType);
  if (!problem.ok()) return Report(pass, std::nullopt, -1, problem.status());
  const PathPolicy policy;
  const PathChoice choice = SelectPath(*problem, pass, policy, *paths_->candidates(),
                                       std::numeric_limits<int64_t>::max());
  if (choice.backend == nullptr) {
    return Report(pass, std::nullopt, -1, UnmetPolicyError(policy, choice));
  }
  const bool each = DeviceOf(*choice.path) == DeviceKind::kCuda && !cuda_devices_.empty();
  for (int device : each ? cuda_devices_ : std::vector<int>{-1}) {
    Report(pass, choice.path, device, SelfTestOnce(*choice.backend, pass, kDType, device));
  }
}

void Canary::Report(Pass pass, std::optional<PathId> path, int device,
                    const absl::Status& status) const {
  report_({.pass = pass,
           .path = path,
           .device = device,
           .status = status,
           .latency = clock_->Now() - started_});
}

}  // namespace attn::server
