// Gathers the reasons for which a flash path declines a call, each with field, value and limit.
#ifndef ATTN_KERNELS_CUDA_COMMON_REJECTOR_H_
#define ATTN_KERNELS_CUDA_COMMON_REJECTOR_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/api/path.h"
#include "kernels/cuda/runtime/device.h"

namespace attn::cuda {

class Rejector {
 public:
  Rejector(PathId path, std::vector<Rejection>* rejections)
      : path_(path), rejections_(rejections) {}

  void Add(Reason reason, std::string detail);

  // What no tile of a flash path takes: element types other than FP16 and BF16, head dims over 256
  // or not multiples of 8, lengths that do not fit 32 bits with room for windows, FP16 dropout
  // whose factor FP16 cannot hold, and mask blocks that are not multiples of 64.
  void FlashShape(const AttentionProblem& p);

  // A kernel that needs more shared memory than the device has.
  void SharedMemory(int64_t bytes, const DeviceProperties& device);

 private:
  void HeadDim(std::string_view field, int64_t value);
  void Length(std::string_view field, int64_t value);
  void MaskBlock(std::string_view field, int64_t value);

  const PathId path_;
  std::vector<Rejection>* const rejections_;
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_REJECTOR_H_
