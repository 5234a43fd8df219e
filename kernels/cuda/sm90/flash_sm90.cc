#include "kernels/cuda/sm90/flash_sm90.h"

#include <algorithm>
#include <string>

#include "kernels/api/text.h"
#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/rejector.h"
#include "kernels/cuda/sm90/plan.h"
#include "kernels/cuda/sm90/tensor_map.h"

namespace attn::cuda {
namespace sm90 {
namespace {

// Counted in uint32: pieces of work, with a CTA's share to spare; and tiles of keys that a CTA
// walks over, with as many to spare, because its share is known only on the average.
constexpr int64_t kMaxWork = (int64_t{1} << 31) - 1, kMaxKeyTiles = kMaxWork;

struct NamedSlot {
  std::string_view name;
  Slot slot;
};
constexpr NamedSlot kInputs[] = {{"q", kSlotQ}, {"k", kSlotK}, {"v", kSlotV}};

// If every row sees every key.
int64_t KeyTilesOfCta(const AttentionProblem& p, const ForwardPlan& plan) {
  const int64_t tiles = CeilDiv(CeilDiv(p.seqlen_k, plan.splits), plan.tile_k);
  return plan.work * tiles / std::max(plan.ctas / plan.cluster, 1);
}

// All but the tensor maps.
ForwardParams MakeParams(const AttentionProblem& p, const ForwardTensors& t, const Launch& launch,
                         const ForwardPlan& plan) {
  const SplitWorkspace workspace = PlanSplitWorkspace(p, plan.splits);
  const auto by = [](int64_t d) { return MakeDivisor(static_cast<uint32_t>(d)); };
  return {.q = {},
          .k = {},
          .v = {},
          .out_map = {},
          .sequences = MakeSequenceParams(p, launch.sequences),
          .lse_head = LseHeadStride(p),
          .num_heads = static_cast<int32_t>(p.num_heads),
          .pack = plan.pack,
          .work_heads = static_cast<int32_t>(p.num_heads >> plan.pack),
          .tiles = static_cast<int32_t>(plan.tiles),
          .section = static_cast<int32_t>(plan.section),
          .last_section = static_cast<int32_t>(plan.last_section),
          .work = static_cast<uint32_t>(plan.work),
          .splits = plan.splits,
          .split_tiles = plan.split_tiles,
          .by_work_heads = by(p.num_heads >> plan.pack),
          .by_work_group = by(MapGroup(p) >> plan.pack),
          .by_section = by(plan.section),
          .by_last_section = by(plan.last_section),
          .by_section_work = by(plan.section * plan.tiles * plan.splits),
          .by_splits = by(plan.splits),
          .counters = launch.counters,
          .last_first = !TilesAlike(p),
          .loose_keys = HasLooseKeys(p),
          .out_fp32 = p.out_dtype == DType::kFp32,
          .out_ends = p.layout == Layout::kBshd,
          .head_dim_v = static_cast<int32_t>(p.head_dim_v),
          .out = t.out,
          .lse = t.lse,
          .out_strides = ContiguousStrides(p, p.seqlen_q, p.num_heads, p.head_dim_v),
          .partial_out = RegionAt<float>(launch.workspace, workspace.partial_out),
          .partial_lse = RegionAt<float>(launch.workspace, workspace.partial_lse),
          .partial_rows = p.num_heads * p.total_q,
          .score = MakeScoreParams(p)};
}

absl::Status EncodeMaps(const AttentionProblem& p, const ForwardTensors& t, const ForwardPlan& plan,
                        ForwardParams* params) {
  // A tensor without tokens may have no address; a map wants one, and nothing is read by it.
  const auto encode = [&](Slot slot, const void* data, MapBox box, CUtensorMap* map) {
    return EncodeTensorMap(MapInput(p, slot), data != nullptr ? data : t.q, p.dtype, box, map);
  };
  const auto rows = [&plan](int rows) {
    return MapBox{.heads = 1 << plan.pack, .tokens = rows >> plan.pack};
  };
  const MapBox keys{.heads = 1, .tokens = plan.tile_k / plan.cluster};
  if (absl::Status s = encode(kSlotQ, t.q, rows(kWarpgroupRows), &params->q); !s.ok()) return s;
  if (absl::Status s = encode(kSlotK, t.k, keys, &params->k); !s.ok()) return s;
  if (absl::Status s = encode(kSlotV, t.v, keys, &params->v); !s.ok()) return s;
  if (plan.splits > 1 || params->out_fp32) return absl::OkStatus();
  return EncodeTensorMap(MapOutput(p), t.out, p.dtype, rows(kWarpgroupRows / 4), &params->out_map);
}

class FlashSm90Path final : public DevicePath {
 public:
  PathId path() const override { return PathId::kFlashSm90; }

  void AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties& device,
                        std::vector<Rejection>* rejections) const override {
    Rejector reject(path(), rejections);
    const size_t before = rejections->size();
    if (device.capability() != 90) {
      reject.Add(Reason::kArchUnsupported,
                 Cat("compute capability ", device.major, ".", device.minor, ", not 9.0"));
    }
    reject.FlashShape(p);
    if (pass == Pass::kBackward) {
      reject.Add(Reason::kNotBuilt, "pass backward: this binary has no such kernel of flash_sm90");
    } else if (p.seqlen_q <= kDecodeQueries) {
      reject.Add(Reason::kOptionUnsupported, Cat("seqlen_q ", p.seqlen_q, " <= ", kDecodeQueries,
                                                 ": flash_sm80 has a kernel for few queries"));
    }
    for (const NamedSlot& input : kInputs) {
      std::string obstacle = MapObstacle(input.name, MapInput(p, input.slot));
      if (!obstacle.empty()) reject.Add(Reason::kAlignment, std::move(obstacle));
    }
    if (rejections->size() > before) return;
    const Kernels& kernels = KernelsFor(p);
    reject.SharedMemory(std::max(kernels.forward_info[static_cast<int>(ModeOf(p))].shared_bytes,
                                 kernels.narrow_info.shared_bytes),
                        device);
    const ForwardPlan plan = PlanForward(p, kernels, device);
    if (plan.work > kMaxWork) {
      reject.Add(Reason::kOptionUnsupported,
                 Cat("batch * num_heads * seqlen_q: ", plan.work, " tiles > ", kMaxWork));
    } else if (const int64_t tiles = KeyTilesOfCta(p, plan); tiles > kMaxKeyTiles) {
      reject.Add(Reason::kOptionUnsupported,
                 Cat("batch * num_heads * seqlen_q * seqlen_k: ", tiles,
                     " tiles of keys for a multiprocessor > ", kMaxKeyTiles));
    }
  }

  std::string KernelId(const AttentionProblem& p, Pass pass,
                       const DeviceProperties& device) const override {
    const Kernels& kernels = KernelsFor(p);
    std::string id = Cat("sm90_fwd_", TileName(p, kernels.head_dim, kernels.head_dim_v));
    if (ModeOf(p) == Mode::kOptions) id += "_options";
    const ForwardPlan plan = PlanForward(p, kernels, device);
    if (plan.narrow) id += Cat("_q", plan.tile_q);
    if (plan.pack > 0) id += Cat("_pack", 1 << plan.pack);
    if (plan.cluster > 1) id += Cat("_cluster", plan.cluster);
    return plan.splits > 1 ? Cat(id, "_split", plan.splits) : id;
  }

  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass,
                         const DeviceProperties& device) const override {
    return PlanSplitWorkspace(p, PlanForward(p, KernelsFor(p), device).splits).bytes;
  }

  TileModel Model(const AttentionProblem& p, Pass pass,
                  const DeviceProperties& device) const override {
    const Kernels& kernels = KernelsFor(p);
    return ModelForward(p, kernels, PlanForward(p, kernels, device));
  }

  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                       const Launch& launch) const override {
    const Kernels& kernels = KernelsFor(p);
    const ForwardPlan plan = PlanForward(p, kernels, *launch.device);
    if (plan.work == 0) return absl::OkStatus();
    ForwardParams params = MakeParams(p, tensors, launch, plan);
    if (absl::Status s = EncodeMaps(p, tensors, plan, &params); !s.ok()) return s;
    if (absl::Status s = ToStatus(kernels.forward(params,
                                                  {.mode = ModeOf(p),
                                                   .narrow = plan.narrow,
                                                   .packed = plan.pack > 0,
                                                   .cluster = plan.cluster},
                                                  plan.ctas, launch.stream),
                                  "flash_sm90 forward");
        !s.ok() || plan.splits == 1) {
      return s;
    }
    return ToStatus(LaunchMerge(MergeParamsOf(params), p.dtype, /*early=*/true, launch.stream),
                    "flash_sm90 merge");
  }

  absl::Status Backward(const AttentionProblem&, const BackwardTensors&,
                        const Launch&) const override {
    return absl::InternalError("flash_sm90 has no backward kernel");
  }
};

}  // namespace
}  // namespace sm90

std::shared_ptr<const DevicePath> MakeFlashSm90Path() {
  return std::make_shared<sm90::FlashSm90Path>();
}

}  // namespace attn::cuda
