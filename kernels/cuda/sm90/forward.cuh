// flash_sm90 forward: a CTA per multiprocessor takes tiles of queries one after another. A producer
// warp copies Q, and K and V in stages, by TMA; each consumer warpgroup has 64 queries. A step
// issues S = Q K^T of its tile of keys and O += P V of the one before, and then turns S into
// probabilities; so it goes on from the last keys of one tile of queries to the first of the next.
// One warpgroup's softmax runs under the others' products.
#ifndef ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_
#define ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_

#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/ptx/warpgroup.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/sm90/kernel_params.h"
#include "kernels/cuda/sm90/producer.cuh"
#include "kernels/cuda/sm90/rows.cuh"
#include "kernels/cuda/sm90/softmax.cuh"
#include "kernels/cuda/sm90/work.cuh"

namespace attn::cuda::sm90 {

// Waits for the warpgroup's turn to issue products, and passes the turn on.
template <class Traits>
__device__ __forceinline__ void AwaitTurn(int group) {
  if constexpr (Traits::kTurns) ptx::NamedSync(1 + group, 256);
}
template <class Traits>
__device__ __forceinline__ void PassTurn(int group) {
  if constexpr (Traits::kTurns) {
    ptx::NamedArrive(1 + (group + 1 == Traits::kConsumers ? 0 : group + 1), 256);
  }
}

template <class Traits>
__device__ __forceinline__ uint32_t StageBarrier(const Consumer<Traits>& c, int kind,
                                                 uint32_t use) {
  return c.shared + kind + 8 * StageOf<Traits::kStages>(use);
}
template <class Traits>
__device__ __forceinline__ void AwaitStage(const Consumer<Traits>& c, int kind, uint32_t use) {
  ptx::BarrierWait(StageBarrier(c, kind, use), ParityOf<Traits::kStages>(use));
}

// Use `use` of a stage is over, which every CTA that copies to it has to know.
template <class Traits>
__device__ __forceinline__ void ReleaseStage(const Consumer<Traits>& c, int kind, uint32_t use) {
  if constexpr (Traits::kCluster == 1) {
    Release(StageBarrier(c, kind, use), c.lane);
  } else {
    __syncwarp();
    ptx::ClusterBarrierArriveIf(c.releases + kind + 8 * StageOf<Traits::kStages>(use),
                                c.lane < Traits::kCluster);
  }
}

// Waits for the queries of the next work that has some.
template <class Traits>
__device__ __forceinline__ void AwaitQueries(Consumer<Traits>& c) {
  c.queries += Traits::kConsumers;
  const uint32_t buffer = StageOf<Traits::kQBuffers>(c.queries);
  c.queries_at = c.shared + buffer * Traits::kQBytes;
  ptx::BarrierWait(c.shared + Traits::kQFull + 8 * buffer, ParityOf<Traits::kQBuffers>(c.queries));
}

// Use `queries` of a buffer is over.
template <class Traits>
__device__ __forceinline__ void ReleaseQueries(uint32_t queries, const Consumer<Traits>& c) {
  Release(c.shared + Traits::kQEmpty + 8 * StageOf<Traits::kQBuffers>(queries), c.lane);
}

// The products with the work's queries are done.
template <class Traits>
__device__ __forceinline__ void EndQueries(const Consumer<Traits>& c) {
  if constexpr (!Traits::kRowsInQueries) ReleaseQueries(c.queries, c);
}

// Issues s = Q K^T with the next key tile.
template <class Traits>
__device__ __forceinline__ void IssueScores(Consumer<Traits>& c) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kKeys>;
  const uint64_t q = ptx::WgmmaDescriptor(c.queries_at, 16);
  const uint64_t k = ptx::WgmmaDescriptor(
      c.shared + Traits::kKAt + StageOf<Traits::kStages>(c.tiles) * Traits::kKBytes, 16);
  ptx::Settle(c.s);
  ptx::WgmmaFence();
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 32;
    W::Ss(c.s, q + (panel * kPanelBytes + in_panel) / 16,
          k + (panel * Traits::kKeys * 128 + in_panel) / 16, step != 0);
  }
  ptx::WgmmaCommit();
}

// Issues o += P V as soon as the values are there.
template <class Traits>
__device__ __forceinline__ void IssueValues(Consumer<Traits>& c) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kHeadDimV>;
  const uint64_t v = ptx::WgmmaDescriptor(
      c.shared + Traits::kVAt + StageOf<Traits::kStages>(c.p_tile) * Traits::kVBytes,
      Traits::kKeys * 128);
  AwaitStage(c, Traits::kVFull, c.p_tile);
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  ptx::WgmmaFence();
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    W::Rs(c.o, c.p[step], v + step * 16 * 128 / 16, true);
  }
  ptx::WgmmaCommit();
}

// Issues the scores of the next tile and, where kValues, o += P V; takes one turn.
template <class Traits, bool kValues>
__device__ __forceinline__ void IssueStep(Consumer<Traits>& c) {
  AwaitStage(c, Traits::kKFull, c.tiles);
  AwaitTurn<Traits>(c.group);
  IssueScores<Traits>(c);
  if constexpr (kValues) IssueValues<Traits>(c);
  PassTurn<Traits>(c.group);
}

// Waits until at most kPending products later than the scores' are in flight.
template <class Traits, int kPending>
__device__ __forceinline__ void AwaitScores(Consumer<Traits>& c) {
  ptx::WgmmaWait<kPending>();
  ptx::Settle(c.s);
  ReleaseStage(c, Traits::kKEmpty, c.tiles);
  ++c.tiles;
}

// Waits for the values in flight and lets their stage go.
template <class Traits>
__device__ __forceinline__ void FinishValues(Consumer<Traits>& c) {
  ptx::WgmmaWait<0>();
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  ReleaseStage(c, Traits::kVEmpty, c.p_tile);
}

// o += P V, by itself.
template <class Traits>
__device__ __forceinline__ void MultiplyValues(Consumer<Traits>& c) {
  IssueValues(c);
  FinishValues(c);
}

// Key tile n, not the first of its work: its scores, while the values of the tile before are
// multiplied. `last`: it is the last one.
template <class Traits>
__device__ __forceinline__ void Step(const ForwardParams& p, const Work& w,
                                     const HeadOptions& options, const Range& r, int n, bool last,
                                     Consumer<Traits>& c) {
  float sums[2];
  IssueStep<Traits, true>(c);
  AwaitScores<Traits, 1>(c);
  if (last) EndQueries(c);
  FinishScores<Traits>(p, w, options, r, n, c);
  FinishValues<Traits>(c);
  NextSoftmax<Traits>(p, c, sums);
  FinishSoftmax<Traits>(p, w, options, n, sums, c);
}

// A tile of which this warpgroup sees nothing. kHolds: its values' stage is held until
// ReleasePassed(), so that they need not be waited for.
template <class Traits, bool kHolds>
__device__ __forceinline__ void Pass(Consumer<Traits>& c) {
  AwaitStage(c, Traits::kKFull, c.tiles);
  ReleaseStage(c, Traits::kKEmpty, c.tiles);
  AwaitTurn<Traits>(c.group);
  PassTurn<Traits>(c.group);
  if constexpr (!kHolds) {
    AwaitStage(c, Traits::kVFull, c.tiles);
    ReleaseStage(c, Traits::kVEmpty, c.tiles);
  }
  ++c.tiles;
}

// Lets go the values of tiles between that of c.p and the latest.
template <class Traits>
__device__ __forceinline__ void ReleasePassed(const Consumer<Traits>& c) {
#pragma unroll 1
  for (uint32_t tile = c.p_tile + 1; tile != c.tiles - 1; ++tile) {
    AwaitStage(c, Traits::kVFull, tile);
    ReleaseStage(c, Traits::kVEmpty, tile);
  }
}

// Zeroes the values of keys beyond len_k of the latest tile, n, which may be anything: 0 * NaN is
// NaN.
template <class Traits>
__device__ __forceinline__ void ClearLooseValues(const Work& w, int n, const Consumer<Traits>& c) {
  const int valid = w.s.len_k - n * Traits::kKeys;
  if (valid >= Traits::kKeys) return;
  AwaitStage(c, Traits::kVFull, c.tiles - 1);
  const uint32_t v =
      c.shared + Traits::kVAt + StageOf<Traits::kStages>(c.tiles - 1) * Traits::kVBytes;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanelsV; ++panel) {
    // Rows are whole, so where the swizzle put their chunks does not matter.
    for (int x = valid * 8 + c.warp * 32 + c.lane; x < Traits::kKeys * 8; x += 128) {
      ptx::StoreShared16(v + panel * Traits::kKeys * 128 + x * 16, make_uint4(0, 0, 0, 0));
    }
  }
  ptx::FenceAsyncProxy();
  ptx::NamedSync(1 + Traits::kConsumers + c.group, 128);
}

// How far the work before has come: its rows are written; its last probabilities have not met
// their values; only its rows are still to be written; it had no keys, and its rows are as well.
enum class Due { kNothing, kValues, kRows, kZeros };

// Where rows go through the buffer of their queries: it is free.
template <class Traits>
__device__ __forceinline__ void EndRows(uint32_t queries, const Consumer<Traits>& c) {
  if constexpr (Traits::kRowsInQueries) {
    ptx::WaitStoresRead<0>();
    ReleaseQueries(queries, c);
  }
}

// Waits for queries and keys, and issues the first scores of a work; returns when `meanwhile` is
// done and they are there. kValues: as IssueStep().
template <class Traits, bool kValues, class Meanwhile>
__device__ __forceinline__ void FirstScores(Consumer<Traits>& c, const Meanwhile& meanwhile) {
  AwaitQueries(c);
  IssueStep<Traits, kValues>(c);
  meanwhile();
  AwaitScores<Traits, kValues ? 1 : 0>(c);
}

// The first tile of a work. kValues: and the last values of the work before, whose rows are then
// written.
template <class Traits, bool kValues>
__device__ __forceinline__ void FirstStep(const ForwardParams& p, const Work* works, uint32_t slot,
                                          uint32_t slot_before, const HeadOptions& options,
                                          const Range& r, int n, bool last, Consumer<Traits>& c) {
  float tops[2], sums[2];
  const Work& w = works[slot];
  // Of the work before.
  const Work& before = works[slot_before];
  const uint32_t queries = c.queries, queries_at = c.queries_at;
  float factors[2];
  // Where there is one buffer of queries for each warpgroup, the next come late: values are
  // multiplied and rows written meanwhile. Otherwise scores and values are multiplied together.
  constexpr bool kLate = kValues && !Traits::kRowsInQueries, kTogether = kValues && !kLate;
  const auto nothing = [] {};
  if constexpr (kLate) {
    IssueValues(c);
    WriteLse<Traits>(p, before, true, c, factors);
    FinishValues(c);
    ClearRowsWithoutKeys(factors, c);
    if (RowsAreStaged<Traits>(p, before, c.group)) {
      WriteStagedRows<Traits, 0, Traits::kRowPanels>(p, before, queries_at, factors, c);
      FirstScores<Traits, false>(c, [&] {
        WriteStagedRows<Traits, Traits::kRowPanels, Traits::kPanelsV>(p, before, queries_at,
                                                                      factors, c);
      });
    } else {
      WriteRows(p, before, factors, c);
      FirstScores<Traits, false>(c, nothing);
    }
  } else {
    FirstScores<Traits, kTogether>(c, nothing);
  }
  if (last) EndQueries(c);
  if constexpr (kTogether) WriteLse<Traits>(p, before, true, c, factors);
  FinishScores<Traits>(p, w, options, r, n, c);
  LargestScores<Traits>(c, tops);
  if constexpr (kTogether) {
    FinishValues(c);
    WriteAllRows(p, before, true, queries_at, factors, c);
  }
  if constexpr (kValues) {
    Release(c.shared + Traits::kWorkEmpty + 8 * slot_before, c.lane);
    if constexpr (!Traits::kBlockMask) ReleasePassed(c);
  }
  ResetRows(c);
  FirstSoftmax<Traits>(p, tops, c, sums);
  FinishSoftmax<Traits>(p, w, options, n, sums, c);
  if constexpr (kValues) EndRows(queries, c);
  if (p.loose_keys) ClearLooseValues<Traits>(w, n, c);
}

// Of the work before, what is due.
template <class Traits>
__device__ __forceinline__ void Finish(const ForwardParams& p, const Work* works, uint32_t slot,
                                       Due due, Consumer<Traits>& c) {
  if (due == Due::kNothing) return;
  if (due == Due::kValues) MultiplyValues(c);
  const bool keys = due != Due::kZeros;
  float factors[2];
  WriteLse<Traits>(p, works[slot], keys, c, factors);
  WriteAllRows(p, works[slot], keys, c.queries_at, factors, c);
  Release(c.shared + Traits::kWorkEmpty + 8 * slot, c.lane);
  if (keys) EndRows(c.queries, c);
}

template <class Traits>
__device__ __forceinline__ void Consume(const ForwardParams& p, uint32_t shared,
                                        const Work* works) {
  Consumer<Traits> c;
  c.shared = c.queries_at = shared;
  c.tiles = c.p_tile = 0;
  c.group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  c.queries = c.group - Traits::kConsumers;  // none yet
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  c.lane = threadIdx.x % 32;
  c.row = c.warp * 16 + c.lane / 4;
  if constexpr (Traits::kCluster > 1) {
    c.releases = ptx::ClusterAddress(shared, c.lane % Traits::kCluster);
  }
  ResetRows(c);
  if (c.group == Traits::kConsumers - 1) PassTurn<Traits>(c.group);
  Due due = Due::kNothing;
  uint32_t slot_before = 0;
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t slot = StageOf<kWorkSlots>(turn);
    ptx::BarrierWait(shared + Traits::kWorkFull + 8 * slot, ParityOf<kWorkSlots>(turn));
    const Work& w = works[slot];
    const Range r = RangeOf<Traits>(p, w, c.group);
    HeadOptions options = {};
    if constexpr (Traits::kBlockMask) options = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads);
    const auto next_shown = [&](int n) {
      return NextShown<Traits>(p, w, options.block_mask, n - 1);
    };
    // By a shuffle, so that the compiler sees that no lane leaves alone.
    const int begin = __shfl_sync(~0u, w.begin, 0);
    int n = __shfl_sync(~0u, w.first, 0);
    const bool some = __shfl_sync(~0u, w.some, 0), loaded = n >= begin;
    // The work goes on from the one before, if there are few tiles to pass: their values and those
    // that are due hold stages. With a block mask it is not known whether a tile follows that this
    // warpgroup sees.
    constexpr int kMayPass = Traits::kBlockMask ? 0 : Traits::kStages - 1;
    const int ahead = max(0, n - r.first);
    const bool goes_on =
        due == Due::kValues && some && loaded && r.last <= min(n, r.first) && ahead <= kMayPass;
    if (!goes_on) {
      Finish<Traits>(p, works, slot_before, due, c);
      due = Due::kNothing;
      if (!some) break;
#pragma unroll 1
      for (; n >= begin && n > r.first; n = next_shown(n)) Pass<Traits, false>(c);
    } else if constexpr (!Traits::kBlockMask) {
#pragma unroll 1
      for (; n > r.first; --n) Pass<Traits, true>(c);
    }
    if (n >= r.last && r.last <= r.first) {
      int next = next_shown(n);
      if (due == Due::kValues) {
        FirstStep<Traits, true>(p, works, slot, slot_before, options, r, n, next < r.last, c);
      } else {
        FirstStep<Traits, false>(p, works, slot, slot_before, options, r, n, next < r.last, c);
      }
      due = Due::kValues;
#pragma unroll 1
      for (n = next; n >= r.last; n = next) {
        next = next_shown(n);
        Step<Traits>(p, w, options, r, n, next < r.last, c);
      }
    } else {
      if (loaded) {
        AwaitQueries(c);
        ReleaseQueries(c.queries, c);
      }
      due = Due::kZeros;
    }
    slot_before = slot;
    if (n >= begin) {
      // Others still see keys: this warpgroup must not hold a stage meanwhile.
      if (due == Due::kValues) {
        MultiplyValues(c);
        due = Due::kRows;
      }
#pragma unroll 1
      for (; n >= begin; n = next_shown(n)) Pass<Traits, false>(c);
    }
  }
  ptx::WaitStoresRead<0>();  // from shared memory that ends with the CTA
}

// Until all threads of the cluster have begun: then its CTAs may tell each other of stages.
template <class Traits>
__device__ __forceinline__ void BeginCluster() {
  if constexpr (Traits::kCluster > 1) {
    __syncwarp();
    ptx::ClusterArriveRelaxed();
    ptx::ClusterWait();
  }
}

// Until all have ended, and what they told each other has come: a CTA that is gone hears nothing.
template <class Traits>
__device__ __forceinline__ void EndCluster() {
  if constexpr (Traits::kCluster > 1) {
    __syncwarp();
    ptx::ClusterArrive();
    ptx::ClusterWait();
  }
}

// Grid: as many CTAs as the device holds, or fewer where there is less work; whole clusters.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    Forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ char unaligned[];
  const uint32_t start = ptx::SharedAddress(unaligned), shared = (start + 1023) & ~1023u;
  // The producer's warp, which goes on at once, and the consumers, who wait for its barriers.
  constexpr int kStartBarrier = 0, kStartThreads = Traits::kThreads - 96;
  Work* const works = reinterpret_cast<Work*>(unaligned + (shared - start) + Traits::kWorkAt);
  ptx::AllowDependents();  // a merge, which waits for all of this grid
  if (threadIdx.x < 128) {
    ptx::LowerRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) {
      if (ptx::ElectOne()) InitBarriers<Traits>(shared);
      __syncwarp();
      ptx::NamedArrive(kStartBarrier, kStartThreads);
      BeginCluster<Traits>();
      Produce<Traits>(p, shared, works);
    } else {
      BeginCluster<Traits>();
    }
  } else {
    ptx::RaiseRegisters<Traits::kConsumerRegisters>();
    if (threadIdx.x == 128) {
      ptx::PrefetchTensorMap(&p.q);
      ptx::PrefetchTensorMap(&p.k);
      ptx::PrefetchTensorMap(&p.v);
    }
    ptx::NamedSync(kStartBarrier, kStartThreads);
    BeginCluster<Traits>();
    Consume<Traits>(p, shared, works);
  }
  EndCluster<Traits>();
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_
