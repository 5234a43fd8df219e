// What a path must offer. One Backend per path; main names the concrete ones, nothing else does.
#ifndef ATTN_KERNELS_API_BACKEND_H_
#define ATTN_KERNELS_API_BACKEND_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"

namespace attn {

// Asks running work to stop. Thread-safe.
class CancelToken {
 public:
  CancelToken() = default;
  explicit CancelToken(std::chrono::steady_clock::time_point deadline) : deadline_(deadline) {}

  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  bool expired() const { return std::chrono::steady_clock::now() >= deadline_; }
  // CANCELLED, DEADLINE_EXCEEDED, or OK.
  absl::Status Check() const;

 private:
  std::atomic<bool> cancelled_{false};
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
};

// Bytes at the loads and stores of tensors, counted by a counting build (ATTN_COUNT_TRAFFIC) only.
// On-chip copies (packed tiles, accumulators) do not count; tensors, lse, masks, bias and workspace
// in memory do.
struct TrafficCounters {
  std::atomic<uint64_t> loaded_bytes{0};
  std::atomic<uint64_t> stored_bytes{0};
};

// Where a call on a device spent its time, and what it moved over the bus. Filled in by backends of
// DeviceKind::kCuda.
struct DeviceTimes {
  int device_index = -1;  // as the CUDA runtime counts; -1: the call was answered without a device
  uint64_t queue_ns = 0;  // waiting for a device's lane and memory
  uint64_t host_to_device_ns = 0;
  uint64_t kernel_ns = 0;  // by the device's clock; calls that share the device slow each other
  uint64_t device_to_host_ns = 0;
  uint64_t host_to_device_bytes = 0;
  uint64_t device_to_host_bytes = 0;
};

// q, k and v of a call where they do not lie in one piece of memory each: a backend that reads them
// a few sequences at a time finds them in its caches, and they need not be put together before it
// runs. Thread-safe.
class InputReader {
 public:
  enum class Tensor : uint8_t { kQ, kK, kV };
  virtual ~InputReader() = default;
  // Writes bytes [offset, offset + count) of the tensor, which must hold them, to `destination`.
  virtual void Read(Tensor tensor, uint64_t offset_bytes, uint64_t count_bytes,
                    std::byte* destination) const = 0;
};

// What a call runs with. The caller owns everything and keeps it alive until the call returns.
struct RunContext {
  // At least WorkspaceBytes(), 64-byte aligned, uninitialised. Empty where WorkspaceOnDevice().
  std::span<std::byte> workspace = {};
  const CancelToken* cancel = nullptr;  // null: never; looked at between tiles
  TrafficCounters* counters = nullptr;  // null: do not count
  // Where not null, q, k and v are read from here, and those of the tensors are null. Only where
  // Backend::ReadsInputs().
  const InputReader* reader = nullptr;
  uint64_t* reading_ns = nullptr;  // of the run's time, what reading took; null: not wanted
  // Backends on devices only.
  DeviceTimes* device_times = nullptr;  // null: not wanted
  int device_index = -1;                // run on this device, as the CUDA runtime counts; -1: any
  bool poison = false;                  // outputs and scratch memory are NaN before the kernels run
};

// The traffic of a path's own loop nest. Masked-out tiles are not counted, as they are not
// computed.
struct TileModel {
  int64_t tile_q = 0;  // query rows per tile
  int64_t tile_k = 0;  // keys per tile
  int64_t on_chip_elements =
      0;  // elements one worker keeps in cache: tiles of q, k, v, scores, out
  uint64_t loaded_bytes = 0;
  uint64_t stored_bytes = 0;

  uint64_t bytes() const { return loaded_bytes + stored_bytes; }
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual PathId path() const = 0;

  // Appends every reason why this path cannot take the problem. Looks at nothing but its arguments
  // and the device properties the backend was made with. WORKSPACE_LIMIT is SelectPath's to add,
  // except where WorkspaceOnDevice().
  virtual void AppendRejections(const AttentionProblem& problem, Pass pass,
                                std::vector<Rejection>* rejections) const = 0;

  // "flash_cpu_fwd_fp32_d64_avx3".
  virtual std::string KernelId(const AttentionProblem& problem, Pass pass) const = 0;

  // Scratch memory of one call, bytes.
  virtual int64_t WorkspaceBytes(const AttentionProblem& problem, Pass pass) const = 0;

  // Whether the scratch memory is the device's, which the backend finds for itself: the caller
  // gives none, and the limit that holds is the device's (AppendRejections() then adds
  // WORKSPACE_LIMIT).
  virtual bool WorkspaceOnDevice() const { return false; }

  virtual TileModel Model(const AttentionProblem& problem, Pass pass) const = 0;

  // Whether the call may bring its inputs by RunContext::reader, and gains by it.
  virtual bool ReadsInputs(const AttentionProblem& problem, Pass pass) const { return false; }

  // Runs and returns when the outputs are written. Thread-safe: calls may run at the same time.
  // Errors: CANCELLED and DEADLINE_EXCEEDED (outputs are then unspecified and must not be sent),
  // INTERNAL.
  virtual absl::Status Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                               const RunContext& context) const = 0;
  virtual absl::Status Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                                const RunContext& context) const = 0;
};

}  // namespace attn

#endif  // ATTN_KERNELS_API_BACKEND_H_
