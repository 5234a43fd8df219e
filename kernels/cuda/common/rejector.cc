#include "kernels/cuda/common/rejector.h"

#include <utility>

#include "kernels/api/text.h"
#include "kernels/cuda/common/params.h"

namespace attn::cuda {
namespace {

constexpr int64_t kMaxFlashHeadDim = 256;
constexpr int64_t kMaskMultiple = 64;

}  // namespace

void Rejector::Add(Reason reason, std::string detail) {
  rejections_->push_back({path_, reason, std::move(detail)});
}

void Rejector::FlashShape(const AttentionProblem& p) {
  if (p.dtype != DType::kFp16 && p.dtype != DType::kBf16) {
    Add(Reason::kDtypeUnsupported, Cat(Name(p.dtype), ", not FP16 or BF16"));
  }
  HeadDim("head_dim", p.head_dim);
  HeadDim("head_dim_v", p.head_dim_v);
  Length("seqlen_q", p.seqlen_q);
  Length("seqlen_k", p.seqlen_k);
  if (p.dtype == DType::kFp16 && p.dropout && p.dropout->threshold == 1) {
    Add(Reason::kOptionUnsupported,
        Cat("dropout_p keeps 1 of 65536: its factor, 65536 > 65504, is no FP16 number"));
  }
  if (!p.block_mask) return;
  MaskBlock("block_q", p.block_mask->block_q);
  MaskBlock("block_k", p.block_mask->block_k);
}

void Rejector::SharedMemory(int64_t bytes, const DeviceProperties& device) {
  if (bytes <= device.shared_bytes) return;
  Add(Reason::kArchUnsupported,
      Cat("needs ", bytes, " bytes of shared memory > ", device.shared_bytes, " of the device"));
}

void Rejector::HeadDim(std::string_view field, int64_t value) {
  if (value > kMaxFlashHeadDim) {
    Add(Reason::kHeadDimUnsupported, Cat(field, " ", value, " > ", kMaxFlashHeadDim));
  } else if (value % 8 != 0) {
    Add(Reason::kHeadDimUnsupported, Cat(field, " ", value, " not a multiple of 8"));
  }
}

void Rejector::Length(std::string_view field, int64_t value) {
  if (value < kMaxSeqlen) return;
  Add(Reason::kOptionUnsupported, Cat(field, " ", value, " >= ", kMaxSeqlen));
}

void Rejector::MaskBlock(std::string_view field, int64_t value) {
  if (value % kMaskMultiple == 0) return;
  Add(Reason::kOptionUnsupported,
      Cat("block_mask.", field, " ", value, " not a multiple of ", kMaskMultiple));
}

}  // namespace attn::cuda
