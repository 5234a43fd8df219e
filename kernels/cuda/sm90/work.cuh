// What one tile needs of shared memory, and the pieces of work.
#ifndef ATTN_KERNELS_CUDA_SM90_WORK_CUH_
#define ATTN_KERNELS_CUDA_SM90_WORK_CUH_

#include "kernels/cuda/common/score.cuh"
#include "kernels/cuda/sm90/kernel_params.h"

namespace attn::cuda::sm90 {

// A piece of work: a tile of queries of one head, shared by a cluster, and for it a range of key
// tiles [begin, end).
struct alignas(16) Work {
  DeviceSequence s;
  int64_t lse;   // of the first row of head h, and of the split, in an lse-shaped buffer
  int h, token;  // the (first) head of queries; the first row's token
  int b, split, q0;
  int place0, place_step;  // of the CTA's warpgroups: PlaceOf()
  int begin, end;
  int first;  // the largest that the block mask shows to some row; below begin: none
  bool some;  // there is work
};
// Where in the tile of queries the rows of a warpgroup begin.
__device__ __forceinline__ int PlaceOf(const Work& w, int group) {
  return w.place0 + group * w.place_step;
}
// Works that the producer may be ahead, and the one whose rows are still to be written.
inline constexpr int kWorkSlots = 3;

// A head's queries, or where packed 2^pack heads', as rows: query and head (beyond w.h) of a row,
// and as many rows as `queries` are.
template <class Traits>
__device__ __forceinline__ int QueryOf(const ForwardParams& p, int row) {
  return Traits::kPacked ? row >> p.pack : row;
}
template <class Traits>
__device__ __forceinline__ int HeadOf(const ForwardParams& p, int row) {
  return Traits::kPacked ? row & ((1 << p.pack) - 1) : 0;
}
template <class Traits>
__device__ __forceinline__ int RowsOf(const ForwardParams& p, int queries) {
  return Traits::kPacked ? queries << p.pack : queries;
}

inline constexpr int kPanelBytes = kWarpgroupRows * 128;  // of a warpgroup's rows

// Tile is a ForwardTile of tiles.h. The kCluster CTAs of a cluster, one or two, work on
// neighbouring queries of a head: each copies its share of every tile of keys and values to all.
// kPacked: rows are queries of 2^pack heads.
template <class T_, class Tile_, Mode kMode_, int kCluster_, bool kPacked_>
struct ForwardTraits : Tile_ {
  using T = T_;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kOptions = kMode == Mode::kOptions;
  static constexpr bool kLimits = kMode != Mode::kFull;
  static constexpr bool kBlockMask = kMode == Mode::kBlocks || kOptions;
  // Warpgroups take turns in issuing products. Under limits one has fewer tiles than another.
  static constexpr bool kTurns = !kLimits;
  static constexpr int kCluster = kCluster_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kConsumers = Tile_::kConsumers;
  static constexpr int kQueries = kWarpgroupRows * kConsumers;
  static constexpr int kWorkQueries = kQueries * kCluster;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  // Of a thread; together what kThreads have when the kernel starts.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kCluster > 1 ? 40 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                            : kConsumers == 3 ? 160
                                            : kCluster > 1    ? 232
                                                              : 240;
  // Panels of kPanel elements: [panels][rows][128 bytes].
  static constexpr int kPanels = (Tile_::kHeadDim + kPanel - 1) / kPanel;
  static constexpr int kPanelsV = (Tile_::kHeadDimV + kPanel - 1) / kPanel;
  static constexpr int kQBytes = kPanels * kPanelBytes;  // of one warpgroup
  static constexpr int kKBytes = kPanels * Tile_::kKeys * 128;
  static constexpr int kVBytes = kPanelsV * Tile_::kKeys * 128;
  // Rows leave through shared memory: where two works' queries fit, through the buffer of theirs;
  // otherwise panel by panel through kRowPanels of their own.
  static constexpr bool kRowsInQueries = Tile_::kRowPanels == 0;
  // Shared memory: Q, K stages, V stages, rows, barriers.
  static constexpr int kKAt = Tile_::kQBuffers * kQBytes;
  static constexpr int kVAt = kKAt + Tile_::kStages * kKBytes;
  static constexpr int kRowsAt = kVAt + Tile_::kStages * kVBytes;
  static constexpr int kQFull = kRowsAt + kConsumers * Tile_::kRowPanels * kPanelBytes;
  static constexpr int kQEmpty = kQFull + 8 * Tile_::kQBuffers;
  static constexpr int kWorkFull = kQEmpty + 8 * Tile_::kQBuffers;
  static constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
  static constexpr int kKFull = kWorkEmpty + 8 * kWorkSlots, kKEmpty = kKFull + 8 * Tile_::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Tile_::kStages;
  static constexpr int kVEmpty = kVFull + 8 * Tile_::kStages;
  // In a cluster: what the first CTA tells the second.
  static constexpr int kNextFull = kVEmpty + 8 * Tile_::kStages, kNextEmpty = kNextFull + 8;
  static constexpr int kNextAt = kNextEmpty + 8;
  static constexpr int kWorkAt = (kNextAt + 4 + 15) / 16 * 16;
  // Aligned to 1024 bytes by the kernel.
  static constexpr int kSharedBytes = kWorkAt + kWorkSlots * static_cast<int>(sizeof(Work)) + 1024;
  static constexpr uint32_t kSquares = (uint32_t{1} << (Tile_::kKeys / kMaskStep)) - 1;
  static_assert(Tile_::kKeys % 16 == 0 && Tile_::kKeys * 128 % 1024 == 0);
  static_assert(!kBlockMask || Tile_::kKeys % kMaskStep == 0);
  static_assert(kCluster == 1 ||
                (kCluster == kMaxCluster && !kBlockMask && Tile_::kKeys % (8 * kCluster) == 0));
  // Options and block masks are a head's own.
  static_assert(!kPacked || (kCluster == 1 && !kBlockMask));
  static_assert(kConsumers >= 2 && kConsumers <= 4 && Tile_::kQBuffers >= kConsumers);
  static_assert(!kRowsInQueries || (Tile_::kQBuffers == 2 * kConsumers && kPanelsV <= kPanels));
};

// The n-th use of a ring of kStages buffers: which one, and the parity of its barriers' phase.
template <int kStages>
__device__ __forceinline__ uint32_t StageOf(uint32_t n) {
  return n % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t ParityOf(uint32_t n) {
  return n / kStages % 2;
}

// Piece `index`, the CTA's `turn`-th; `rank`: of the CTA in its cluster. Under limits the last of
// its rows see most: every other turn the warpgroups' order is turned round, so that in the long
// run all have as much to do.
template <class Traits>
__device__ __forceinline__ Work WorkOf(const ForwardParams& p, uint32_t index, uint32_t turn,
                                       uint32_t rank) {
  Work w;
  const bool reverse = Traits::kLimits && turn % 2 == 1;
  w.place0 = reverse ? Traits::kWorkQueries - kWarpgroupRows : 0;
  w.place_step = reverse ? -kWarpgroupRows : kWarpgroupRows;
  if constexpr (Traits::kCluster > 1) {
    w.place0 += static_cast<int>(rank) * Traits::kConsumers * w.place_step;
  }
  const uint32_t heads = p.work_heads * p.sequences.batch;
  const uint32_t per_head = p.tiles * p.splits;
  const uint32_t before_last = heads - p.last_section;
  uint32_t first_head = before_last, section_heads = p.last_section;
  Divisor by_section_heads = p.by_last_section;
  if (index < before_last * per_head) {
    first_head = Quotient(index, p.by_section_work) * p.section;
    section_heads = p.section;
    by_section_heads = p.by_section;
  }
  index -= first_head * per_head;
  uint32_t tile = Quotient(index, by_section_heads);
  const uint32_t head = first_head + (index - tile * section_heads);
  w.b = static_cast<int>(Quotient(head, p.by_work_heads));
  w.h = RowsOf<Traits>(p, head - w.b * p.work_heads);
  w.split = 0;
  w.lse = 0;
  if (p.splits > 1) {
    const uint32_t whole = Quotient(tile, p.by_splits);
    w.split = static_cast<int>(tile - whole * p.splits);
    tile = whole;
    w.lse = w.split * p.partial_rows;
  }
  w.s = SequenceOf(p.sequences, w.b);
  w.q0 = tile * Traits::kWorkQueries;
  if (p.last_first) {
    // Counted from the end, so that the tile that is not full is not the longest. Rows before the
    // first are whole warpgroups.
    const int rows = RowsOf<Traits>(p, w.s.rows_q);
    w.q0 = (rows + kWarpgroupRows - 1) / kWarpgroupRows * kWarpgroupRows -
           static_cast<int>(tile + 1) * Traits::kWorkQueries;
  }
  w.lse += w.s.lse + w.h * p.lse_head;
  w.token = static_cast<int>(w.s.q_token) + QueryOf<Traits>(p, w.q0);
  const int end_row = min(w.q0 + Traits::kWorkQueries, RowsOf<Traits>(p, w.s.len_q));
  const int q_first = QueryOf<Traits>(p, max(w.q0, 0)), q_last = QueryOf<Traits>(p, end_row - 1);
  int key_end = w.s.len_k;
  w.begin = 0;
  if constexpr (Traits::kLimits) {
    key_end = min(key_end, q_last + w.s.off + p.score.window_right + 1);
    w.begin = max(0, q_first + w.s.off - p.score.window_left) / Traits::kKeys;
  }
  w.end =
      end_row <= max(w.q0, 0) || key_end <= 0 ? 0 : (key_end + Traits::kKeys - 1) / Traits::kKeys;
  if (p.splits > 1) {
    w.begin = max(w.begin, w.split * p.split_tiles);
    w.end = min(w.end, (w.split + 1) * p.split_tiles);
  }
  return w;
}

// The block mask as rows of squares of kMaskStep: a bit per square of the keys of tile n, for the
// warpgroups' rows from q0 on together.
template <class Traits>
__device__ __forceinline__ uint32_t ShownSquares(const ForwardParams& p, const Work& w,
                                                 const uint8_t* mask, int q0, int rows, int n) {
  uint32_t bits = 0;
  for (int m = max(0, -q0); m < rows; m += kMaskStep) {
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

}  // namespace attn::cuda::sm90

#endif  // ATTN_KERNELS_CUDA_SM90_WORK_CUH_
