#include "kernels/cuda/call_layout.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/params.h"

namespace attn::cuda {
namespace {

// What cudaMalloc() gives, and what kernels may ask of a tensor's start.
constexpr int64_t kAlignment = 256;
constexpr int64_t kTooMany = int64_t{1} << 62;

int64_t Add(int64_t a, int64_t b) { return a > kTooMany - b ? kTooMany : a + b; }

// Elements times size; both come checked to be below 2^62 and 2^3.
int64_t Bytes(int64_t elements, int64_t size) {
  return elements > kTooMany / size ? kTooMany : elements * size;
}

StridedTensor Make(DType dtype, const AttentionProblem& p, bool query, int64_t heads, int64_t dim,
                   const Strides& strides) {
  const bool bshd = p.layout == Layout::kBshd;
  const int64_t rows = query ? (bshd ? p.seqlen_q : p.total_q) : (bshd ? p.seqlen_k : p.total_k);
  return {.element_bytes = SizeOf(dtype),
          .batch = bshd ? p.batch : 1,
          .tokens = rows,
          .heads = heads,
          .dim = dim,
          .strides = strides};
}

Strides* StridesOf(AttentionProblem* p, Slot slot) {
  switch (slot) {
    case kSlotQ:
      return &p->q;
    case kSlotK:
      return &p->k;
    case kSlotV:
      return &p->v;
    case kSlotOut:
      return &p->bwd_out;
    default:
      return &p->bwd_dout;
  }
}

// Bytes of the inputs that are contiguous by contract; 0: the call has no such input.
int64_t FlatBytes(const AttentionProblem& p, Pass pass, Slot slot) {
  const bool backward = pass == Pass::kBackward;
  switch (slot) {
    case kSlotLse:
      return backward ? Bytes(LseElements(p), 4) : 0;
    case kSlotDlse:
      return backward && p.has_dlse ? Bytes(LseElements(p), 4) : 0;
    case kSlotAlibi:
      return p.alibi ? Bytes(p.alibi->batch * p.num_heads, 4) : 0;
    case kSlotBias:
      return p.bias ? Bytes(p.bias->batch * p.bias->heads * p.bias->rows * p.bias->cols,
                            SizeOf(p.bias->dtype))
                    : 0;
    case kSlotSinks:
      return p.has_sinks ? Bytes(p.num_heads, 4) : 0;
    case kSlotBlockMask:
      return p.block_mask ? p.block_mask->batch * p.block_mask->heads * p.block_mask->rows *
                                p.block_mask->cols
                          : 0;
    case kSlotSequences:
      return p.batch == 0 || UniformSequences(p)
                 ? 0
                 : Bytes(p.batch, static_cast<int64_t>(sizeof(DeviceSequence)));
    default:
      return 0;
  }
}

}  // namespace

HostTensors Collect(const AttentionProblem& p, const ForwardTensors& t) {
  HostTensors all;
  all.inputs[kSlotQ] = t.q;
  all.inputs[kSlotK] = t.k;
  all.inputs[kSlotV] = t.v;
  if (p.alibi) all.inputs[kSlotAlibi] = p.alibi->slopes;
  if (p.bias) all.inputs[kSlotBias] = p.bias->data;
  if (p.has_sinks) all.inputs[kSlotSinks] = p.sinks;
  if (p.block_mask) all.inputs[kSlotBlockMask] = p.block_mask->data;
  all.outputs[kOutputOut] = t.out;
  all.outputs[kOutputLse] = t.lse;
  return all;
}

HostTensors Collect(const AttentionProblem& p, const BackwardTensors& t) {
  HostTensors all = Collect(p, ForwardTensors{.q = t.q, .k = t.k, .v = t.v});
  all.inputs[kSlotOut] = t.out;
  all.inputs[kSlotDout] = t.dout;
  all.inputs[kSlotLse] = t.lse;
  all.inputs[kSlotDlse] = t.dlse;
  all.outputs = {t.dq, t.dk, t.dv, t.dbias, t.dsink};
  return all;
}

StridedTensor StridedInput(const AttentionProblem& p, Pass pass, Slot slot) {
  switch (slot) {
    case kSlotQ:
      return Make(p.dtype, p, true, p.num_heads, p.head_dim, p.q);
    case kSlotK:
      return Make(p.dtype, p, false, p.num_kv_heads, p.head_dim, p.k);
    case kSlotV:
      return Make(p.dtype, p, false, p.num_kv_heads, p.head_dim_v, p.v);
    case kSlotOut:
      if (pass == Pass::kForward) break;
      return Make(p.bwd_out_dtype, p, true, p.num_heads, p.head_dim_v, p.bwd_out);
    case kSlotDout:
      if (pass == Pass::kForward) break;
      return Make(p.bwd_dout_dtype, p, true, p.num_heads, p.head_dim_v, p.bwd_dout);
    default:
      break;
  }
  return {.element_bytes = 1, .strides = {}};
}

bool NeedsPacking(const AttentionProblem& p, Pass pass) {
  for (int slot = 0; slot < kNumStrided; ++slot) {
    if (!StridedInput(p, pass, static_cast<Slot>(slot)).RowsAligned()) return true;
  }
  return false;
}

void UsePackedStrides(Pass pass, AttentionProblem* p) {
  const int count = pass == Pass::kForward ? kSlotV + 1 : kNumStrided;
  for (int slot = 0; slot < count; ++slot) {
    const StridedTensor tensor = StridedInput(*p, pass, static_cast<Slot>(slot));
    *StridesOf(p, static_cast<Slot>(slot)) =
        tensor.RowsAligned() ? NormalStrides(tensor) : Packed(tensor).strides;
  }
}

CallLayout::CallLayout(const AttentionProblem& p, Pass pass, int64_t workspace_bytes,
                       const HostTensors* tensors) {
  uploaded_.fill(-1);
  PlaceStrided(p, pass, tensors);
  PlaceFlat(p, pass, tensors);
  for (int slot = 0; slot < kNumStrided; ++slot) {
    const StridedTensor tensor = StridedInput(p, pass, static_cast<Slot>(slot));
    if (tensor.RowsAligned()) continue;
    packings_.push_back({static_cast<Slot>(slot), tensor, Place(Packed(tensor).SpanBytes())});
  }
  PlaceOutputs(p, pass);
  workspace_offset_ = Place(workspace_bytes);
}

int64_t CallLayout::Place(int64_t bytes) {
  const int64_t offset = total_bytes_;
  total_bytes_ = Add(total_bytes_, Add(bytes, kAlignment - 1) / kAlignment * kAlignment);
  return offset;
}

void CallLayout::PlaceStrided(const AttentionProblem& p, Pass pass, const HostTensors* tensors) {
  struct Range {
    Slot slot;
    uintptr_t begin;
    int64_t bytes;
  };
  std::vector<Range> ranges;
  for (int i = 0; i < kNumStrided; ++i) {
    const auto slot = static_cast<Slot>(i);
    const int64_t bytes = StridedInput(p, pass, slot).SpanBytes();
    if (bytes == 0) continue;
    const void* data = tensors == nullptr ? nullptr : tensors->inputs[slot];
    ranges.push_back({slot, reinterpret_cast<uintptr_t>(data), bytes});
  }
  if (tensors != nullptr) {
    std::stable_sort(ranges.begin(), ranges.end(),
                     [](const Range& a, const Range& b) { return a.begin < b.begin; });
  }
  for (size_t i = 0; i < ranges.size();) {
    const uintptr_t begin = ranges[i].begin;
    int64_t bytes = ranges[i].bytes;
    // The union of ranges that overlap, as long as every tensor in it starts on a row boundary.
    size_t end = i + 1;
    while (tensors != nullptr && end < ranges.size()) {
      const auto distance = static_cast<int64_t>(ranges[end].begin - begin);
      if (distance >= bytes || distance % kRowAlignment != 0) break;
      bytes = std::max(bytes, distance + ranges[end].bytes);
      ++end;
    }
    const int64_t offset = Place(bytes);
    uploads_.push_back({ranges[i].slot, reinterpret_cast<const void*>(begin), offset, bytes});
    upload_bytes_ = Add(upload_bytes_, bytes);
    for (; i < end; ++i) {
      uploaded_[ranges[i].slot] = offset + static_cast<int64_t>(ranges[i].begin - begin);
    }
  }
}

void CallLayout::PlaceFlat(const AttentionProblem& p, Pass pass, const HostTensors* tensors) {
  for (int i = kNumStrided; i < kNumSlots; ++i) {
    const auto slot = static_cast<Slot>(i);
    const int64_t bytes = FlatBytes(p, pass, slot);
    if (bytes == 0) continue;
    const int64_t offset = Place(bytes);
    uploads_.push_back({slot, tensors == nullptr ? nullptr : tensors->inputs[slot], offset, bytes});
    upload_bytes_ = Add(upload_bytes_, bytes);
    uploaded_[slot] = offset;
  }
}

void CallLayout::PlaceOutputs(const AttentionProblem& p, Pass pass) {
  outputs_offset_ = total_bytes_;
  const auto place = [this](OutputSlot slot, int64_t elements, int64_t size) {
    const int64_t bytes = Bytes(elements, size);
    outputs_[slot] = {Place(bytes), bytes};
    download_bytes_ = Add(download_bytes_, bytes);
  };
  const int64_t size = SizeOf(p.out_dtype);
  if (pass == Pass::kForward) {
    place(kOutputOut, OutElements(p), size);
    place(kOutputLse, LseElements(p), 4);
    return;
  }
  place(kOutputOut, DqElements(p), size);
  place(kOutputLse, DkElements(p), size);
  place(kOutputDv, DvElements(p), size);
  if (p.bias) place(kOutputDbias, DbiasElements(p), 4);
  if (p.has_sinks) place(kOutputDsink, p.num_heads, 4);
}

int64_t CallLayout::input(Slot slot) const {
  for (const Packing& packing : packings_) {
    if (packing.slot == slot) return packing.offset;
  }
  return uploaded_[slot];
}

}  // namespace attn::cuda
