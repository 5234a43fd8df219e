// flash_cpu as a Backend: what it takes, what it needs, and the two passes.
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/text.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/flash_backward.h"
#include "kernels/cpu/flash_forward.h"
#include "kernels/cpu/simd.h"

namespace attn {
namespace {

constexpr int64_t kMaxFlashHeadDim = 256;

class FlashCpuBackend final : public Backend {
 public:
  explicit FlashCpuBackend(ThreadPool* pool) : pool_(pool) {}

  PathId path() const override { return PathId::kFlashCpu; }

  void AppendRejections(const AttentionProblem& p, Pass pass,
                        std::vector<Rejection>* rejections) const override {
    const auto reject = [rejections](Reason reason, std::string detail) {
      rejections->push_back({PathId::kFlashCpu, reason, std::move(detail)});
    };
    if (p.head_dim > kMaxFlashHeadDim) {
      reject(Reason::kHeadDimUnsupported, Cat("head_dim ", p.head_dim, " > ", kMaxFlashHeadDim));
    }
    if (p.head_dim_v > kMaxFlashHeadDim) {
      reject(Reason::kHeadDimUnsupported,
             Cat("head_dim_v ", p.head_dim_v, " > ", kMaxFlashHeadDim));
    }
    if (p.block_mask) {
      if (p.block_mask->block_q % kMaskStep != 0) {
        reject(Reason::kOptionUnsupported,
               Cat("block_mask.block_q ", p.block_mask->block_q, " not a multiple of ", kMaskStep));
      }
      if (p.block_mask->block_k % kMaskStep != 0) {
        reject(Reason::kOptionUnsupported,
               Cat("block_mask.block_k ", p.block_mask->block_k, " not a multiple of ", kMaskStep));
      }
    }
  }

  std::string KernelId(const AttentionProblem& p, Pass pass) const override {
    return Cat("flash_cpu_", pass == Pass::kForward ? "fwd" : "bwd", "_", LowerName(p.dtype), "_d",
               p.head_dim, "_", Name(ChosenSimdTarget()));
  }

  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass) const override {
    return pass == Pass::kForward ? ForwardPlan(p).WorkspaceBytes(p)
                                  : BackwardPlan(p).WorkspaceBytes(p);
  }

  TileModel Model(const AttentionProblem& p, Pass pass) const override {
    return pass == Pass::kForward ? ModelFlashForward(p) : ModelFlashBackward(p);
  }

  bool ReadsInputs(const AttentionProblem& p, Pass pass) const override {
    return pass == Pass::kForward && InputWindows(p, ForwardPlan(p)).count > 0;
  }

  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                       const RunContext& context) const override {
    if (absl::Status status = CheckWorkspace(p, Pass::kForward, context); !status.ok()) {
      return status;
    }
    return RunFlashForward(p, tensors, context, pool_);
  }

  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                        const RunContext& context) const override {
    if (absl::Status status = CheckWorkspace(p, Pass::kBackward, context); !status.ok()) {
      return status;
    }
    return RunFlashBackward(p, tensors, context, pool_);
  }

 private:
  absl::Status CheckWorkspace(const AttentionProblem& p, Pass pass,
                              const RunContext& context) const {
    const int64_t needed = WorkspaceBytes(p, pass);
    if (static_cast<int64_t>(context.workspace.size()) >= needed) return absl::OkStatus();
    return absl::InternalError(Cat("flash_cpu workspace is ", context.workspace.size(),
                                   " bytes; it must be at least ", needed));
  }

  ThreadPool* const pool_;
};

}  // namespace

std::unique_ptr<Backend> MakeFlashCpuBackend(ThreadPool* pool) {
  return std::make_unique<FlashCpuBackend>(pool);
}

}  // namespace attn
