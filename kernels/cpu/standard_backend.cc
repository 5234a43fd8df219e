#include <memory>
#include <string>

#include "kernels/api/text.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/standard_backward.h"
#include "kernels/cpu/standard_forward.h"
#include "kernels/cpu/standard_plan.h"

namespace attn {
namespace {

class StandardCpuBackend : public Backend {
 public:
  explicit StandardCpuBackend(ThreadPool* pool) : pool_(*pool) {}

  PathId path() const override { return PathId::kStandardCpu; }

  // Takes whatever Validate() takes.
  void AppendRejections(const AttentionProblem&, Pass, std::vector<Rejection>*) const override {}

  std::string KernelId(const AttentionProblem& p, Pass pass) const override {
    const std::string dims = p.head_dim == p.head_dim_v ? Cat("d", p.head_dim)
                                                        : Cat("d", p.head_dim, "_dv", p.head_dim_v);
    return Cat("standard_cpu_", pass == Pass::kForward ? "fwd" : "bwd", "_", LowerName(p.dtype),
               "_", dims, "_", Name(ChosenSimdTarget()));
  }

  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass) const override {
    return MakeWorkspace(p, pass).bytes();
  }

  TileModel Model(const AttentionProblem& p, Pass pass) const override {
    return standard::Model(p, pass);
  }

  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                       const RunContext& context) const override {
    if (absl::Status status = CheckWorkspace(p, Pass::kForward, context); !status.ok()) {
      return status;
    }
    return standard::Forward(p, tensors, context, pool_);
  }

  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                        const RunContext& context) const override {
    if (absl::Status status = CheckWorkspace(p, Pass::kBackward, context); !status.ok()) {
      return status;
    }
    return standard::Backward(p, tensors, context, pool_);
  }

 private:
  standard::Workspace MakeWorkspace(const AttentionProblem& p, Pass pass) const {
    return standard::Workspace(p, pass, standard::NumSlots(p, pool_.num_workers()));
  }

  absl::Status CheckWorkspace(const AttentionProblem& p, Pass pass,
                              const RunContext& context) const {
    const int64_t needed = MakeWorkspace(p, pass).bytes();
    if (static_cast<int64_t>(context.workspace.size()) >= needed) return absl::OkStatus();
    return absl::InternalError(Cat("standard_cpu was given a workspace of ",
                                   context.workspace.size(), " bytes; it needs ", needed));
  }

  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<Backend> MakeStandardCpuBackend(ThreadPool* pool) {
  return std::make_unique<StandardCpuBackend>(pool);
}

}  // namespace attn
