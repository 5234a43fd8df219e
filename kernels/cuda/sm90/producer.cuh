// The producer warp: takes works from the counter, describes them to the consumers and copies their
// queries, keys and values.
#ifndef ATTN_KERNELS_CUDA_SM90_PRODUCER_CUH_
#define ATTN_KERNELS_CUDA_SM90_PRODUCER_CUH_

#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/sm90/work.cuh"

namespace attn::cuda::sm90 {

// Copies the box of `rows` rows at `token` to shared memory, panel by panel.
template <int kPanels, int kRows>
__device__ __forceinline__ void CopyRows(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int head, int token, int batch) {
  ptx::BarrierArriveExpect(barrier, kPanels * kRows * 128);
#pragma unroll
  for (int c = 0; c < kPanels; ++c) {
    ptx::CopyBox4(to + c * kRows * 128, map, barrier, c * kPanel, head, token, batch);
  }
}

// Copies the queries of warpgroup `group`; `works`: with queries so far.
template <class Traits>
__device__ __forceinline__ void CopyQueries(const ForwardParams& p, uint32_t shared, const Work& w,
                                            uint32_t works, int group, bool leader) {
  const uint32_t use = works * Traits::kConsumers + group;
  const uint32_t buffer = StageOf<Traits::kQBuffers>(use);
  ptx::BarrierWait(shared + Traits::kQEmpty + 8 * buffer, ParityOf<Traits::kQBuffers>(use) ^ 1);
  if (leader) {
    CopyRows<Traits::kPanels, kWarpgroupRows>(
        shared + buffer * Traits::kQBytes, &p.q, shared + Traits::kQFull + 8 * buffer, w.h,
        w.token + PlaceOf(w, group), static_cast<int>(w.s.batch));
  }
}

template <class Traits>
__device__ __forceinline__ void Produce(const ForwardParams& p, uint32_t shared, Work* works) {
  constexpr int kStages = Traits::kStages, kKeys = Traits::kKeys;
  const bool leader = threadIdx.x % 32 == 0;
  uint32_t tiles = 0, queries = 0;
  uint32_t index = blockIdx.x;
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t slot = StageOf<kWorkSlots>(turn);
    uint32_t next = 0;
    if (leader && index < p.work) next = gridDim.x + atomicAdd(p.counters, 1);
    Work w = {};
    const uint8_t* mask = nullptr;
    if (index < p.work) {
      w = WorkOf<Traits>(p, index, turn);
      w.some = true;
      if constexpr (Traits::kBlockMask) {
        if (p.score.block_mask != nullptr) {
          mask = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads).block_mask;
        }
      }
      w.first = NextShown<Traits>(p, w, mask, w.end - 1);
    }
    ptx::BarrierWait(shared + Traits::kWorkEmpty + 8 * slot, ParityOf<kWorkSlots>(turn) ^ 1);
    if (leader) {
      works[slot] = w;
      ptx::BarrierArrive(shared + Traits::kWorkFull + 8 * slot);
    }
    if (!w.some) break;
    int n = w.first;
    if (n >= w.begin) {
      const int batch = static_cast<int>(w.s.batch), kv_head = w.h / p.group;
      CopyQueries<Traits>(p, shared, w, queries, 0, leader);
      for (bool first = true; n >= w.begin; first = false) {
        const int token = static_cast<int>(w.s.k_token) + n * kKeys;
        const uint32_t stage = StageOf<kStages>(tiles), parity = ParityOf<kStages>(tiles) ^ 1;
        ++tiles;
        ptx::BarrierWait(shared + Traits::kKEmpty + 8 * stage, parity);
        if (leader) {
          CopyRows<Traits::kPanels, kKeys>(shared + Traits::kKAt + stage * Traits::kKBytes, &p.k,
                                           shared + Traits::kKFull + 8 * stage, kv_head, token,
                                           batch);
        }
        if (first) {  // the other warpgroups begin later
#pragma unroll
          for (int group = 1; group < Traits::kConsumers; ++group) {
            CopyQueries<Traits>(p, shared, w, queries, group, leader);
          }
        }
        ptx::BarrierWait(shared + Traits::kVEmpty + 8 * stage, parity);
        if (leader) {
          CopyRows<Traits::kPanelsV, kKeys>(shared + Traits::kVAt + stage * Traits::kVBytes, &p.v,
                                            shared + Traits::kVFull + 8 * stage, kv_head, token,
                                            batch);
        }
        n = NextShown<Traits>(p, w, mask, n - 1);
      }
      ++queries;
    }
    index = __shfl_sync(~0u, next, 0);
  }
  // The last CTA leaves the counters as it found them.
  if (leader) {
    __threadfence();
    if (atomicAdd(p.counters + 1, 1) == gridDim.x - 1) {
      p.counters[0] = 0;
      p.counters[1] = 0;
    }
  }
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_PRODUCER_CUH_
