// One call on one lane of one device.
#ifndef ATTN_KERNELS_CUDA_DEVICE_CALL_H_
#define ATTN_KERNELS_CUDA_DEVICE_CALL_H_

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/device_set.h"

namespace attn::cuda {

// Used by one thread. Whatever happens, the stream has passed the call's work when Run() returns,
// or the device is unhealthy and its memory is not reused.
class DeviceCall {
 public:
  // `problem` has strides as UsePackedStrides() makes them, `layout` is of the original problem.
  // All arguments outlive the call.
  DeviceCall(DeviceSet* devices, const DevicePath& path, const AttentionProblem& problem, Pass pass,
             const CallLayout& layout, const HostTensors& tensors, int64_t workspace_bytes,
             bool poison)
      : devices_(devices),
        path_(path),
        problem_(problem),
        pass_(pass),
        layout_(layout),
        tensors_(tensors),
        workspace_bytes_(workspace_bytes),
        poison_(poison) {}

  // Uploads, launches, downloads, waits. `queued`: since when the call has waited for a device; its
  // wait ends when it has memory. Errors: as HostBackend.
  absl::Status Run(const DeviceSet::Lease& lease, std::chrono::steady_clock::time_point queued,
                   const CancelToken* cancel);
  // After Run(): by the device's clock, except queue_ns.
  const DeviceTimes& times() const { return times_; }

 private:
  absl::Status Enqueue(const CancelToken* cancel);
  absl::Status Upload();
  absl::Status Pack();
  absl::Status Poison();
  absl::Status Launch();
  absl::Status Download();
  absl::Status ReadTimes();
  absl::Status Record(const Event& event);
  // Waits for the stream after a failure, and judges the device.
  absl::Status Fail(absl::Status status);
  // The address on the device; null where the call has no such input.
  const void* Input(Slot slot) const;
  void* Output(OutputSlot slot) const;
  AttentionProblem OnDevice() const;

  DeviceSet* const devices_;
  const DevicePath& path_;
  const AttentionProblem& problem_;
  const Pass pass_;
  const CallLayout& layout_;
  const HostTensors& tensors_;
  const int64_t workspace_bytes_;
  const bool poison_;

  Device* device_ = nullptr;
  Lane* lane_ = nullptr;
  MemoryPool::Block memory_;
  std::vector<DeviceSequence> sequences_;
  DeviceTimes times_;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_DEVICE_CALL_H_
