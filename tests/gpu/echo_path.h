// EchoCall as a CUDA path and as a CPU backend, which must agree bit for bit.
#ifndef ATTN_TESTS_GPU_ECHO_PATH_H_
#define ATTN_TESTS_GPU_ECHO_PATH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/cuda/device_path.h"
#include "tests/gpu/echo.h"

namespace attn::cuda {

// An output: rows of `rows` tokens on the token axis per sequence, `heads` heads, `dim` components,
// contiguous.
enum class EchoKind : int32_t { kQuery, kKey, kLse, kFill };

cudaError_t LaunchEcho(const EchoCall& call, EchoKind kind, int heads, int dim, int64_t max_rows,
                       void* out, int size, int64_t token_stride, int64_t batch_stride,
                       cudaStream_t stream);
// Writes to address 0: leaves the context unusable.
cudaError_t LaunchFault(cudaStream_t stream);
// Keeps one multiprocessor busy for about this long.
cudaError_t LaunchBusy(int64_t clocks, cudaStream_t stream);

class EchoPath : public DevicePath {
 public:
  enum class Fault : uint8_t { kNone, kIllegalAddress, kForgetLse };

  void set_fault(Fault fault) { fault_ = fault; }

  PathId path() const override { return PathId::kFlashSm80; }
  void AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties& device,
                        std::vector<Rejection>* rejections) const override;
  std::string KernelId(const AttentionProblem&, Pass, const DeviceProperties&) const override {
    return "echo";
  }
  int64_t WorkspaceBytes(const AttentionProblem&, Pass, const DeviceProperties&) const override {
    return 4096;
  }
  TileModel Model(const AttentionProblem&, Pass, const DeviceProperties&) const override {
    return {};
  }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const Launch& launch) const override;
  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& t,
                        const Launch& launch) const override;

 private:
  Fault fault_ = Fault::kNone;
};

class EchoBackend : public Backend {
 public:
  PathId path() const override { return PathId::kFlashCpu; }
  void AppendRejections(const AttentionProblem&, Pass, std::vector<Rejection>*) const override {}
  std::string KernelId(const AttentionProblem&, Pass) const override { return "echo"; }
  int64_t WorkspaceBytes(const AttentionProblem&, Pass) const override { return 0; }
  TileModel Model(const AttentionProblem&, Pass) const override { return {}; }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const RunContext& context) const override;
  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& t,
                        const RunContext& context) const override;
};

}  // namespace attn::cuda

#endif  // ATTN_TESTS_GPU_ECHO_PATH_H_
