#include "kernels/cuda/standard/standard_cuda.h"

#include <optional>
#include <string>
#include <utility>

#include "kernels/api/text.h"
#include "kernels/cuda/standard/passes.h"

namespace attn::cuda {
namespace {

constexpr int kMinCapability = 80;  // what the kernels are compiled for

class StandardCudaPath final : public DevicePath {
 public:
  StandardCudaPath(int64_t workspace_limit_bytes, bool use_cublas)
      : workspace_limit_bytes_(workspace_limit_bytes), use_cublas_(use_cublas) {}

  PathId path() const override { return PathId::kStandardCuda; }

  void AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties& device,
                        std::vector<Rejection>* rejections) const override {
    const auto add = [rejections](Reason reason, std::string detail) {
      rejections->push_back({PathId::kStandardCuda, reason, std::move(detail)});
    };
    if (device.capability() < kMinCapability) {
      add(Reason::kArchUnsupported,
          Cat("compute capability ", device.major, ".", device.minor, " < 8.0"));
    }
    for (const auto& [name, length] :
         {std::pair{"seqlen_q", p.seqlen_q}, std::pair{"seqlen_k", p.seqlen_k}}) {
      if (length < kMaxSeqlen) continue;
      add(Reason::kOptionUnsupported, Cat(name, " ", length, " >= ", kMaxSeqlen));
    }
    const standard::Plan plan(p, pass, workspace_limit_bytes_);
    if (!plan.fits()) {
      add(Reason::kWorkspaceLimit, Cat("workspace of one head ", plan.bytes(), " bytes > ",
                                       workspace_limit_bytes_, " bytes"));
    }
  }

  std::string KernelId(const AttentionProblem& p, Pass pass,
                       const DeviceProperties&) const override {
    const std::string dims = p.head_dim == p.head_dim_v ? Cat("d", p.head_dim)
                                                        : Cat("d", p.head_dim, "_dv", p.head_dim_v);
    return Cat("standard_cuda_", pass == Pass::kForward ? "fwd" : "bwd", "_", LowerName(p.dtype),
               "_", dims, Library() != nullptr ? "_cublas" : "_own");
  }

  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass,
                         const DeviceProperties&) const override {
    return standard::Plan(p, pass, workspace_limit_bytes_).bytes();
  }

  TileModel Model(const AttentionProblem& p, Pass pass, const DeviceProperties&) const override {
    return standard::Model(p, pass);
  }

  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                       const Launch& launch) const override {
    return Run(p, Pass::kForward, launch,
               [&](const standard::Call& call) { return standard::Forward(call, tensors); });
  }

  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                        const Launch& launch) const override {
    return Run(p, Pass::kBackward, launch,
               [&](const standard::Call& call) { return standard::Backward(call, tensors); });
  }

 private:
  const Cublas* Library() const { return use_cublas_ ? Cublas::Get() : nullptr; }

  template <class Enqueue>
  absl::Status Run(const AttentionProblem& p, Pass pass, const Launch& launch,
                   Enqueue enqueue) const {
    const standard::Plan plan(p, pass, workspace_limit_bytes_);
    if (!plan.fits() || launch.workspace_bytes < plan.bytes()) {
      return absl::InternalError(Cat("standard_cuda was given a workspace of ",
                                     launch.workspace_bytes, " bytes; it needs ", plan.bytes()));
    }
    const Cublas* library = Library();
    if (library == nullptr) return enqueue({p, plan, launch, nullptr});
    const absl::StatusOr<CublasHandle> handle = library->Handle(
        launch.device->index, launch.stream, launch.workspace + plan.blas_at(), plan.blas_bytes());
    if (!handle.ok()) return handle.status();
    return enqueue({p, plan, launch, &*handle});
  }

  const int64_t workspace_limit_bytes_;
  const bool use_cublas_;
};

}  // namespace

std::shared_ptr<const DevicePath> MakeStandardCudaPath(int64_t workspace_limit_bytes,
                                                       bool use_cublas) {
  return std::make_shared<StandardCudaPath>(workspace_limit_bytes, use_cublas);
}

}  // namespace attn::cuda
