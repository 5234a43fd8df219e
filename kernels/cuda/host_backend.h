// A CUDA path as a Backend over host tensors: finds a device, moves the tensors there, runs the
// kernels, and brings the results back, while other calls do the same on other lanes.
#ifndef ATTN_KERNELS_CUDA_HOST_BACKEND_H_
#define ATTN_KERNELS_CUDA_HOST_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/device_set.h"

namespace attn::cuda {

// Thread-safe. Calls without a query row or a key are answered on the host. Errors of Forward() and
// Backward() beside those of Backend: UNAVAILABLE (every device that could run the call has failed;
// names them), RESOURCE_EXHAUSTED (device memory), FAILED_PRECONDITION (AppendRejections() would
// have had reasons; names the first), INTERNAL (names the CUDA error; where that leaves the
// device's context unusable the device gets no further call). A cancelled call is not launched; one
// that has been launched runs to its end.
class HostBackend final : public Backend {
 public:
  // `devices` is not empty.
  HostBackend(std::shared_ptr<const DevicePath> path, std::shared_ptr<DeviceSet> devices);

  PathId path() const override { return path_->path(); }
  // The reasons of the device that has the fewest. A call whose tensors and scratch memory exceed a
  // device's memory limit is WORKSPACE_LIMIT there.
  void AppendRejections(const AttentionProblem& problem, Pass pass,
                        std::vector<Rejection>* rejections) const override;
  std::string KernelId(const AttentionProblem& problem, Pass pass) const override;
  // Device memory.
  int64_t WorkspaceBytes(const AttentionProblem& problem, Pass pass) const override;
  bool WorkspaceOnDevice() const override { return true; }
  TileModel Model(const AttentionProblem& problem, Pass pass) const override;
  absl::Status Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                       const RunContext& context) const override;
  absl::Status Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                        const RunContext& context) const override;

 private:
  // Devices that differ in nothing that a path looks at.
  struct Kind {
    const Device* device;       // one of them
    std::vector<bool> members;  // per device of the set
  };

  // `aligned`: the problem as the kernels see it.
  std::vector<Rejection> RejectionsOn(const Device& device, const AttentionProblem& problem,
                                      const AttentionProblem& aligned, Pass pass) const;
  // The kind of device with the fewest reasons against the problem, and these.
  const Kind& BestKind(const AttentionProblem& problem, const AttentionProblem& aligned, Pass pass,
                       std::vector<Rejection>* rejections) const;
  absl::Status Run(const AttentionProblem& problem, Pass pass, const HostTensors& tensors,
                   const RunContext& context) const;

  const std::shared_ptr<const DevicePath> path_;
  const std::shared_ptr<DeviceSet> devices_;
  std::vector<Kind> kinds_;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_HOST_BACKEND_H_
