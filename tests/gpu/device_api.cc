#include "tests/gpu/device_api.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/problem.h"
#include "kernels/api/spec.h"
#include "kernels/api/text.h"
#include "kernels/api/traffic.h"
#include "kernels/cuda/backends.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/lane.h"
#include "kernels/cuda/runtime/roofline.h"

namespace attn::cuda {
namespace {

struct FreeDevice {
  void operator()(void* p) const { cudaFree(p); }
};

struct Prepared {
  std::shared_ptr<const DevicePath> path;
  DeviceProperties device;
  AttentionProblem problem;
  Pass pass = Pass::kForward;
  AttnDevicePlan plan = {};
  std::unique_ptr<DeviceSequence, FreeDevice> sequences;
  std::unique_ptr<uint32_t, FreeDevice> counters;
};

void SetText(std::string_view text, char* to, int64_t bytes) {
  if (to == nullptr || bytes <= 0) return;
  const size_t size = std::min<size_t>(text.size(), static_cast<size_t>(bytes) - 1);
  std::memcpy(to, text.data(), size);
  to[size] = '\0';
}

absl::StatusOr<DType> ToDType(int32_t value) {
  switch (value) {
    case 0:
      return DType::kFp32;
    case 1:
      return DType::kFp16;
    case 2:
      return DType::kBf16;
  }
  return absl::InvalidArgumentError(Cat("dtype ", value, " is none of 0, 1, 2"));
}

absl::StatusOr<AttentionSpec> ToSpec(const AttnDeviceCall& call) {
  const absl::StatusOr<DType> dtype = ToDType(call.dtype);
  if (!dtype.ok()) return dtype.status();
  AttentionSpec spec;
  spec.layout = call.packed != 0 ? Layout::kThd : Layout::kBshd;
  spec.num_heads = call.num_heads;
  spec.num_kv_heads = call.num_kv_heads;
  const auto tensor = [&](int64_t seqlen, int64_t heads, int64_t dim) {
    TensorSpec t{.dtype = *dtype, .shape = {seqlen, heads, dim}, .strides = {}};
    if (call.packed == 0) t.shape.insert(t.shape.begin(), call.batch);
    return t;
  };
  spec.q = tensor(call.seqlen_q, call.num_heads, call.head_dim);
  spec.k = tensor(call.seqlen_k, call.num_kv_heads, call.head_dim);
  spec.v = tensor(call.seqlen_k, call.num_kv_heads, call.head_dim_v);
  if (call.packed != 0) {
    if (call.cu_seqlens_q == nullptr || call.cu_seqlens_k == nullptr) {
      return absl::InvalidArgumentError("THD needs cu_seqlens_q and cu_seqlens_k");
    }
    spec.cu_seqlens_q.assign(call.cu_seqlens_q, call.cu_seqlens_q + call.batch + 1);
    spec.cu_seqlens_k.assign(call.cu_seqlens_k, call.cu_seqlens_k + call.batch + 1);
  }
  if (call.softmax_scale != 0) spec.softmax_scale = static_cast<float>(call.softmax_scale);
  spec.causal = call.causal != 0;
  spec.alignment = call.top_left != 0 ? Alignment::kTopLeft : Alignment::kBottomRight;
  if (call.window_left >= 0) spec.window_left = call.window_left;
  if (call.window_right >= 0) spec.window_right = call.window_right;
  if (call.softcap != 0) spec.softcap = call.softcap;
  if (call.dropout_p != 0) {
    spec.dropout =
        DropoutSpec{.p = call.dropout_p, .seed = call.dropout_seed, .offset = call.dropout_offset};
  }
  if (call.block_mask != nullptr) {
    if (call.block_q <= 0 || call.block_k <= 0) {
      return absl::InvalidArgumentError("block_q and block_k of a block mask must be positive");
    }
    BlockMaskSpec mask;
    mask.block_q = call.block_q;
    mask.block_k = call.block_k;
    mask.mask = {.dtype = DType::kUint8,
                 .shape = {call.mask_batch, call.mask_heads,
                           (call.seqlen_q + call.block_q - 1) / call.block_q,
                           (call.seqlen_k + call.block_k - 1) / call.block_k},
                 .strides = {}};
    spec.block_mask = mask;
  }
  spec.deterministic = call.deterministic != 0;
  if (call.out_dtype >= 0) {
    const absl::StatusOr<DType> out_dtype = ToDType(call.out_dtype);
    if (!out_dtype.ok()) return out_dtype.status();
    spec.out_dtype = *out_dtype;
  }
  if (call.backward != 0) {
    spec.out = spec.dout = tensor(call.seqlen_q, call.num_heads, call.head_dim_v);
    if (spec.out_dtype) spec.out->dtype = *spec.out_dtype;
    spec.lse = TensorSpec{
        .dtype = DType::kFp32,
        .shape = call.packed != 0 ? std::vector<int64_t>{call.num_heads, call.seqlen_q}
                                  : std::vector<int64_t>{call.batch, call.num_heads, call.seqlen_q},
        .strides = {}};
  }
  return spec;
}

absl::StatusOr<DeviceProperties> CurrentDevice() {
  int index = 0;
  if (absl::Status s = ToStatus(cudaGetDevice(&index), "cudaGetDevice"); !s.ok()) return s;
  std::string why;
  for (const DeviceProperties& device : FindDevices(&why)) {
    if (device.index == index) return device;
  }
  return absl::NotFoundError(Cat("no CUDA device ", index, why.empty() ? "" : ": ", why));
}

absl::StatusOr<std::shared_ptr<const DevicePath>> FindPath(const char* name) {
  for (auto& path : MakeDevicePaths()) {
    if (name != nullptr && Name(path->path()) == name) return path;
  }
  return absl::NotFoundError(
      Cat("this build has no CUDA path ", name == nullptr ? "(null)" : name));
}

absl::Status UploadSequences(Prepared& prepared) {
  if (UniformSequences(prepared.problem)) return absl::OkStatus();
  const std::vector<DeviceSequence> sequences = MakeSequences(prepared.problem);
  const size_t bytes = std::max<size_t>(1, sequences.size() * sizeof(DeviceSequence));
  void* memory = nullptr;
  if (absl::Status s = ToStatus(cudaMalloc(&memory, bytes), "sequences"); !s.ok()) return s;
  prepared.sequences.reset(static_cast<DeviceSequence*>(memory));
  return ToStatus(cudaMemcpy(memory, sequences.data(), sequences.size() * sizeof(DeviceSequence),
                             cudaMemcpyHostToDevice),
                  "sequences");
}

absl::Status MakeCounters(Prepared& prepared) {
  void* memory = nullptr;
  if (absl::Status s = ToStatus(cudaMalloc(&memory, kCounterBytes), "counters"); !s.ok()) return s;
  prepared.counters.reset(static_cast<uint32_t*>(memory));
  // Runs on streams that do not wait for the null stream may follow.
  if (absl::Status s = ToStatus(cudaMemset(memory, 0, kCounterBytes), "counters"); !s.ok())
    return s;
  return ToStatus(cudaStreamSynchronize(nullptr), "counters");
}

void Describe(Prepared& prepared) {
  const AttentionProblem& p = prepared.problem;
  const Pass pass = prepared.pass;
  const TileModel model = prepared.path->Model(p, pass, prepared.device);
  AttnDevicePlan& plan = prepared.plan;
  SetText(prepared.path->KernelId(p, pass, prepared.device), plan.kernel_id,
          sizeof(plan.kernel_id));
  plan.workspace_bytes = prepared.path->WorkspaceBytes(p, pass, prepared.device);
  plan.tile_loaded_bytes = model.loaded_bytes;
  plan.tile_stored_bytes = model.stored_bytes;
  plan.compulsory_bytes = CompulsoryBytes(p, pass);
  plan.standard_bytes = StandardBytes(p, pass, SizeOf(p.dtype));
  plan.flops = Flops(p, pass);
  plan.tile_q = model.tile_q;
  plan.tile_k = model.tile_k;
}

absl::StatusOr<std::unique_ptr<Prepared>> Prepare(const AttnDeviceCall& call) {
  auto prepared = std::make_unique<Prepared>();
  absl::StatusOr<std::shared_ptr<const DevicePath>> path = FindPath(call.path);
  if (!path.ok()) return path.status();
  absl::StatusOr<DeviceProperties> device = CurrentDevice();
  if (!device.ok()) return device.status();
  const absl::StatusOr<AttentionSpec> spec = ToSpec(call);
  if (!spec.ok()) return spec.status();
  prepared->path = *std::move(path);
  prepared->device = *std::move(device);
  prepared->pass = call.backward != 0 ? Pass::kBackward : Pass::kForward;
  absl::StatusOr<AttentionProblem> problem = Validate(*spec, prepared->pass);
  if (!problem.ok()) return problem.status();
  prepared->problem = *std::move(problem);
  if (prepared->problem.block_mask) prepared->problem.block_mask->data = call.block_mask;
  if (absl::Status s = ValidateContents(prepared->problem); !s.ok()) return s;
  std::vector<Rejection> rejections;
  prepared->path->AppendRejections(prepared->problem, prepared->pass, prepared->device,
                                   &rejections);
  if (!rejections.empty()) {
    std::string text;
    for (const Rejection& rejection : rejections) text += Sentence(rejection) + " ";
    return absl::FailedPreconditionError(text);
  }
  Describe(*prepared);
  if (absl::Status s = UploadSequences(*prepared); !s.ok()) return s;
  if (absl::Status s = MakeCounters(*prepared); !s.ok()) return s;
  return prepared;
}

absl::Status Run(const Prepared& prepared, const AttnDeviceTensors& t, void* workspace,
                 void* stream) {
  AttentionProblem problem = prepared.problem;
  if (problem.block_mask) problem.block_mask->data = t.block_mask;
  const Launch launch{.device = &prepared.device,
                      .stream = static_cast<cudaStream_t>(stream),
                      .workspace = static_cast<std::byte*>(workspace),
                      .workspace_bytes = prepared.plan.workspace_bytes,
                      .sequences = prepared.sequences.get(),
                      .counters = prepared.counters.get()};
  if (prepared.pass == Pass::kForward) {
    return prepared.path->Forward(
        problem, {.q = t.q, .k = t.k, .v = t.v, .out = t.out, .lse = t.lse}, launch);
  }
  return prepared.path->Backward(problem,
                                 {.q = t.q,
                                  .k = t.k,
                                  .v = t.v,
                                  .out = t.out,
                                  .lse = t.lse,
                                  .dout = t.dout,
                                  .dq = t.dq,
                                  .dk = t.dk,
                                  .dv = t.dv},
                                 launch);
}

int Fail(const absl::Status& status, char* error, int64_t error_bytes) {
  if (status.ok()) return 0;
  SetText(status.ToString(), error, error_bytes);
  return 1;
}

}  // namespace
}  // namespace attn::cuda

extern "C" {

void* AttnDevicePrepare(const AttnDeviceCall* call, char* error, int64_t error_bytes) {
  absl::StatusOr<std::unique_ptr<attn::cuda::Prepared>> prepared = attn::cuda::Prepare(*call);
  if (prepared.ok()) return prepared->release();
  attn::cuda::Fail(prepared.status(), error, error_bytes);
  return nullptr;
}

void AttnDeviceDescribe(const void* handle, AttnDevicePlan* plan) {
  *plan = static_cast<const attn::cuda::Prepared*>(handle)->plan;
}

int AttnDeviceRun(const void* handle, const AttnDeviceTensors* tensors, void* workspace,
                  void* stream, char* error, int64_t error_bytes) {
  return attn::cuda::Fail(attn::cuda::Run(*static_cast<const attn::cuda::Prepared*>(handle),
                                          *tensors, workspace, stream),
                          error, error_bytes);
}

void AttnDeviceDestroy(void* handle) { delete static_cast<attn::cuda::Prepared*>(handle); }

int AttnDeviceMeasureRoofline(AttnDeviceRoofline* roofline, char* error, int64_t error_bytes) {
  const absl::StatusOr<attn::cuda::DeviceProperties> device = attn::cuda::CurrentDevice();
  if (!device.ok()) return attn::cuda::Fail(device.status(), error, error_bytes);
  attn::cuda::Roofline measured;
  const absl::Status status = attn::cuda::MeasureRoofline(*device, &measured);
  if (!status.ok()) return attn::cuda::Fail(status, error, error_bytes);
  *roofline = {.copy_bytes = measured.copy_bytes_per_second,
               .read_bytes = measured.read_bytes_per_second,
               .matrix_flops = measured.matrix_flops_per_second,
               .upload_bytes = measured.upload_bytes_per_second,
               .download_bytes = measured.download_bytes_per_second};
  return 0;
}

}  // extern "C"
