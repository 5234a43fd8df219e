// The producer warp: takes works from the counter, describes them to the CTA's consumers and copies
// their queries, keys and values.
#ifndef ATTN_KERNELS_CUDA_SM90_PRODUCER_CUH_
#define ATTN_KERNELS_CUDA_SM90_PRODUCER_CUH_

#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/ptx/warpgroup.cuh"
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

// Copies a tile of keys or values, the first at `token`; in a cluster this CTA's share of it, to
// all.
template <class Traits, int kPanels>
__device__ __forceinline__ void CopyKeys(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int head, int token, int batch, uint32_t rank) {
  if constexpr (Traits::kCluster == 1) {
    CopyRows<kPanels, Traits::kKeys>(to, map, barrier, head, token, batch);
  } else {
    constexpr int kShare = Traits::kKeys / Traits::kCluster, kTileBytes = Traits::kKeys * 128;
    ptx::BarrierArriveExpect(barrier, kPanels * kTileBytes);
    to += rank * kShare * 128;
    token += static_cast<int>(rank) * kShare;
#pragma unroll
    for (int c = 0; c < kPanels; ++c) {
      ptx::MulticastBox4(to + c * kTileBytes, map, barrier, c * kPanel, head, token, batch,
                         (1 << Traits::kCluster) - 1);
    }
  }
}

// The first CTA of a cluster tells the second which piece of work comes next, …
template <class Traits>
__device__ __forceinline__ void TellNext(uint32_t shared, uint32_t turn, uint32_t next,
                                         bool leader) {
  ptx::BarrierWait(shared + Traits::kNextEmpty, turn % 2 ^ 1);
  if (leader) {
    ptx::StoreCluster4(ptx::ClusterAddress(shared + Traits::kNextAt, 1), next,
                       ptx::ClusterAddress(shared + Traits::kNextFull, 1));
  }
}
// … and that says when it has read it.
template <class Traits>
__device__ __forceinline__ uint32_t HearNext(uint32_t shared, uint32_t turn, bool leader) {
  if (leader) ptx::BarrierArriveExpect(shared + Traits::kNextFull, 4);
  ptx::BarrierWait(shared + Traits::kNextFull, turn % 2);
  const uint32_t next = ptx::LoadShared(shared + Traits::kNextAt);
  __syncwarp();
  ptx::ClusterBarrierArriveIf(ptx::ClusterAddress(shared + Traits::kNextEmpty, 0), leader);
  return next;
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
        w.token + QueryOf<Traits>(p, PlaceOf(w, group)), static_cast<int>(w.s.batch));
  }
}

template <class Traits>
__device__ __forceinline__ void InitBarriers(uint32_t shared) {
#pragma unroll
  for (int buffer = 0; buffer < Traits::kQBuffers; ++buffer) {
    ptx::BarrierInit(shared + Traits::kQFull + 8 * buffer, 1);
    ptx::BarrierInit(shared + Traits::kQEmpty + 8 * buffer, 4);
  }
#pragma unroll
  for (int slot = 0; slot < kWorkSlots; ++slot) {
    ptx::BarrierInit(shared + Traits::kWorkFull + 8 * slot, 1);
    ptx::BarrierInit(shared + Traits::kWorkEmpty + 8 * slot, Traits::kConsumerWarps);
  }
#pragma unroll
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    constexpr int kReleases = Traits::kConsumerWarps * Traits::kCluster;
    ptx::BarrierInit(shared + Traits::kKFull + 8 * stage, 1);
    ptx::BarrierInit(shared + Traits::kVFull + 8 * stage, 1);
    ptx::BarrierInit(shared + Traits::kKEmpty + 8 * stage, kReleases);
    ptx::BarrierInit(shared + Traits::kVEmpty + 8 * stage, kReleases);
  }
  ptx::BarrierInit(shared + Traits::kNextFull, 1);
  ptx::BarrierInit(shared + Traits::kNextEmpty, 1);
  ptx::FenceBarrierInit();
}

template <class Traits>
__device__ __forceinline__ void Produce(const ForwardParams& p, uint32_t shared, Work* works) {
  constexpr int kStages = Traits::kStages, kKeys = Traits::kKeys;
  // Warpgroups whose queries are copied before the first keys; the others begin later. Where there
  // is one buffer for each, that of the first may be in use still, and a stage is free sooner.
  constexpr int kFirstGroups = Traits::kRowsInQueries ? 1 : 0;
  uint32_t leader_lane;
  const bool leader = ptx::ElectOne(&leader_lane);
  uint32_t tiles = 0, queries = 0;
  const uint32_t rank = Traits::kCluster > 1 ? ptx::ClusterRank() : 0;
  const uint32_t clusters = gridDim.x / Traits::kCluster;
  uint32_t index = blockIdx.x / Traits::kCluster;
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t slot = StageOf<kWorkSlots>(turn);
    const auto publish = [&](const Work& w) {
      ptx::BarrierWait(shared + Traits::kWorkEmpty + 8 * slot, ParityOf<kWorkSlots>(turn) ^ 1);
      if (leader) {
        works[slot] = w;
        ptx::BarrierArrive(shared + Traits::kWorkFull + 8 * slot);
      }
    };
    if (index >= p.work) {
      publish(Work{});
      break;
    }
    // On its way until the end of this turn: one elected lane, which the compiler knows to be one,
    // so that it does not sum lanes and wait.
    uint32_t taken = 0;
    if (leader && rank == 0) taken = atomicAdd(p.counters, 1);
    Work w = WorkOf<Traits>(p, index, turn, rank);
    w.some = true;
    const uint8_t* mask = nullptr;
    if constexpr (Traits::kBlockMask) {
      if (p.score.block_mask != nullptr) {
        mask = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads).block_mask;
      }
    }
    w.first = NextShown<Traits>(p, w, mask, w.end - 1);
    publish(w);
    const bool tells = Traits::kCluster > 1 && rank == 0, loads = w.first >= w.begin;
    if (loads) {
      const int batch = static_cast<int>(w.s.batch);
      const int kv_head = static_cast<int>(Quotient(QueryOf<Traits>(p, w.h), p.by_work_group));
#pragma unroll
      for (int group = 0; group < kFirstGroups; ++group) {
        CopyQueries<Traits>(p, shared, w, queries, group, leader);
      }
      for (int n = w.first; n >= w.begin; n = NextShown<Traits>(p, w, mask, n - 1)) {
        const int token = static_cast<int>(w.s.k_token) + n * kKeys;
        const uint32_t stage = StageOf<kStages>(tiles), parity = ParityOf<kStages>(tiles) ^ 1;
        ++tiles;
        ptx::BarrierWait(shared + Traits::kKEmpty + 8 * stage, parity);
        if (leader) {
          CopyKeys<Traits, Traits::kPanels>(shared + Traits::kKAt + stage * Traits::kKBytes, &p.k,
                                            shared + Traits::kKFull + 8 * stage, kv_head, token,
                                            batch, rank);
        }
        if (n == w.first) {
#pragma unroll
          for (int group = kFirstGroups; group < Traits::kConsumers; ++group) {
            CopyQueries<Traits>(p, shared, w, queries, group, leader);
          }
          if (tells) TellNext<Traits>(shared, turn, clusters + taken, leader);
        }
        ptx::BarrierWait(shared + Traits::kVEmpty + 8 * stage, parity);
        if (leader) {
          CopyKeys<Traits, Traits::kPanelsV>(shared + Traits::kVAt + stage * Traits::kVBytes, &p.v,
                                             shared + Traits::kVFull + 8 * stage, kv_head, token,
                                             batch, rank);
        }
      }
      ++queries;
    }
    uint32_t next = clusters + taken;
    if (tells && !loads) TellNext<Traits>(shared, turn, next, leader);
    if (Traits::kCluster > 1 && rank != 0) next = HearNext<Traits>(shared, turn, leader);
    index = __shfl_sync(~0u, next, leader_lane);
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
