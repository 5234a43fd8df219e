// flash_sm90 forward: a CTA per multiprocessor takes tiles of queries one after another. A producer
// warp copies Q, and K and V in stages, by TMA; each consumer warpgroup has 64 queries. A step
// issues S = Q K^T of its tile of keys and O += P V of the one before, and while V is multiplied
// turns S into probabilities; so it goes on from the last keys of one tile of queries to the first
// of the next. Warpgroups take turns in issuing, so that one's softmax runs under another's
// products.
#ifndef ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_
#define ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_

#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/ptx/math.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/ptx/warpgroup.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/sm90/kernel_params.h"

namespace attn::cuda::sm90 {

// A piece of work: a tile of queries of one head, and for it a range of key tiles [begin, end).
struct alignas(16) Work {
  DeviceSequence s;
  int b, h, split, q0;
  int begin, end;
  int first;  // the largest that the block mask shows to some row; below begin: none
  bool some;  // there is work
};
// Works that the producer may be ahead, and the one whose rows are still to be written.
inline constexpr int kWorkSlots = 3;

// Tile is a ForwardTile of tiles.h.
template <class T_, class Tile_, Mode kMode_>
struct ForwardTraits : Tile_ {
  using T = T_;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kOptions = kMode == Mode::kOptions;
  static constexpr bool kLimits = kMode != Mode::kFull;
  static constexpr bool kBlockMask = kMode == Mode::kBlocks || kOptions;
  static constexpr int kQueries = 64 * Tile_::kConsumers;
  static constexpr int kThreads = 128 * (Tile_::kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * Tile_::kConsumers;
  static constexpr int kProducerRegisters = Tile_::kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = Tile_::kConsumers == 3 ? 160 : 240;
  // Panels of kPanel elements: [panels][rows][128 bytes].
  static constexpr int kPanels = (Tile_::kHeadDim + kPanel - 1) / kPanel;
  static constexpr int kPanelsV = (Tile_::kHeadDimV + kPanel - 1) / kPanel;
  static constexpr int kQBytes = kPanels * kQueries * 128;
  static constexpr int kKBytes = kPanels * Tile_::kKeys * 128;
  static constexpr int kVBytes = kPanelsV * Tile_::kKeys * 128;
  // Shared memory: Q, K stages, V stages, barriers.
  static constexpr int kKAt = Tile_::kQStages * kQBytes, kVAt = kKAt + Tile_::kStages * kKBytes;
  static constexpr int kBarriersAt = kVAt + Tile_::kStages * kVBytes;
  static constexpr int kQFull = kBarriersAt, kQEmpty = kQFull + 8 * Tile_::kQStages;
  static constexpr int kWorkFull = kQEmpty + 8 * Tile_::kQStages;
  static constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
  static constexpr int kKFull = kWorkEmpty + 8 * kWorkSlots, kKEmpty = kKFull + 8 * Tile_::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Tile_::kStages;
  static constexpr int kVEmpty = kVFull + 8 * Tile_::kStages;
  static constexpr int kWorkAt = (kVEmpty + 8 * Tile_::kStages + 15) / 16 * 16;
  // Aligned to 1024 bytes by the kernel.
  static constexpr int kSharedBytes = kWorkAt + kWorkSlots * static_cast<int>(sizeof(Work)) + 1024;
  static constexpr uint32_t kSquares = (uint32_t{1} << (Tile_::kKeys / kMaskStep)) - 1;
  static_assert(Tile_::kKeys % 16 == 0 && Tile_::kKeys * 128 % 1024 == 0);
  static_assert(!kBlockMask || Tile_::kKeys % kMaskStep == 0);
};

template <class Traits>
__device__ __forceinline__ Work WorkOf(const ForwardParams& p, uint32_t index) {
  Work w;
  const uint32_t heads = p.num_heads * p.sequences.batch;
  const uint32_t per_head = p.tiles * p.splits;
  const uint32_t before_last = heads - p.last_section;
  uint32_t first_head = before_last, section_heads = p.last_section;
  if (index < before_last * per_head) {
    const uint32_t section = index / (p.section * per_head);
    first_head = section * p.section;
    section_heads = p.section;
  }
  index -= first_head * per_head;
  uint32_t tile = index / section_heads;
  const uint32_t head = first_head + (index - tile * section_heads);
  w.b = head / p.num_heads;
  w.h = head - w.b * p.num_heads;
  w.split = 0;
  if (p.splits > 1) {
    w.split = tile % p.splits;
    tile /= p.splits;
  }
  w.s = SequenceOf(p.sequences, w.b);
  w.q0 = (p.last_first ? p.tiles - 1 - tile : tile) * Traits::kQueries;
  const int q_last = min(w.q0 + Traits::kQueries, w.s.len_q) - 1;
  int key_end = w.s.len_k;
  w.begin = 0;
  if constexpr (Traits::kLimits) {
    key_end = min(key_end, q_last + w.s.off + p.score.window_right + 1);
    w.begin = max(0, w.q0 + w.s.off - p.score.window_left) / Traits::kKeys;
  }
  w.end = q_last < w.q0 || key_end <= 0 ? 0 : (key_end + Traits::kKeys - 1) / Traits::kKeys;
  if (p.splits > 1) {
    w.begin = max(w.begin, w.split * p.split_tiles);
    w.end = min(w.end, (w.split + 1) * p.split_tiles);
  }
  return w;
}

// The n-th use of a ring of kStages buffers: which one, and the parity of its barriers' phase.
template <int kStages>
__device__ __forceinline__ uint32_t StageOf(uint32_t n) {
  return n % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t ParityOf(uint32_t n) {
  return n / kStages % 2;
}

// The block mask as rows of squares of kMaskStep: a bit per square of the keys of tile n, for the
// warpgroups' rows from q0 on together.
template <class Traits>
__device__ __forceinline__ uint32_t ShownSquares(const ForwardParams& p, const Work& w,
                                                 const uint8_t* mask, int q0, int rows, int n) {
  uint32_t bits = 0;
  for (int m = 0; m < rows; m += kMaskStep) {
    bits |= MaskBits<kMaskStep, Traits::kKeys>(p.score, mask, w.s.len_q, w.s.len_k, q0 + m,
                                               n * Traits::kKeys);
  }
  return bits;
}

// The largest key tile <= n that the block mask shows to some row of the CTA; below w.begin: none.
template <class Traits>
__device__ __forceinline__ int NextShown(const ForwardParams& p, const Work& w, const uint8_t* mask,
                                         int n) {
  if constexpr (Traits::kBlockMask) {
    if (mask != nullptr) {
      uint32_t bits;
      return n - FindShown(
                     n - w.begin + 1,
                     [&](int back) {
                       return ShownSquares<Traits>(p, w, mask, w.q0, Traits::kQueries, n - back);
                     },
                     &bits);
    }
  }
  return n;
}

// ------------------------------------------------------------------------------------- producer

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
      w = WorkOf<Traits>(p, index);
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
      const uint32_t q_stage = StageOf<Traits::kQStages>(queries);
      ptx::BarrierWait(shared + Traits::kQEmpty + 8 * q_stage,
                       ParityOf<Traits::kQStages>(queries) ^ 1);
      ++queries;
      if (leader) {
        CopyRows<Traits::kPanels, Traits::kQueries>(shared + q_stage * Traits::kQBytes, &p.q,
                                                    shared + Traits::kQFull + 8 * q_stage, w.h,
                                                    static_cast<int>(w.s.q_token) + w.q0, batch);
      }
      while (n >= w.begin) {
        const int token = static_cast<int>(w.s.k_token) + n * kKeys;
        const uint32_t stage = StageOf<kStages>(tiles), parity = ParityOf<kStages>(tiles) ^ 1;
        ++tiles;
        ptx::BarrierWait(shared + Traits::kKEmpty + 8 * stage, parity);
        if (leader) {
          CopyRows<Traits::kPanels, kKeys>(shared + Traits::kKAt + stage * Traits::kKBytes, &p.k,
                                           shared + Traits::kKFull + 8 * stage, kv_head, token,
                                           batch);
        }
        ptx::BarrierWait(shared + Traits::kVEmpty + 8 * stage, parity);
        if (leader) {
          CopyRows<Traits::kPanelsV, kKeys>(shared + Traits::kVAt + stage * Traits::kVBytes, &p.v,
                                            shared + Traits::kVFull + 8 * stage, kv_head, token,
                                            batch);
        }
        n = NextShown<Traits>(p, w, mask, n - 1);
      }
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

// ------------------------------------------------------------------------------------ consumers

template <class Traits>
struct Consumer {
  float o[Traits::kHeadDimV / 8][4];
  // What probabilities are relative to: a maximum of raw products, with options of log2 scores; and
  // the same as the exponents' summand, or 0 where it is subtracted before (`far`).
  float max[2], base[2];
  float sum[2];                       // of this lane's columns
  bool far;                           // some row of the warp
  float s[Traits::kKeys / 8][4];      // scores of the latest tile
  uint32_t p[Traits::kKeys / 16][4];  // its probabilities, as A of O += P V
  uint32_t tiles;                     // key tiles so far: the next one's use of the rings
  uint32_t p_tile;                    // that p belongs to
  uint32_t queries;                   // tiles of queries so far
  uint32_t shared;
  int group, warp, lane;  // consumer warpgroup; warp of it
};

// The first of this lane's two rows; the other is 8 further.
template <class Traits>
__device__ __forceinline__ int RowOf(const Work& w, const Consumer<Traits>& c) {
  return w.q0 + c.group * 64 + c.warp * 16 + c.lane / 4;
}

template <class Traits>
__device__ __forceinline__ void MaskScores(const ForwardParams& p, const Work& w,
                                           const uint8_t* mask, const Consumer<Traits>& c, int n,
                                           float (&s)[Traits::kKeys / 8][4]) {
  const int n0 = n * Traits::kKeys;
  const int first = n0 + (c.lane & 3) * 2;  // of this lane's columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = RowOf(w, c) + half * 8;
    int right = w.s.len_k;
    if constexpr (Traits::kLimits) right = min(right, i + w.s.off + p.score.window_right + 1);
    const int end = (i < w.s.len_q ? right : 0) - first;
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
      if (x * 8 >= end) s[x][2 * half] = -CUDART_INF_F;
      if (x * 8 + 1 >= end) s[x][2 * half + 1] = -CUDART_INF_F;
    }
  }
  if constexpr (Traits::kLimits) {
    const int q0 = w.q0 + c.group * 64;
    uint32_t shown = ~0u;
    if (Traits::kBlockMask && mask != nullptr) {
      shown = ShownSquares<Traits>(p, w, mask, q0, 64, n);
    }
    if (q0 + 63 + w.s.off - p.score.window_left <= n0 &&
        (shown & Traits::kSquares) == Traits::kSquares) {
      return;
    }
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = RowOf(w, c) + (e >> 1) * 8;
        if (first + x * 8 + (e & 1) < i + w.s.off - p.score.window_left ||
            (shown >> (x * 8 / kMaskStep) & 1) == 0) {
          s[x][e] = -CUDART_INF_F;
        }
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void DropProbabilities(const ForwardParams& p, const Work& w,
                                                  const HeadOptions& options, int n,
                                                  const Consumer<Traits>& c,
                                                  float (&s)[Traits::kKeys / 8][4]) {
#pragma unroll
  for (int part = 0; part < Traits::kKeys / 64; ++part) {
    const Keeps keeps = DrawRows<2, 2>(p.score, options.dropout_head, RowOf(w, c),
                                       n * (Traits::kKeys / 8) + part * 8, c.lane);
#pragma unroll
    for (int x = 0; x < 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t mask =
            keeps.template Mask<4>(x % 4 / 2, x % 2 * 2 + e % 2, e / 2 * 2 + x / 4);
        float& value = s[part * 8 + x][e];
        value = __uint_as_float(__float_as_uint(value) & mask);
      }
    }
  }
}

// This lane's largest scores of its two rows.
template <class Traits>
__device__ __forceinline__ void LargestScores(const Consumer<Traits>& c, float (&tops)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float chains[4];  // the latency of one would show
#pragma unroll
    for (int x = 0; x < 4; ++x) chains[x] = fmaxf(c.s[x][2 * half], c.s[x][2 * half + 1]);
#pragma unroll
    for (int x = 4; x < Traits::kKeys / 8; ++x) {
      chains[x % 4] = fmaxf(chains[x % 4], fmaxf(c.s[x][2 * half], c.s[x][2 * half + 1]));
    }
    tops[half] = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
  }
}

// Raises c.max to what its rows have seen and rescales c.sum and c.o.
template <class Traits, bool kFirst>
__device__ __forceinline__ void RaiseMaximum(float scale_log2, float keep_log2, float limit,
                                             const float (&tops)[2], Consumer<Traits>& c) {
  float from[2], correction[2];
  bool far = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = fmaxf(c.max[half], tops[half]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (!((top - c.max[half]) * scale_log2 > limit)) top = c.max[half];
    from[half] = top == -CUDART_INF_F ? 0.0f : top;  // no key yet
    correction[half] = ptx::Exp2((c.max[half] - from[half]) * scale_log2);
    c.max[half] = top;
    c.sum[half] *= correction[half];
    far |= fabsf(from[half] * scale_log2) > kExactBase;
  }
  c.far = __any_sync(~0u, far);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    c.base[half] = c.far ? 0.0f : from[half] * scale_log2;
    if constexpr (Traits::kOptions) c.base[half] -= keep_log2;
  }
  if constexpr (!kFirst) {
#pragma unroll
    for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c.o[x][e] *= correction[e >> 1];
    }
  }
}

// c.s := probabilities relative to c.max, c.p the same as A of the next O += P V. Lanes look at the
// scores of their own: only where one of the warp's passes the limit do rows compare. No product is
// in flight. kFirst: of a work; c.o is zero.
template <class Traits, bool kFirst>
__device__ __forceinline__ void OnlineSoftmax(const ForwardParams& p, const Work& w,
                                              const HeadOptions& options, int n,
                                              const float (&tops)[2], Consumer<Traits>& c) {
  using E = ptx::Element<typename Traits::T>;
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const float limit = Traits::kOptions ? fmaxf(kLazyRise - p.score.keep_log2, 0.0f) : kLazyRise;
  const bool rises = __any_sync(
      ~0u, (tops[0] - c.max[0]) * scale_log2 > limit || (tops[1] - c.max[1]) * scale_log2 > limit);
  if (rises || c.far) {  // one branch past what is rare
    if (rises) RaiseMaximum<Traits, kFirst>(scale_log2, p.score.keep_log2, limit, tops, c);
    if (c.far) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float from = c.max[half] == -CUDART_INF_F ? 0.0f : c.max[half];
#pragma unroll
        for (int x = 0; x < Traits::kKeys / 8; ++x) {
          c.s[x][2 * half] -= from;
          c.s[x][2 * half + 1] -= from;
        }
      }
    }
  }
  float sums[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
  for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& a = c.s[x][2 * half];
      float& b = c.s[x][2 * half + 1];
      a = ptx::Exp2(fmaf(a, scale_log2, -c.base[half]));
      b = ptx::Exp2(fmaf(b, scale_log2, -c.base[half]));
      sums[half][x % 2] += a + b;
      if constexpr (!Traits::kOptions) c.p[x / 2][x % 2 * 2 + half] = E::Pack(a, b);
    }
  }
  c.sum[0] += sums[0][0] + sums[0][1];
  c.sum[1] += sums[1][0] + sums[1][1];
  if constexpr (Traits::kOptions) {
    if (p.score.threshold < 65536) DropProbabilities<Traits>(p, w, options, n, c, c.s);
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        c.p[x / 2][x % 2 * 2 + half] = E::Pack(c.s[x][2 * half], c.s[x][2 * half + 1]);
      }
    }
  }
  c.p_tile = c.tiles - 1;
}

// Issues s = Q K^T with the keys of the ring's stage.
template <class Traits>
__device__ __forceinline__ void IssueScores(Consumer<Traits>& c) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kKeys>;
  const uint64_t q = ptx::WgmmaDescriptor(
      c.shared + StageOf<Traits::kQStages>(c.queries) * Traits::kQBytes + c.group * 64 * 128, 16);
  const uint64_t k = ptx::WgmmaDescriptor(
      c.shared + Traits::kKAt + StageOf<Traits::kStages>(c.tiles) * Traits::kKBytes, 16);
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 32;
    W::Ss(c.s, q + (panel * Traits::kQueries * 128 + in_panel) / 16,
          k + (panel * Traits::kKeys * 128 + in_panel) / 16, step != 0);
  }
}

// Issues o += P V with the values of the ring's stage.
template <class Traits>
__device__ __forceinline__ void IssueValues(Consumer<Traits>& c) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kHeadDimV>;
  const uint64_t v = ptx::WgmmaDescriptor(
      c.shared + Traits::kVAt + StageOf<Traits::kStages>(c.p_tile) * Traits::kVBytes,
      Traits::kKeys * 128);
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    W::Rs(c.o, c.p[step], v + step * 16 * 128 / 16, true);
  }
}

// One arrival for each consumer warp.
__device__ __forceinline__ void Release(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) ptx::BarrierArrive(barrier);
}

// What the warpgroup sees of a work: key tiles, and those that all its rows see whole.
struct Range {
  int first, last;           // first is the largest; last > first: none
  int full_begin, full_end;  // [full_begin, full_end)
};

template <class Traits>
__device__ __forceinline__ Range RangeOf(const ForwardParams& p, const Work& w, int group) {
  constexpr int kKeys = Traits::kKeys;
  const int q0 = w.q0 + group * 64, q_last = min(q0 + 64, w.s.len_q) - 1;
  Range r;
  int key_end = w.s.len_k, full_end = w.s.len_k;
  r.last = w.begin;
  r.full_begin = 0;
  if constexpr (Traits::kLimits) {
    key_end = max(0, min(key_end, q_last + w.s.off + p.score.window_right + 1));
    full_end = max(0, min(full_end, q0 + w.s.off + p.score.window_right + 1));
    r.last = max(r.last, max(0, q0 + w.s.off - p.score.window_left) / kKeys);
    r.full_begin = (max(0, q_last + w.s.off - p.score.window_left) + kKeys - 1) / kKeys;
    if constexpr (Traits::kBlockMask) {
      if (p.score.block_mask != nullptr) r.full_begin = w.end;  // none is known to be
    }
  }
  r.first = q_last < q0 ? -1 : min(w.end, (key_end + kKeys - 1) / kKeys) - 1;
  // Rows beyond len_q see nothing.
  r.full_end = q0 + 64 > w.s.len_q ? 0 : full_end / kKeys;
  return r;
}

// From raw products of tile n to scores; with options log2 scores.
template <class Traits>
__device__ __forceinline__ void FinishScores(const ForwardParams& p, const Work& w,
                                             const HeadOptions& options, const Range& r, int n,
                                             Consumer<Traits>& c) {
  if constexpr (Traits::kOptions) {
    float(&one)[1][Traits::kKeys / 8][4] = reinterpret_cast<float(&)[1][Traits::kKeys / 8][4]>(c.s);
    ApplyScoreOptions<false>(
        p.score, options, w.s.len_q, w.s.len_k, w.s.off,
        [&](int, int, int e) { return RowOf(w, c) + (e >> 1) * 8; },
        [&](int, int x, int e) { return n * Traits::kKeys + x * 8 + (c.lane & 3) * 2 + (e & 1); },
        one, one);
  }
  if (n >= r.full_end || n < r.full_begin) {
    MaskScores<Traits>(p, w, options.block_mask, c, n, c.s);
  }
}

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

template <class Traits>
__device__ __forceinline__ void AwaitQueries(const Consumer<Traits>& c) {
  ptx::BarrierWait(c.shared + Traits::kQFull + 8 * StageOf<Traits::kQStages>(c.queries),
                   ParityOf<Traits::kQStages>(c.queries));
}

// The queries' last product is done.
template <class Traits>
__device__ __forceinline__ void ReleaseQueries(Consumer<Traits>& c) {
  Release(c.shared + Traits::kQEmpty + 8 * StageOf<Traits::kQStages>(c.queries), c.lane);
  ++c.queries;
}

// Issues the scores of the next tile and, where kValues, o += P V; returns when the scores are
// there. Takes one turn.
template <class Traits, bool kValues>
__device__ __forceinline__ void IssueStep(Consumer<Traits>& c) {
  AwaitStage(c, Traits::kKFull, c.tiles);
  AwaitTurn<Traits>(c.group);
  ptx::Settle(c.s);
  ptx::WgmmaFence();
  IssueScores<Traits>(c);
  ptx::WgmmaCommit();
  if constexpr (kValues) {
    AwaitStage(c, Traits::kVFull, c.p_tile);
    ptx::Settle(c.o);
    ptx::Settle(c.p);
    ptx::WgmmaFence();
    IssueValues<Traits>(c);
    ptx::WgmmaCommit();
  }
  PassTurn<Traits>(c.group);
  ptx::WgmmaWait<kValues ? 1 : 0>();
  ptx::Settle(c.s);
  Release(StageBarrier(c, Traits::kKEmpty, c.tiles), c.lane);
  ++c.tiles;
}

// Waits for the values in flight and lets their stage go.
template <class Traits>
__device__ __forceinline__ void FinishValues(Consumer<Traits>& c) {
  ptx::WgmmaWait<0>();
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  Release(StageBarrier(c, Traits::kVEmpty, c.p_tile), c.lane);
}

// Key tile n, not the first of its work: its scores, while the values of the tile before are
// multiplied. `last`: it is the last one.
template <class Traits>
__device__ __forceinline__ void Step(const ForwardParams& p, const Work& w,
                                     const HeadOptions& options, const Range& r, int n, bool last,
                                     Consumer<Traits>& c) {
  float tops[2];
  IssueStep<Traits, true>(c);
  if (last) ReleaseQueries(c);
  FinishScores<Traits>(p, w, options, r, n, c);
  LargestScores<Traits>(c, tops);
  FinishValues<Traits>(c);
  OnlineSoftmax<Traits, false>(p, w, options, n, tops, c);
}

// A tile of which this warpgroup sees nothing.
template <class Traits>
__device__ __forceinline__ void Pass(Consumer<Traits>& c) {
  AwaitStage(c, Traits::kKFull, c.tiles);
  Release(StageBarrier(c, Traits::kKEmpty, c.tiles), c.lane);
  AwaitTurn<Traits>(c.group);
  PassTurn<Traits>(c.group);
  AwaitStage(c, Traits::kVFull, c.tiles);
  Release(StageBarrier(c, Traits::kVEmpty, c.tiles), c.lane);
  ++c.tiles;
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
  ptx::NamedSync(4 + c.group, 128);
}

// Writes a row of FP32 results, this lane's columns; a row without keys may have summed what is not
// a number.
template <class Traits>
__device__ __forceinline__ void WriteFp32Row(float* row, int head_dim_v, int half, float factor,
                                             const Consumer<Traits>& c) {
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
    const int column = x * 8 + (c.lane & 3) * 2;
    if (column >= head_dim_v) continue;
    *reinterpret_cast<float2*>(row + column) =
        factor != 0.0f ? make_float2(c.o[x][2 * half] * factor, c.o[x][2 * half + 1] * factor)
                       : make_float2(0.0f, 0.0f);
  }
}

// Writes a row of 16-bit results. Four lanes have 4 bytes each of every 16; they exchange, so that
// each has 16 of every 64.
template <class Traits>
__device__ __forceinline__ void WriteRow(typename Traits::T* row, bool stored, int head_dim_v,
                                         int half, float factor, const Consumer<Traits>& c) {
  const int quad = c.lane & 3;
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; x += 4) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      r[t] = ptx::Element<typename Traits::T>::Pack(c.o[x + t][2 * half] * factor,
                                                    c.o[x + t][2 * half + 1] * factor);
      if (factor == 0.0f) r[t] = 0;
    }
    ptx::TransposeInQuad(r, quad);
    const int column = (x + quad) * 8;
    if (stored && column < head_dim_v) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(r[0], r[1], r[2], r[3]);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void WriteRows(const ForwardParams& p, const Work& w,
                                          const Consumer<Traits>& c) {
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const bool partial = p.splits > 1;  // the sink is the merge's
  const float sink =
      p.score.sinks != nullptr && !partial ? __ldg(p.score.sinks + w.h) : -CUDART_INF_F;
  float sums[2], lse[2], factors[2];  // factors are 0 in rows without keys
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[half] = c.sum[half] + __shfl_xor_sync(~0u, c.sum[half], 1);
    sums[half] += __shfl_xor_sync(~0u, sums[half], 2);
    if constexpr (Traits::kOptions) sums[half] *= p.score.keep_inverse;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = RowOf(w, c) + half * 8 < w.s.len_q;
    lse[half] = FinishRow(c.max[half] * scale_log2, sums[half], sink, &factors[half]);
    if (!valid || sums[half] == 0.0f) {  // a sum of NaN is no row without keys
      factors[half] = 0.0f;
      lse[half] = valid ? sink : -CUDART_INF_F;  // without keys exactly the sink
      if (partial && !valid) lse[half] = CUDART_INF_F;
    }
  }
  const int64_t lse_row = w.s.lse + w.h * p.lse_head + RowOf(w, c);
  const int64_t out_row = w.s.batch * p.out_strides.batch + w.h * p.out_strides.head +
                          (w.s.q_token + RowOf(w, c)) * p.out_strides.token;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool stored = RowOf(w, c) + half * 8 < w.s.rows_q;
    const int64_t row = lse_row + half * 8, to = out_row + half * 8 * p.out_strides.token;
    float* const to_lse = partial ? p.partial_lse + w.split * p.partial_rows + row : p.lse + row;
    if (stored && (c.lane & 3) == 0) *to_lse = lse[half];
    if (partial || p.out_fp32) {
      if (!stored) continue;
      WriteFp32Row<Traits>(partial ? p.partial_out + (w.split * p.partial_rows + row) * p.head_dim_v
                                   : static_cast<float*>(p.out) + to,
                           p.head_dim_v, half, factors[half], c);
    } else {
      WriteRow<Traits>(static_cast<typename Traits::T*>(p.out) + to, stored, p.head_dim_v, half,
                       factors[half], c);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void ResetRows(Consumer<Traits>& c) {
  c.max[0] = c.max[1] = -CUDART_INF_F;
  c.base[0] = c.base[1] = 0.0f;
  c.sum[0] = c.sum[1] = 0.0f;
  c.far = false;
#pragma unroll
  for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
    c.o[x][0] = c.o[x][1] = c.o[x][2] = c.o[x][3] = 0.0f;
  }
}

// How far the work before has come: its rows are written; its last probabilities have not met
// their values; only its rows are still to be written.
enum class Due { kNothing, kValues, kRows };

// Writes the rows of the work before, whose slot is `slot`.
template <class Traits>
__device__ __forceinline__ void WriteWork(const ForwardParams& p, const Work* works, uint32_t slot,
                                          const Consumer<Traits>& c) {
  WriteRows<Traits>(p, works[slot], c);
  Release(c.shared + Traits::kWorkEmpty + 8 * slot, c.lane);
}

// The first tile of a work. kValues: while the last values of the work before are multiplied, whose
// rows are then written.
template <class Traits, bool kValues>
__device__ __forceinline__ void FirstStep(const ForwardParams& p, const Work* works, uint32_t slot,
                                          uint32_t slot_before, const HeadOptions& options,
                                          const Range& r, int n, bool last, Consumer<Traits>& c) {
  float tops[2];
  AwaitQueries(c);
  IssueStep<Traits, kValues>(c);
  if (last) ReleaseQueries(c);
  FinishScores<Traits>(p, works[slot], options, r, n, c);
  LargestScores<Traits>(c, tops);
  if constexpr (kValues) {
    FinishValues<Traits>(c);
    WriteWork<Traits>(p, works, slot_before, c);
  }
  ResetRows(c);
  OnlineSoftmax<Traits, true>(p, works[slot], options, n, tops, c);
  if (p.loose_keys) ClearLooseValues<Traits>(works[slot], n, c);
}

// What is left of a work but its rows: its last o += P V.
template <class Traits>
__device__ __forceinline__ void FinishProducts(Consumer<Traits>& c) {
  AwaitStage(c, Traits::kVFull, c.p_tile);
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  ptx::WgmmaFence();
  IssueValues<Traits>(c);
  ptx::WgmmaCommit();
  FinishValues<Traits>(c);
}

template <class Traits>
__device__ __forceinline__ void Consume(const ForwardParams& p, uint32_t shared,
                                        const Work* works) {
  Consumer<Traits> c;
  c.shared = shared;
  c.tiles = c.p_tile = c.queries = 0;
  c.group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  c.warp = threadIdx.x / 32 % 4;
  c.lane = threadIdx.x % 32;
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
    if (due != Due::kValues || !(some && loaded && n <= r.first && n >= r.last)) {
      if (due == Due::kValues) FinishProducts<Traits>(c);
      if (due != Due::kNothing) WriteWork<Traits>(p, works, slot_before, c);
      due = Due::kNothing;
      if (!some) break;
#pragma unroll 1
      for (; n >= begin && n > r.first; n = next_shown(n)) Pass(c);
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
        ReleaseQueries(c);
      }
      c.sum[0] = c.sum[1] = 0.0f;
      due = Due::kRows;
    }
    slot_before = slot;
    if (n >= begin) {
      // Others still see keys: this warpgroup must not hold a stage meanwhile.
      if (due == Due::kValues) {
        FinishProducts<Traits>(c);
        due = Due::kRows;
      }
#pragma unroll 1
      for (; n >= begin; n = next_shown(n)) Pass(c);
    }
  }
}

// Grid: as many CTAs as the device holds, or fewer where there is less work.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    Forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ char unaligned[];
  const uint32_t start = ptx::SharedAddress(unaligned), shared = (start + 1023) & ~1023u;
  Work* const works = reinterpret_cast<Work*>(unaligned + (shared - start) + Traits::kWorkAt);
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.q);
    ptx::PrefetchTensorMap(&p.k);
    ptx::PrefetchTensorMap(&p.v);
#pragma unroll
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      ptx::BarrierInit(shared + Traits::kQFull + 8 * stage, 1);
      ptx::BarrierInit(shared + Traits::kQEmpty + 8 * stage, Traits::kConsumerWarps);
    }
#pragma unroll
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      ptx::BarrierInit(shared + Traits::kWorkFull + 8 * slot, 1);
      ptx::BarrierInit(shared + Traits::kWorkEmpty + 8 * slot, Traits::kConsumerWarps);
    }
#pragma unroll
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::BarrierInit(shared + Traits::kKFull + 8 * stage, 1);
      ptx::BarrierInit(shared + Traits::kVFull + 8 * stage, 1);
      ptx::BarrierInit(shared + Traits::kKEmpty + 8 * stage, Traits::kConsumerWarps);
      ptx::BarrierInit(shared + Traits::kVEmpty + 8 * stage, Traits::kConsumerWarps);
    }
    ptx::FenceBarrierInit();
  }
  __syncthreads();
  ptx::AllowDependents();  // a merge, which waits for all of this grid
  if (threadIdx.x < 128) {
    ptx::LowerRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) Produce<Traits>(p, shared, works);
  } else {
    ptx::RaiseRegisters<Traits::kConsumerRegisters>();
    Consume<Traits>(p, shared, works);
  }
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_
