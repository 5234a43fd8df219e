// Merges the partial results of split keys: lse = log sum exp lse_s, out = sum of exp(lse_s - lse)
// out_s.
#include "kernels/cuda/common/launch_kernel.h"
#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/math.cuh"

namespace attn::cuda {
namespace {

constexpr int kMergeWarps = 4;                // of a block
constexpr int kLaneSplits = kMaxSplits / 32;  // whose weights a lane keeps
constexpr int kWarpColumns = 128;             // four a lane
constexpr int kAhead = 8;                     // splits of a warp that are under way at a time
// Of more rows than this each has a warp of its own: then there are enough of them to hide how long
// each waits for its parts, and most of a block's time would go by between its warps.
constexpr int64_t kManyRows = 2048;

// A row of the lse-shaped space is merged by kRowWarps warps, which take the splits in turn; each
// makes all weights itself, while the first parts that it sums are under way.
template <class T, int kRowWarps>
__global__ void __launch_bounds__(kMergeWarps * 32) Merge(const __grid_constant__ MergeParams p) {
  const int lane = threadIdx.x % 32, warp_of_block = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int warp = warp_of_block % kRowWarps;
  const uint32_t row = blockIdx.x * (kMergeWarps / kRowWarps) + warp_of_block / kRowWarps;
  if (row >= p.partial_rows) return;  // all of a block's warps, where they share rows
  const uint32_t head_row = Quotient(row, p.by_lse_head);
  const uint32_t batch = Quotient(head_row, p.by_num_heads), h = head_row - batch * p.num_heads;
  const int64_t token = batch * p.lse_head + (row - head_row * p.lse_head);
  const float sink_or_none = p.sinks != nullptr ? __ldg(p.sinks + h) : -CUDART_INF_F;
  const float* const parts = p.partial_out + int64_t{row} * p.head_dim_v;
  const int64_t split_elements = p.partial_rows * p.head_dim_v;
  const int64_t out = (token * p.num_heads + h) * p.head_dim_v;
  float4 ahead[kAhead];  // parts of this warp's splits from `first` on
  const auto load = [&](int c, int first) {
#pragma unroll
    for (int x = 0; x < kAhead; ++x) {
      const int split = first + x * kRowWarps;
      if (split < p.splits && c < p.head_dim_v) {
        ahead[x] = *reinterpret_cast<const float4*>(parts + split * split_elements + c);
      }
    }
  };
  float weights[kLaneSplits];
  ptx::AwaitPredecessors();

#pragma unroll
  for (int x = 0; x < kLaneSplits; ++x) {
    const int split = x * 32 + lane;
    weights[x] = split < p.splits ? p.partial_lse[split * p.partial_rows + row] : -CUDART_INF_F;
  }
  load(lane * 4, warp);
  float top = weights[0], sum = 0.0f;
#pragma unroll
  for (int x = 1; x < kLaneSplits; ++x) top = fmaxf(top, weights[x]);
  top = WarpReduce(top, MaxOp());
  const bool valid = top != CUDART_INF_F;  // +infinity marks rows beyond len_q
  const float sink = valid ? sink_or_none : -CUDART_INF_F;
  const bool has_keys = valid && top != -CUDART_INF_F;
  const float base = has_keys ? fmaxf(top, sink) : 0.0f;
#pragma unroll
  for (int x = 0; x < kLaneSplits; ++x) {
    weights[x] = has_keys ? ptx::Exp2((weights[x] - base) * kLog2E) : 0.0f;
    sum += weights[x];
  }
  sum = WarpReduce(sum, SumOp());
  if (has_keys) sum += ptx::Exp2((sink - base) * kLog2E);
  if (warp == 0 && lane == 0) {
    // Without keys exactly the sink.
    p.lse[row] = has_keys ? base + logf(sum) : sink;
  }
  const float factor = has_keys ? 1.0f / sum : 0.0f;
  for (int c0 = 0; c0 < p.head_dim_v; c0 += kWarpColumns) {
    const int c = c0 + lane * 4;
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = warp; first < p.splits; first += kAhead * kRowWarps) {
      if (c0 > 0 || first != warp) load(c, first);
#pragma unroll
      for (int x = 0; x < kAhead; ++x) {
        const int split = first + x * kRowWarps;
        if (split >= p.splits) break;
        float mine = weights[0];
#pragma unroll
        for (int y = 1; y < kLaneSplits; ++y) mine = split / 32 == y ? weights[y] : mine;
        const float weight = __shfl_sync(~0u, mine, split % 32);
        if (!has_keys || c >= p.head_dim_v) continue;  // what was not loaded
        acc.x = fmaf(weight, ahead[x].x, acc.x);
        acc.y = fmaf(weight, ahead[x].y, acc.y);
        acc.z = fmaf(weight, ahead[x].z, acc.z);
        acc.w = fmaf(weight, ahead[x].w, acc.w);
      }
    }
    const auto store = [&](int column, float2 x) {
      if (column >= p.head_dim_v) return;
      StorePair<T>(p.out, p.out_fp32, out + column, x.x * factor, x.y * factor);
    };
    if constexpr (kRowWarps == 1) {
      store(c, make_float2(acc.x, acc.y));
      store(c + 2, make_float2(acc.z, acc.w));
    } else {
      static_assert(kRowWarps == kMergeWarps);
      __shared__ float4 sums[kMergeWarps][32];
      if (c0 > 0) __syncthreads();
      sums[warp][lane] = acc;
      __syncthreads();
      const int pair = threadIdx.x;
      if (pair < kWarpColumns / 2) {
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
          const float2 x = reinterpret_cast<const float2*>(sums[w])[pair];
          total.x += x.x;
          total.y += x.y;
        }
        store(c0 + pair * 2, total);
      }
    }
  }
}

template <class T>
cudaError_t LaunchMergeOf(const MergeParams& p, bool early, cudaStream_t stream) {
  LaunchShape shape{.blocks = p.partial_rows, .threads = kMergeWarps * 32, .early = early};
  if (p.partial_rows <= kManyRows) return LaunchKernel<&Merge<T, kMergeWarps>>(shape, p, stream);
  shape.blocks = (p.partial_rows + kMergeWarps - 1) / kMergeWarps;
  return LaunchKernel<&Merge<T, 1>>(shape, p, stream);
}

}  // namespace

cudaError_t LaunchMerge(const MergeParams& p, DType type, bool early, cudaStream_t stream) {
  return type == DType::kBf16 ? LaunchMergeOf<__nv_bfloat16>(p, early, stream)
                              : LaunchMergeOf<__half>(p, early, stream);
}

}  // namespace attn::cuda
