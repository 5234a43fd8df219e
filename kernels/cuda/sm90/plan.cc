#include "kernels/cuda/sm90/plan.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/common/plan.h"

namespace attn::cuda::sm90 {
namespace {

template <DType kType>
const Kernels& KernelsForDims(int64_t d, int64_t dv) {
  if (d <= 64 && dv <= 64) return KernelsOf<kType, 64, 64>();
  if (d <= 96 && dv <= 96) return KernelsOf<kType, 96, 96>();
  if (d <= 128 && dv <= 128) return KernelsOf<kType, 128, 128>();
  if (d <= 192 && dv <= 128) return KernelsOf<kType, 192, 128>();
  if (d <= 192 && dv <= 192) return KernelsOf<kType, 192, 192>();
  return KernelsOf<kType, 256, 256>();
}

bool OneHeadStored(const AttentionProblem& p) {
  return p.num_kv_heads > 1 && p.k.head == 0 && p.v.head == 0;
}

// Where tiles differ in length the longest go first, all heads' before all heads' next, in sections
// of heads that are about equal. Long sequences: as many heads as L2 holds keys and values of, for
// many tiles are easier to share out; of short ones a quarter, because each section reads them anew
// when it begins, and nothing later. Tiles of equal length go head by head.
int64_t Section(const AttentionProblem& p, int64_t work_heads, const DeviceProperties& device) {
  if (TilesAlike(p)) return 1;
  const double heads = static_cast<double>(work_heads) * static_cast<double>(p.batch);
  const double bytes = static_cast<double>(p.num_heads) * static_cast<double>(p.batch) /
                       static_cast<double>(MapGroup(p)) *
                       static_cast<double>(p.seqlen_k * (p.head_dim + p.head_dim_v)) *
                       static_cast<double>(SizeOf(p.dtype));
  const double share = std::clamp(static_cast<double>(p.seqlen_k) / 8192.0, 0.25, 1.0);
  const double sections =
      std::max(1.0, std::round(bytes / (share * static_cast<double>(device.l2_bytes))));
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(heads / sections)));
}

// Whether two CTAs share each tile of queries, now of both: where a row sees kernels.cluster_keys
// or more, and little is lost by tiles twice as large. Long sequences count more.
bool Clusters(const AttentionProblem& p, const Kernels& kernels, const ForwardInfo& tile) {
  const Mode mode = ModeOf(p);
  if (mode != Mode::kFull && mode != Mode::kLimited) return false;
  const double left = static_cast<double>(p.window_left);
  const double right = static_cast<double>(p.window_right) + 1;
  double alone = 0, shared = 0, keys = 0;  // tiles times keys; the first times keys
  for (const Sequence& s : p.sequences) {
    // Keys that the last row sees.
    const double end =
        std::min(static_cast<double>(s.len_k), static_cast<double>(s.len_q + s.off) + right - 1);
    const double len = std::clamp(end, 0.0, left + right);
    const double cost = static_cast<double>(CeilDiv(s.rows_q, tile.queries)) * len;
    alone += cost;
    shared +=
        static_cast<double>(kMaxCluster * CeilDiv(s.rows_q, kMaxCluster * tile.queries)) * len;
    keys += cost * len;
  }
  constexpr double kLoss = 1.01;
  return keys >= alone * kernels.cluster_keys && shared <= alone * kLoss && alone > 0;
}

// At its end multiprocessors wait for the one that works on the longest tile. If it is long enough
// for two tiles of each multiprocessor, the longest, which go first, are done before the shortest.
int64_t LastSection(const AttentionProblem& p, const ForwardPlan& plan, int64_t slots) {
  const int64_t heads = (p.num_heads >> plan.pack) * p.batch;
  const int64_t wanted = TilesAlike(p) ? 1 : CeilDiv(2 * slots, std::max<int64_t>(plan.tiles, 1));
  const int64_t least = std::min(heads, std::max(plan.section, wanted));
  return heads - (heads - least) / plan.section * plan.section;
}

}  // namespace

const Kernels& KernelsFor(const AttentionProblem& p) {
  return p.dtype == DType::kBf16 ? KernelsForDims<DType::kBf16>(p.head_dim, p.head_dim_v)
                                 : KernelsForDims<DType::kFp16>(p.head_dim, p.head_dim_v);
}

Mode ModeOf(const AttentionProblem& p) {
  if (p.softcap > 0.0f || p.alibi || p.bias || p.dropout || !(p.softmax_scale > 0.0f)) {
    return Mode::kOptions;
  }
  if (p.block_mask) return Mode::kBlocks;
  const bool limited = p.window_left < kUnlimited || p.window_right < kUnlimited;
  return limited ? Mode::kLimited : Mode::kFull;
}

bool TilesAlike(const AttentionProblem& p) { return p.window_right >= kUnlimited; }

ForwardPlan PlanForward(const AttentionProblem& p, const Kernels& kernels,
                        const DeviceProperties& device) {
  const int64_t slots = device.multiprocessors;  // a CTA fills a multiprocessor
  ForwardPlan plan{ChooseTiling(p, kernels, slots)};
  const ForwardInfo& tile =
      plan.narrow ? kernels.narrow_info : kernels.forward_info[static_cast<int>(ModeOf(p))];
  plan.tile_q = tile.queries;
  plan.tile_k = tile.keys;
  const int64_t heads = p.num_heads >> plan.pack;
  // Clusters are for long sequences, which fill their tiles.
  if (!plan.narrow && plan.splits == 1 && plan.pack == 0 && Clusters(p, kernels, tile)) {
    plan.cluster = kMaxCluster;
  }
  plan.tiles = CeilDiv(p.seqlen_q << plan.pack, int64_t{tile.queries} * plan.cluster);
  plan.section = Section(p, heads, device);
  plan.last_section = LastSection(p, plan, slots / plan.cluster);
  plan.work = plan.tiles * plan.splits * heads * p.batch;
  plan.ctas = static_cast<int>(std::min(slots / plan.cluster, plan.work)) * plan.cluster;
  return plan;
}

bool HasLooseKeys(const AttentionProblem& p) {
  const int64_t tokens = p.layout == Layout::kBshd ? p.seqlen_k : p.total_k;
  return std::any_of(p.sequences.begin(), p.sequences.end(), [tokens](const Sequence& s) {
    return s.len_k > 0 && s.k_token + s.len_k < tokens;
  });
}

StridedTensor MapInput(const AttentionProblem& p, Slot slot) {
  StridedTensor tensor = StridedInput(p, Pass::kForward, slot);
  if (slot != kSlotQ && OneHeadStored(p)) tensor.heads = 1;
  return tensor;
}

StridedTensor MapOutput(const AttentionProblem& p) {
  const bool bshd = p.layout == Layout::kBshd;
  const TensorStrides strides = ContiguousStrides(p, p.seqlen_q, p.num_heads, p.head_dim_v);
  return {.element_bytes = SizeOf(p.out_dtype),
          .batch = bshd ? p.batch : 1,
          .tokens = bshd ? p.seqlen_q : p.total_q,
          .heads = p.num_heads,
          .dim = p.head_dim_v,
          .strides = {.batch = strides.batch, .token = strides.token, .head = strides.head}};
}

int64_t MapGroup(const AttentionProblem& p) { return OneHeadStored(p) ? p.num_heads : p.group(); }

TileModel ModelForward(const AttentionProblem& p, const Kernels& kernels, const ForwardPlan& plan) {
  TileModel model = ForwardTraffic(p, {.tile_q = int64_t{plan.tile_q} * plan.cluster >> plan.pack,
                                       .tile_k = plan.tile_k,
                                       .splits = plan.splits,
                                       .end_multiple = TilesAlike(p) ? 0 : 64 >> plan.pack,
                                       .heads_per_read = int64_t{1} << plan.pack,
                                       .key_reads = plan.cluster});
  model.tile_q = plan.tile_q;
  model.tile_k = plan.tile_k;
  model.on_chip_elements = (model.tile_q + model.tile_k) * (kernels.head_dim + kernels.head_dim_v) +
                           model.tile_q * model.tile_k;
  return model;
}

}  // namespace attn::cuda::sm90
