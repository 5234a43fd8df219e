// What a CUDA path offers on a device: kernels enqueued on a stream, tensors in device memory.
// HostBackend (host_backend.h) makes a Backend over host tensors of it.
#ifndef ATTN_KERNELS_CUDA_DEVICE_PATH_H_
#define ATTN_KERNELS_CUDA_DEVICE_PATH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/runtime/device.h"

namespace attn::cuda {

// What kernels are enqueued with. The caller owns everything and keeps it alive until the stream
// has passed the work.
struct Launch {
  const DeviceProperties* device = nullptr;  // the current device of the calling thread
  cudaStream_t stream = nullptr;
  std::byte* workspace = nullptr;  // device memory, 256-byte aligned, uninitialised
  int64_t workspace_bytes = 0;     // at least WorkspaceBytes()
  // MakeSequences(problem) in device memory; null where UniformSequences(problem).
  const DeviceSequence* sequences = nullptr;
  // kCounterBytes of device memory, zero when the stream reaches the work; kernels leave them so.
  // Not shared with work on other streams.
  uint32_t* counters = nullptr;
};

// Thread-safe: a path has no state of its own beyond what a device keeps for the process.
class DevicePath {
 public:
  virtual ~DevicePath() = default;

  virtual PathId path() const = 0;

  // Appends every reason why this path cannot take the problem on this device. Pure.
  virtual void AppendRejections(const AttentionProblem& problem, Pass pass,
                                const DeviceProperties& device,
                                std::vector<Rejection>* rejections) const = 0;

  // "sm80_fwd_bf16_d128_causal".
  virtual std::string KernelId(const AttentionProblem& problem, Pass pass,
                               const DeviceProperties& device) const = 0;

  // Device scratch memory of one call, bytes.
  virtual int64_t WorkspaceBytes(const AttentionProblem& problem, Pass pass,
                                 const DeviceProperties& device) const = 0;

  virtual TileModel Model(const AttentionProblem& problem, Pass pass,
                          const DeviceProperties& device) const = 0;

  // Enqueue the pass and return. All pointers, those of the problem's options included, are to
  // device memory, aligned to 16 bytes; where the element type has 16 bits, the strides of q, k, v,
  // out and dout are multiples of 8 elements (of 4, where it has 32), or may be assumed so only by
  // paths that say ALIGNMENT otherwise. Outputs are written completely. Errors: INTERNAL (names the
  // CUDA error).
  virtual absl::Status Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                               const Launch& launch) const = 0;
  virtual absl::Status Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                                const Launch& launch) const = 0;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_DEVICE_PATH_H_
