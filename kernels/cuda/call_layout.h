// Where the tensors of one call lie in host memory and in its block of device memory. Pure: nothing
// here needs a GPU.
#ifndef ATTN_KERNELS_CUDA_CALL_LAYOUT_H_
#define ATTN_KERNELS_CUDA_CALL_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/api/problem.h"
#include "kernels/cuda/runtime/pack.h"

namespace attn::cuda {

// The strided inputs first.
enum Slot : uint8_t {
  kSlotQ,
  kSlotK,
  kSlotV,
  kSlotOut,   // backward
  kSlotDout,  // backward
  kSlotLse,   // backward, as is the next
  kSlotDlse,
  kSlotAlibi,
  kSlotBias,
  kSlotSinks,
  kSlotBlockMask,
  kSlotSequences,  // MakeSequences(), where they are not uniform
  kNumSlots,
};
inline constexpr int kNumStrided = kSlotDout + 1;

enum OutputSlot : uint8_t {
  kOutputOut,  // forward; backward: dq
  kOutputLse,  // forward; backward: dk
  kOutputDv,
  kOutputDbias,
  kOutputDsink,
  kNumOutputs,
};

// The host addresses of a call. Null where there is no such tensor, or it is only planned.
struct HostTensors {
  std::array<const void*, kNumSlots> inputs{};
  std::array<void*, kNumOutputs> outputs{};
};
HostTensors Collect(const AttentionProblem& p, const ForwardTensors& tensors);
HostTensors Collect(const AttentionProblem& p, const BackwardTensors& tensors);

// q, k, v, out, dout; empty where the pass has no such input.
StridedTensor StridedInput(const AttentionProblem& p, Pass pass, Slot slot);

// Whether rows of a strided input must be copied to aligned ones on the device.
bool NeedsPacking(const AttentionProblem& p, Pass pass);
// The problem as the kernels see it: the strides of what is packed are those of the packed copy.
// Sets only strides.
void UsePackedStrides(Pass pass, AttentionProblem* p);

class CallLayout {
 public:
  // A contiguous copy between host and device. `slot` kSlotSequences: from the array made for it.
  struct Upload {
    Slot slot;
    const void* from;
    int64_t offset, bytes;
  };
  struct Output {
    int64_t offset = 0, bytes = 0;
  };
  struct Packing {
    Slot slot;
    StridedTensor from;
    int64_t offset;  // of the packed copy
  };

  // `tensors`: null where the call is only planned. Inputs whose host ranges overlap (slices of one
  // packed qkv tensor) travel once.
  CallLayout(const AttentionProblem& p, Pass pass, int64_t workspace_bytes,
             const HostTensors* tensors);

  const std::vector<Upload>& uploads() const { return uploads_; }
  const std::vector<Packing>& packings() const { return packings_; }
  // Where an input was uploaded to; -1: the call has no such input.
  int64_t uploaded(Slot slot) const { return uploaded_[slot]; }
  // Where the kernels read it: as uploaded, or the packed copy.
  int64_t input(Slot slot) const;
  const Output& output(OutputSlot slot) const { return outputs_[slot]; }
  int64_t outputs_offset() const { return outputs_offset_; }
  int64_t workspace_offset() const { return workspace_offset_; }
  int64_t upload_bytes() const { return upload_bytes_; }
  int64_t download_bytes() const { return download_bytes_; }
  // Of all of it; at most about 2^62, which means "more than memory holds".
  int64_t total_bytes() const { return total_bytes_; }

 private:
  int64_t Place(int64_t bytes);
  void PlaceStrided(const AttentionProblem& p, Pass pass, const HostTensors* tensors);
  void PlaceFlat(const AttentionProblem& p, Pass pass, const HostTensors* tensors);
  void PlaceOutputs(const AttentionProblem& p, Pass pass);

  std::vector<Upload> uploads_;
  std::vector<Packing> packings_;
  std::array<int64_t, kNumSlots> uploaded_;
  std::array<Output, kNumOutputs> outputs_{};
  int64_t outputs_offset_ = 0, workspace_offset_ = 0;
  int64_t upload_bytes_ = 0, download_bytes_ = 0, total_bytes_ = 0;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_CALL_LAYOUT_H_
