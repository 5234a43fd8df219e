#include "kernels/cuda/sm80/flash_sm80.h"

#include <algorithm>
#include <string>

#include "kernels/api/text.h"
#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/rejector.h"
#include "kernels/cuda/sm80/plan.h"

namespace attn::cuda {
namespace sm80 {
namespace {

constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;  // of a grid

ForwardParams MakeForwardParams(const AttentionProblem& p, const ForwardTensors& t,
                                const Launch& launch, const ForwardPlan& plan) {
  const SplitWorkspace workspace = PlanSplitWorkspace(p, plan.splits);
  return {.q = t.q,
          .k = t.k,
          .v = t.v,
          .out = t.out,
          .lse = t.lse,
          .q_strides = ToDevice(p.q),
          .k_strides = ToDevice(p.k),
          .v_strides = ToDevice(p.v),
          .out_strides = ContiguousStrides(p, p.seqlen_q, p.num_heads, p.head_dim_v),
          .sequences = MakeSequenceParams(p, launch.sequences),
          .lse_head = LseHeadStride(p),
          .num_heads = static_cast<int32_t>(p.num_heads),
          .num_kv_heads = static_cast<int32_t>(p.num_kv_heads),
          .head_dim = static_cast<int32_t>(p.head_dim),
          .head_dim_v = static_cast<int32_t>(p.head_dim_v),
          .out_fp32 = p.out_dtype == DType::kFp32,
          .causal_order = p.window_right < kUnlimited,
          .tiles = plan.tiles,
          .splits = plan.splits,
          .split_tiles = plan.split_tiles,
          .partial_out = RegionAt<float>(launch.workspace, workspace.partial_out),
          .partial_lse = RegionAt<float>(launch.workspace, workspace.partial_lse),
          .partial_rows = p.num_heads * p.total_q,
          .lockstep = plan.lockstep,
          .score = MakeScoreParams(p)};
}

BackwardParams MakeBackwardParams(const AttentionProblem& p, const BackwardTensors& t,
                                  const Launch& launch, const TileInfo& tile,
                                  const BackwardKernels& kernels) {
  const BackwardWorkspace workspace = PlanBackwardWorkspace(p, tile);
  const auto contiguous = [&p](int64_t seqlen, int64_t heads, int64_t dim) {
    return ContiguousStrides(p, seqlen, heads, dim);
  };
  return {.q = t.q,
          .k = t.k,
          .v = t.v,
          .out = t.out,
          .dout = t.dout,
          .lse = t.lse,
          .dlse = p.has_dlse ? t.dlse : nullptr,
          .out_fp32 = p.bwd_out_dtype == DType::kFp32,
          .lse2 = RegionAt<float>(launch.workspace, workspace.lse2),
          .delta = RegionAt<float>(launch.workspace, workspace.delta),
          .dq_accumulator = p.deterministic
                                ? nullptr
                                : RegionAt<float>(launch.workspace, workspace.dq_accumulator),
          .padded_rows = PaddedRows(p),
          .dq = t.dq,
          .dk = t.dk,
          .dv = t.dv,
          .dbias = p.bias ? t.dbias : nullptr,
          .dsink = p.has_sinks ? t.dsink : nullptr,
          .q_strides = ToDevice(p.q),
          .k_strides = ToDevice(p.k),
          .v_strides = ToDevice(p.v),
          .out_strides = ToDevice(p.bwd_out),
          .dout_strides = ToDevice(p.bwd_dout),
          .dq_strides = contiguous(p.seqlen_q, p.num_heads, p.head_dim),
          .dk_strides = contiguous(p.seqlen_k, p.num_kv_heads, p.head_dim),
          .dv_strides = contiguous(p.seqlen_k, p.num_kv_heads, p.head_dim_v),
          .sequences = MakeSequenceParams(p, launch.sequences),
          .lse_head = LseHeadStride(p),
          .num_heads = static_cast<int32_t>(p.num_heads),
          .num_kv_heads = static_cast<int32_t>(p.num_kv_heads),
          .head_dim = static_cast<int32_t>(p.head_dim),
          .head_dim_v = static_cast<int32_t>(p.head_dim_v),
          .grads_fp32 = p.out_dtype == DType::kFp32,
          .dbias_atomic = false,
          .batch_begin = 0,
          .batch_count = static_cast<int32_t>(p.batch),
          .kv_begin = 0,
          .kv_count = static_cast<int32_t>(p.num_kv_heads),
          .prepare_blocks = static_cast<int32_t>(CeilDiv(p.seqlen_q, kRowPadding) * kRowPadding /
                                                 kPrepareRowsPerBlock),
          .query_tiles = static_cast<int32_t>(CeilDiv(p.seqlen_q, kernels.queries)),
          .key_tiles = static_cast<int32_t>(CeilDiv(p.seqlen_k, kernels.keys)),
          .score = MakeScoreParams(p)};
}

class FlashSm80Path final : public DevicePath {
 public:
  PathId path() const override { return PathId::kFlashSm80; }

  void AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties& device,
                        std::vector<Rejection>* rejections) const override {
    Rejector reject(path(), rejections);
    const size_t before = rejections->size();
    if (device.capability() < 80) {
      reject.Add(Reason::kArchUnsupported,
                 Cat("compute capability ", device.major, ".", device.minor, " < 8.0"));
    }
    reject.FlashShape(p);
    if (pass == Pass::kBackward && p.bwd_dout_dtype != p.dtype) {
      reject.Add(Reason::kOptionUnsupported,
                 Cat("dout ", Name(p.bwd_dout_dtype), " with q ", Name(p.dtype)));
    }
    if (rejections->size() > before) return;
    const Kernels& kernels = KernelsFor(p);
    const TileInfo& tile = kernels.tile;
    const int shared = pass == Pass::kForward
                           ? tile.forward[static_cast<int>(ModeOf(p))].shared_bytes
                           : BackwardShared(p, kernels, device);
    reject.SharedMemory(shared, device);
    const int64_t blocks = CeilDiv(std::max(p.seqlen_q, p.seqlen_k), 32) * p.num_heads * p.batch;
    if (blocks > kMaxBlocks) {
      reject.Add(Reason::kOptionUnsupported,
                 Cat("batch * num_heads * seqlen: ", blocks, " tiles > ", kMaxBlocks));
    }
  }

  std::string KernelId(const AttentionProblem& p, Pass pass,
                       const DeviceProperties& device) const override {
    const TileInfo& tile = KernelsFor(p).tile;
    std::string id = Cat("sm80_", pass == Pass::kForward ? "fwd_" : "bwd_",
                         TileName(p, tile.head_dim, tile.head_dim_v));
    const Mode mode = ModeOf(p);
    if (mode != Mode::kPlain) id += mode == Mode::kDropout ? "_dropout" : "_options";
    if (pass == Pass::kBackward) return p.deterministic ? id + "_deterministic" : id;
    const ForwardPlan plan = PlanForward(p, tile, device);
    if (plan.decode) id += "_decode";
    return plan.splits > 1 ? Cat(id, "_split", plan.splits) : id;
  }

  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass,
                         const DeviceProperties& device) const override {
    const TileInfo& tile = KernelsFor(p).tile;
    return pass == Pass::kForward ? PlanSplitWorkspace(p, PlanForward(p, tile, device).splits).bytes
                                  : PlanBackwardWorkspace(p, tile).bytes;
  }

  TileModel Model(const AttentionProblem& p, Pass pass,
                  const DeviceProperties& device) const override {
    const TileInfo& tile = KernelsFor(p).tile;
    return pass == Pass::kForward ? ModelForward(p, tile, PlanForward(p, tile, device))
                                  : ModelBackward(p, tile, BackwardFor(KernelsFor(p), device));
  }

  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                       const Launch& launch) const override {
    const Kernels& kernels = KernelsFor(p);
    const ForwardPlan plan = PlanForward(p, kernels.tile, *launch.device);
    const ForwardParams params = MakeForwardParams(p, tensors, launch, plan);
    const auto run = plan.decode ? kernels.decode : kernels.forward;
    if (absl::Status s = ToStatus(run(params, ModeOf(p), launch.stream), "flash_sm80 forward");
        !s.ok() || plan.splits == 1) {
      return s;
    }
    return ToStatus(
        LaunchMerge(MergeParamsOf(params), p.dtype, launch.device->major >= 9, launch.stream),
        "flash_sm80 merge");
  }

  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                        const Launch& launch) const override {
    const Kernels& kernels = KernelsFor(p);
    const BackwardKernels& tiled = BackwardFor(kernels, *launch.device);
    const BackwardParams params = MakeBackwardParams(p, tensors, launch, kernels.tile, tiled);
    if (params.dbias != nullptr) {
      const size_t bytes = static_cast<size_t>(DbiasElements(p)) * sizeof(float);
      if (absl::Status s =
              ToStatus(cudaMemsetAsync(params.dbias, 0, bytes, launch.stream), "dbias");
          !s.ok()) {
        return s;
      }
    }
    if (absl::Status s = ToStatus(kernels.prepare(params, launch.stream), "flash_sm80 prepare");
        !s.ok()) {
      return s;
    }
    BackwardParams by_rows = params;
    by_rows.query_tiles = static_cast<int32_t>(CeilDiv(p.seqlen_q, kernels.tile.gradient_queries));
    if (SumsRowDot(p)) {
      if (absl::Status s = ToStatus(kernels.row_dot(by_rows, launch.stream), "flash_sm80 row_dot");
          !s.ok()) {
        return s;
      }
    }
    if (absl::Status s = RunSlices(p, params, tiled, launch.stream); !s.ok()) return s;
    const cudaError_t error = p.deterministic ? kernels.query_gradient(by_rows, launch.stream)
                                              : tiled.finish(params, launch.stream);
    if (absl::Status s = ToStatus(error, "flash_sm80 dq"); !s.ok()) return s;
    if (params.dsink == nullptr) return absl::OkStatus();
    return ToStatus(LaunchSinkGradient(params, launch.stream), "flash_sm80 dsink");
  }

 private:
  static int BackwardShared(const AttentionProblem& p, const Kernels& kernels,
                            const DeviceProperties& device) {
    const int backward = BackwardFor(kernels, device).shared_bytes;
    return p.deterministic || SumsRowDot(p) ? std::max(backward, kernels.tile.gradient_shared_bytes)
                                            : backward;
  }

  // One launch of Backward; but where several thread blocks would add to one element of dbias and
  // the order must not matter, one launch after another for each sequence or kv head that shares
  // it.
  static absl::Status RunSlices(const AttentionProblem& p, BackwardParams params,
                                const BackwardKernels& kernels, cudaStream_t stream) {
    int32_t batch_step = params.batch_count, kv_step = params.kv_count;
    if (params.dbias != nullptr) {
      const bool batch_shared = p.bias->batch == 1 && p.layout == Layout::kBshd && p.batch > 1;
      const bool heads_shared = p.bias->heads == 1 && p.num_kv_heads > 1;
      params.dbias_atomic = !p.deterministic && (batch_shared || heads_shared);
      if (p.deterministic && batch_shared) batch_step = 1;
      if (p.deterministic && heads_shared) kv_step = 1;
    }
    const int32_t batch = params.batch_count, kv_heads = params.kv_count;
    for (int32_t b = 0; b < batch; b += batch_step) {
      for (int32_t kv = 0; kv < kv_heads; kv += kv_step) {
        params.batch_begin = b;
        params.batch_count = batch_step;
        params.kv_begin = kv;
        params.kv_count = kv_step;
        if (absl::Status s =
                ToStatus(kernels.backward(params, ModeOf(p), stream), "flash_sm80 backward");
            !s.ok()) {
          return s;
        }
      }
    }
    return absl::OkStatus();
  }
};

}  // namespace
}  // namespace sm80

std::shared_ptr<const DevicePath> MakeFlashSm80Path() {
  return std::make_shared<sm80::FlashSm80Path>();
}

}  // namespace attn::cuda
