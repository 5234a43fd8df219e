// flash_sm90 forward: a CTA per multiprocessor takes tiles of queries one after another. A producer
// warp copies Q, and K and V in stages, by TMA; each consumer warpgroup has 64 queries. A step
// issues S = Q K^T of its tile of keys and O += P V of the one before, and while V is multiplied
// turns S into probabilities; warpgroups take turns in issuing, so that one's softmax runs under
// another's products.
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

// Tile is a ForwardTile of tiles.h.
template <class T_, class Tile_, Mode kMode_>
struct ForwardTraits : Tile_ {
  using T = T_;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kOptions = kMode == Mode::kOptions;
  static constexpr bool kLimits = kMode != Mode::kFull;
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
  static constexpr int kKAt = kQBytes, kVAt = kKAt + Tile_::kStages * kKBytes;
  static constexpr int kBarriersAt = kVAt + Tile_::kStages * kVBytes;
  static constexpr int kQFull = kBarriersAt, kQEmpty = kQFull + 8;
  static constexpr int kWorkFull = kQEmpty + 8, kWorkEmpty = kWorkFull + 16;
  static constexpr int kKFull = kWorkEmpty + 16, kKEmpty = kKFull + 8 * Tile_::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Tile_::kStages;
  static constexpr int kVEmpty = kVFull + 8 * Tile_::kStages;
  static constexpr int kWorkAt = kVEmpty + 8 * Tile_::kStages;
  static constexpr int kSharedBytes = kWorkAt + 8 + 1024;  // aligned to 1024 by the kernel
  static constexpr uint32_t kSquares = (uint32_t{1} << (Tile_::kKeys / kMaskStep)) - 1;
  static_assert(Tile_::kKeys % 16 == 0 && Tile_::kKeys * 128 % 1024 == 0);
  static_assert(kMode == Mode::kFull || Tile_::kKeys % kMaskStep == 0);
};

// A piece of work: a tile of queries of one head, and for it a range of key tiles [begin, end).
struct Work {
  DeviceSequence s;
  int b, h, split, q0;
  int begin, end;
};

template <class Traits>
__device__ __forceinline__ Work WorkOf(const ForwardParams& p, uint32_t index) {
  Work w;
  const uint32_t heads = p.num_heads * p.sequences.batch;
  const uint32_t per_head = p.tiles * p.splits;
  const uint32_t section = index / (p.section * per_head);
  const uint32_t in_section = index - section * (p.section * per_head);
  const uint32_t section_heads = min(p.section, heads - section * p.section);
  uint32_t tile = in_section / section_heads;
  const uint32_t head = section * p.section + (in_section - tile * section_heads);
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

// A stage of a ring and the parity of its phase.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

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
  if constexpr (Traits::kLimits) {
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

template <class Traits>
__device__ __forceinline__ void Produce(const ForwardParams& p, uint32_t shared) {
  constexpr int kStages = Traits::kStages;
  const bool leader = threadIdx.x % 32 == 0;
  Ring<kStages> k_ring, v_ring;
  uint32_t q_parity = 0, turn = 0;
  uint32_t index = blockIdx.x;
  while (true) {
    // Tell the consumers what comes.
    const uint32_t slot = turn % 2, slot_parity = turn / 2 % 2;
    ++turn;
    ptx::BarrierWait(shared + Traits::kWorkEmpty + 8 * slot, slot_parity ^ 1);
    if (leader) {
      ptx::StoreShared(shared + Traits::kWorkAt + 4 * slot, index);
      ptx::BarrierArrive(shared + Traits::kWorkFull + 8 * slot);
    }
    if (index >= p.work) break;
    uint32_t next = 0;
    if (leader) next = gridDim.x + atomicAdd(p.counters, 1);
    const Work w = WorkOf<Traits>(p, index);
    const uint8_t* mask = nullptr;
    if constexpr (Traits::kLimits) {
      if (p.score.block_mask != nullptr) {
        mask = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads).block_mask;
      }
    }
    int n = NextShown<Traits>(p, w, mask, w.end - 1);
    if (n >= w.begin) {
      const int batch = static_cast<int>(w.s.batch), kv_head = w.h / p.group;
      const int q_token = static_cast<int>(w.s.q_token) + w.q0;
      ptx::BarrierWait(shared + Traits::kQEmpty, q_parity ^ 1);
      q_parity ^= 1;
      if (leader) {
        ptx::BarrierArriveExpect(shared + Traits::kQFull, Traits::kQBytes);
#pragma unroll
        for (int c = 0; c < Traits::kPanels; ++c) {
          ptx::CopyBox4(shared + c * Traits::kQueries * 128, &p.q, shared + Traits::kQFull,
                        c * kPanel, w.h, q_token, batch);
        }
      }
      while (n >= w.begin) {
        const int k_token = static_cast<int>(w.s.k_token) + n * Traits::kKeys;
        const uint32_t k_full = shared + Traits::kKFull + 8 * k_ring.stage;
        const uint32_t v_full = shared + Traits::kVFull + 8 * v_ring.stage;
        ptx::BarrierWait(shared + Traits::kKEmpty + 8 * k_ring.stage, k_ring.parity ^ 1);
        if (leader) {
          ptx::BarrierArriveExpect(k_full, Traits::kKBytes);
#pragma unroll
          for (int c = 0; c < Traits::kPanels; ++c) {
            ptx::CopyBox4(
                shared + Traits::kKAt + k_ring.stage * Traits::kKBytes + c * Traits::kKeys * 128,
                &p.k, k_full, c * kPanel, kv_head, k_token, batch);
          }
        }
        ptx::BarrierWait(shared + Traits::kVEmpty + 8 * v_ring.stage, v_ring.parity ^ 1);
        if (leader) {
          ptx::BarrierArriveExpect(v_full, Traits::kVBytes);
#pragma unroll
          for (int c = 0; c < Traits::kPanelsV; ++c) {
            ptx::CopyBox4(
                shared + Traits::kVAt + v_ring.stage * Traits::kVBytes + c * Traits::kKeys * 128,
                &p.v, v_full, c * kPanel, kv_head, k_token, batch);
          }
        }
        k_ring.Advance();
        v_ring.Advance();
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
  static constexpr int kColumns = Traits::kKeys / 8;
  float o[Traits::kHeadDimV / 8][4];
  float max[2];  // what probabilities are relative to: raw products, with options log2 scores
  float sum[2];  // of this lane's columns
  uint32_t p[Traits::kKeys / 16][4];  // probabilities of the latest tile, as A of O += P V
  Ring<Traits::kStages> k_ring, v_ring;
  uint32_t shared;
  int group, warp, lane;  // consumer warpgroup; warp of it
  int row0;               // of this lane; its other row is 8 further
  HeadOptions options;
};

template <class Traits>
__device__ __forceinline__ void MaskScores(const ForwardParams& p, const Work& w,
                                           const Consumer<Traits>& c, int n,
                                           float (&s)[Traits::kKeys / 8][4]) {
  const int n0 = n * Traits::kKeys;
  const int first = n0 + (c.lane & 3) * 2;  // of this lane's columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = c.row0 + half * 8;
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
    uint32_t shown = Traits::kSquares;
    if (c.options.block_mask != nullptr) {
      shown = ShownSquares<Traits>(p, w, c.options.block_mask, q0, 64, n);
    }
    if (q0 + 63 + w.s.off - p.score.window_left <= n0 && shown == Traits::kSquares) return;
#pragma unroll
    for (int x = 0; x < Traits::kKeys / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = c.row0 + (e >> 1) * 8;
        if (first + x * 8 + (e & 1) < i + w.s.off - p.score.window_left ||
            (shown >> (x * 8 / kMaskStep) & 1) == 0) {
          s[x][e] = -CUDART_INF_F;
        }
      }
    }
  }
}

// s := probabilities relative to c.max, which follows the running maximum; c.sum is rescaled to it,
// and *correction is what the accumulator has to be multiplied by where the result is true. As
// flash_sm80's: the base is raised only when a score passes it by more than 2^kLazyRise.
inline constexpr float kExactBase = 64.0f;
inline constexpr float kLazyRise = 8.0f;

template <class Traits, bool kMasked>
__device__ __forceinline__ bool OnlineSoftmax(float scale_log2, float keep_log2,
                                              Consumer<Traits>& c, float (&s)[Traits::kKeys / 8][4],
                                              float (&correction)[2]) {
  constexpr int kColumns = Traits::kKeys / 8;
  float from[2];
  const float limit = Traits::kOptions ? fmaxf(kLazyRise - keep_log2, 0.0f) : kLazyRise;
  bool far = false, rises = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = c.max[half];
#pragma unroll
    for (int x = 0; x < kColumns; ++x) top = fmaxf(top, fmaxf(s[x][2 * half], s[x][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const bool rise = (top - c.max[half]) * scale_log2 > limit;
    if (!rise) top = c.max[half];
    from[half] = kMasked && top == -CUDART_INF_F ? 0.0f : top;
    correction[half] = ptx::Exp2((c.max[half] - from[half]) * scale_log2);
    c.max[half] = top;
    rises |= rise;
    far |= fabsf(from[half] * scale_log2) > kExactBase;
  }
  rises = __any_sync(~0u, rises);
  if (rises) {
    c.sum[0] *= correction[0];
    c.sum[1] *= correction[1];
  }
  if (__any_sync(~0u, far)) {  // rare
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        s[x][2 * half] -= from[half];
        s[x][2 * half + 1] -= from[half];
      }
      from[half] = 0.0f;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float base = from[half] * scale_log2;
    if constexpr (Traits::kOptions) base -= keep_log2;
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      s[x][2 * half] = ptx::Exp2(fmaf(s[x][2 * half], scale_log2, -base));
      s[x][2 * half + 1] = ptx::Exp2(fmaf(s[x][2 * half + 1], scale_log2, -base));
      c.sum[half] += s[x][2 * half] + s[x][2 * half + 1];
    }
  }
  return rises;
}

template <class Traits>
__device__ __forceinline__ void PackProbabilities(Consumer<Traits>& c,
                                                  const float (&s)[Traits::kKeys / 8][4]) {
  using E = ptx::Element<typename Traits::T>;
#pragma unroll
  for (int x = 0; x < Traits::kKeys / 16; ++x) {
    c.p[x][0] = E::Pack(s[2 * x][0], s[2 * x][1]);
    c.p[x][1] = E::Pack(s[2 * x][2], s[2 * x][3]);
    c.p[x][2] = E::Pack(s[2 * x + 1][0], s[2 * x + 1][1]);
    c.p[x][3] = E::Pack(s[2 * x + 1][2], s[2 * x + 1][3]);
  }
}

// Issues s = Q K^T with the keys of the ring's stage.
template <class Traits>
__device__ __forceinline__ void IssueScores(const Consumer<Traits>& c,
                                            float (&s)[Traits::kKeys / 8][4]) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kKeys>;
  const uint64_t q = ptx::WgmmaDescriptor(c.shared + c.group * 64 * 128, 16);
  const uint64_t k =
      ptx::WgmmaDescriptor(c.shared + Traits::kKAt + c.k_ring.stage * Traits::kKBytes, 16);
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 32;
    W::Ss(s, q + (panel * Traits::kQueries * 128 + in_panel) / 16,
          k + (panel * Traits::kKeys * 128 + in_panel) / 16, step != 0);
  }
}

// Issues o += P V with the values of the ring's stage.
template <class Traits>
__device__ __forceinline__ void IssueValues(Consumer<Traits>& c) {
  using W = ptx::Wgmma<typename Traits::T, Traits::kHeadDimV>;
  const uint64_t v = ptx::WgmmaDescriptor(
      c.shared + Traits::kVAt + c.v_ring.stage * Traits::kVBytes, Traits::kKeys * 128);
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

// From raw products to probabilities.
template <class Traits, bool kMasked>
__device__ __forceinline__ bool Probabilities(const ForwardParams& p, const Work& w, int n,
                                              Consumer<Traits>& c, float (&s)[Traits::kKeys / 8][4],
                                              float (&correction)[2]) {
  if constexpr (Traits::kOptions) {
    float(&one)[1][Traits::kKeys / 8][4] = reinterpret_cast<float(&)[1][Traits::kKeys / 8][4]>(s);
    ApplyScoreOptions<false>(
        p.score, c.options, w.s.len_q, w.s.len_k, w.s.off,
        [&](int, int, int e) { return c.row0 + (e >> 1) * 8; },
        [&](int, int x, int e) { return n * Traits::kKeys + x * 8 + (c.lane & 3) * 2 + (e & 1); },
        one, one);
  }
  if constexpr (kMasked) MaskScores<Traits>(p, w, c, n, s);
  const bool rises = OnlineSoftmax < Traits,
             kMasked || Traits::kOptions > (Traits::kOptions ? 1.0f : p.score.scale_log2,
                                            p.score.keep_log2, c, s, correction);
  if constexpr (Traits::kOptions) {
    if (p.score.threshold < 65536) {
#pragma unroll
      for (int part = 0; part < Traits::kKeys / 64; ++part) {
        const Keeps keeps = DrawRows<2, 2>(p.score, c.options.dropout_head, c.row0,
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
  }
  return rises;
}

// Waits for the warpgroup's turn to issue products, and passes the turn on.
template <class Traits>
__device__ __forceinline__ void AwaitTurn(int group) {
  if constexpr (Traits::kConsumers > 1) ptx::NamedSync(1 + group, 256);
}
template <class Traits>
__device__ __forceinline__ void PassTurn(int group) {
  if constexpr (Traits::kConsumers > 1) {
    ptx::NamedArrive(1 + (group + 1 == Traits::kConsumers ? 0 : group + 1), 256);
  }
}

// Key tile n: its scores, while the values of the tile before are multiplied.
template <class Traits, bool kMasked>
__device__ __forceinline__ void Step(const ForwardParams& p, const Work& w, int n,
                                     Consumer<Traits>& c) {
  float s[Traits::kKeys / 8][4], correction[2];
  ptx::BarrierWait(c.shared + Traits::kKFull + 8 * c.k_ring.stage, c.k_ring.parity);
  AwaitTurn<Traits>(c.group);
  ptx::Settle(s);
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  ptx::WgmmaFence();
  IssueScores<Traits>(c, s);
  ptx::WgmmaCommit();
  ptx::BarrierWait(c.shared + Traits::kVFull + 8 * c.v_ring.stage, c.v_ring.parity);
  IssueValues<Traits>(c);
  ptx::WgmmaCommit();
  PassTurn<Traits>(c.group);
  ptx::WgmmaWait<1>();
  ptx::Settle(s);
  Release(c.shared + Traits::kKEmpty + 8 * c.k_ring.stage, c.lane);
  c.k_ring.Advance();
  const bool rises = Probabilities<Traits, kMasked>(p, w, n, c, s, correction);
  ptx::WgmmaWait<0>();
  ptx::Settle(c.o);
  ptx::Settle(c.p);
  Release(c.shared + Traits::kVEmpty + 8 * c.v_ring.stage, c.lane);
  c.v_ring.Advance();
  if (rises) {
#pragma unroll
    for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c.o[x][e] *= correction[e >> 1];
    }
  }
  PackProbabilities<Traits>(c, s);
}

// Zeroes the values of keys beyond len_k of tile n, which may be anything: 0 * NaN is NaN.
template <class Traits>
__device__ __forceinline__ void ClearLooseValues(const Work& w, int n, const Consumer<Traits>& c) {
  const int valid = w.s.len_k - n * Traits::kKeys;
  if (valid >= Traits::kKeys) return;
  ptx::BarrierWait(c.shared + Traits::kVFull + 8 * c.v_ring.stage, c.v_ring.parity);
  const uint32_t v = c.shared + Traits::kVAt + c.v_ring.stage * Traits::kVBytes;
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

// lse of a row with keys from its maximum (log2 units), the sum relative to it, and the sink
// (-infinity: none); *factor becomes what its sum of values is multiplied by.
__device__ __forceinline__ float FinishRow(float max2, float sum, float sink, float* factor) {
  float lse2 = max2 + log2f(sum);
  *factor = 1.0f / sum;
  if (sink != -CUDART_INF_F) {
    const float sink2 = sink * kLog2E, top = fmaxf(lse2, sink2);
    const float with_sink = top + log2f(ptx::Exp2(lse2 - top) + ptx::Exp2(sink2 - top));
    *factor *= ptx::Exp2(lse2 - with_sink);
    lse2 = with_sink;
  }
  return lse2 * kLn2;
}

template <class Traits>
__device__ __forceinline__ void WriteRows(const ForwardParams& p, const Work& w,
                                          Consumer<Traits>& c) {
  using T = typename Traits::T;
  using E = ptx::Element<T>;
  const float scale_log2 = Traits::kOptions ? 1.0f : p.score.scale_log2;
  const bool partial = p.splits > 1;  // the sink is the merge's
  const float sink =
      p.score.sinks != nullptr && !partial ? __ldg(p.score.sinks + w.h) : -CUDART_INF_F;
  const int64_t lse_row0 = w.s.lse + w.h * p.lse_head;
  const int quad = c.lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = c.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if constexpr (Traits::kOptions) sum *= p.score.keep_inverse;
    const int i = c.row0 + half * 8;
    const bool valid = i < w.s.len_q, has_keys = valid && sum > 0.0f, stored = i < w.s.rows_q;
    float lse = valid ? sink : -CUDART_INF_F;  // without keys exactly the sink
    float factor = 0.0f;                       // and o is 0 there
    if (has_keys) lse = FinishRow(c.max[half] * scale_log2, sum, sink, &factor);
    if (partial || p.out_fp32) {
      const int64_t row = w.split * p.partial_rows + lse_row0 + i;
      float* to = partial ? p.partial_out + row * p.head_dim_v
                          : static_cast<float*>(p.out) + w.s.batch * p.out_strides.batch +
                                w.h * p.out_strides.head + (w.s.q_token + i) * p.out_strides.token;
      if (stored) {
#pragma unroll
        for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
          const int column = x * 8 + quad * 2;
          if (column >= p.head_dim_v) continue;
          // A row without keys may have summed what is not a number.
          *reinterpret_cast<float2*>(to + column) =
              has_keys ? make_float2(c.o[x][2 * half] * factor, c.o[x][2 * half + 1] * factor)
                       : make_float2(0.0f, 0.0f);
        }
        if (quad == 0) {
          if (partial) {
            p.partial_lse[row] = valid ? lse : CUDART_INF_F;
          } else {
            p.lse[lse_row0 + i] = lse;
          }
        }
      }
      continue;
    }
    if (stored && quad == 0) p.lse[lse_row0 + i] = lse;
    // Four lanes have 4 bytes each of every 16; they exchange, so that each has 16 of every 64.
    T* to = static_cast<T*>(p.out) + w.s.batch * p.out_strides.batch + w.h * p.out_strides.head +
            (w.s.q_token + i) * p.out_strides.token;
#pragma unroll
    for (int x = 0; x < Traits::kHeadDimV / 8; x += 4) {
      uint32_t r[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        r[t] = has_keys ? E::Pack(c.o[x + t][2 * half] * factor, c.o[x + t][2 * half + 1] * factor)
                        : 0;
      }
      ptx::TransposeInQuad(r, quad);
      const int column = (x + quad) * 8;
      if (stored && column < p.head_dim_v) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(r[0], r[1], r[2], r[3]);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void Consume(const ForwardParams& p, uint32_t shared) {
  Consumer<Traits> c;
  c.shared = shared;
  c.group = threadIdx.x / 128 - 1;
  c.warp = threadIdx.x / 32 % 4;
  c.lane = threadIdx.x % 32;
  uint32_t q_parity = 0;
  if (c.group == Traits::kConsumers - 1) PassTurn<Traits>(c.group);
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t slot = turn % 2;
    ptx::BarrierWait(shared + Traits::kWorkFull + 8 * slot, turn / 2 % 2);
    const uint32_t index = ptx::LoadShared(shared + Traits::kWorkAt + 4 * slot);
    Release(shared + Traits::kWorkEmpty + 8 * slot, c.lane);
    if (index >= p.work) break;
    const Work w = WorkOf<Traits>(p, index);
    c.row0 = w.q0 + c.group * 64 + c.warp * 16 + c.lane / 4;
    if constexpr (Traits::kOptions) {
      c.options = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads);
    } else {
      c.options.block_mask = nullptr;
      if constexpr (Traits::kLimits) {
        if (p.score.block_mask != nullptr) {
          c.options.block_mask = OptionsOf(p.score, w.s, w.b, w.h, p.num_heads).block_mask;
        }
      }
    }
    const uint8_t* mask = c.options.block_mask;
#pragma unroll
    for (int x = 0; x < Traits::kHeadDimV / 8; ++x) {
      c.o[x][0] = c.o[x][1] = c.o[x][2] = c.o[x][3] = 0.0f;
    }
    c.max[0] = c.max[1] = -CUDART_INF_F;
    c.sum[0] = c.sum[1] = 0.0f;
    int n = NextShown<Traits>(p, w, mask, w.end - 1);
    if (n >= w.begin) {
      // Tiles that every row of the warpgroup sees whole: [full_begin, full_end). None has rows
      // beyond len_q, which see nothing.
      const int q0 = w.q0 + c.group * 64, q_last = min(q0 + 64, w.s.len_q) - 1;
      int full_end = w.s.len_k, full_begin = 0;
      if constexpr (Traits::kLimits) {
        full_end = max(0, min(full_end, q0 + w.s.off + p.score.window_right + 1));
        full_begin =
            (max(0, q_last + w.s.off - p.score.window_left) + Traits::kKeys - 1) / Traits::kKeys;
        if (mask != nullptr) full_begin = w.end;
      }
      full_end /= Traits::kKeys;
      if (q0 + 64 > w.s.len_q) full_end = 0;

      ptx::BarrierWait(shared + Traits::kQFull, q_parity);
      q_parity ^= 1;
      ptx::BarrierWait(shared + Traits::kKFull + 8 * c.k_ring.stage, c.k_ring.parity);
      {
        float s[Traits::kKeys / 8][4], correction[2];
        ptx::Settle(s);
        ptx::WgmmaFence();
        IssueScores<Traits>(c, s);
        ptx::WgmmaCommit();
        ptx::WgmmaWait<0>();
        ptx::Settle(s);
        Release(shared + Traits::kKEmpty + 8 * c.k_ring.stage, c.lane);
        c.k_ring.Advance();
        Probabilities<Traits, true>(p, w, n, c, s, correction);
        PackProbabilities<Traits>(c, s);
      }
      if (p.loose_keys) ClearLooseValues<Traits>(w, n, c);
      n = NextShown<Traits>(p, w, mask, n - 1);
      for (; n >= w.begin && (n >= full_end || n < full_begin);
           n = NextShown<Traits>(p, w, mask, n - 1)) {
        Step<Traits, true>(p, w, n, c);
      }
      for (; n >= w.begin && n >= full_begin; --n) Step<Traits, false>(p, w, n, c);
      if constexpr (Traits::kLimits) {
        for (; n >= w.begin; --n) Step<Traits, true>(p, w, n, c);
      }
      Release(shared + Traits::kQEmpty, c.lane);
      ptx::BarrierWait(shared + Traits::kVFull + 8 * c.v_ring.stage, c.v_ring.parity);
      ptx::Settle(c.o);
      ptx::Settle(c.p);
      ptx::WgmmaFence();
      IssueValues<Traits>(c);
      ptx::WgmmaCommit();
      ptx::WgmmaWait<0>();
      ptx::Settle(c.o);
      Release(shared + Traits::kVEmpty + 8 * c.v_ring.stage, c.lane);
      c.v_ring.Advance();
    }
    WriteRows<Traits>(p, w, c);
  }
}

// Grid: as many CTAs as the device holds, or fewer where there is less work.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    Forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ char unaligned[];
  const uint32_t shared = (ptx::SharedAddress(unaligned) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.q);
    ptx::PrefetchTensorMap(&p.k);
    ptx::PrefetchTensorMap(&p.v);
    ptx::BarrierInit(shared + Traits::kQFull, 1);
    ptx::BarrierInit(shared + Traits::kQEmpty, Traits::kConsumerWarps);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
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
    if (threadIdx.x < 32) Produce<Traits>(p, shared);
  } else {
    ptx::RaiseRegisters<Traits::kConsumerRegisters>();
    Consume<Traits>(p, shared);
  }
}

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_FORWARD_CUH_
