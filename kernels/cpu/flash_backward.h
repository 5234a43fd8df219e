// flash_cpu, backward by recomputation: how the work is divided, what it moves, and running it.
#ifndef ATTN_KERNELS_CPU_FLASH_BACKWARD_H_
#define ATTN_KERNELS_CPU_FLASH_BACKWARD_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/cpu/flash_panel.h"
#include "kernels/cpu/thread_pool.h"

namespace attn {

// Keys whose k, v, dk and dv stay on chip while all query panels pass by. Within it, scores are
// computed kKeyTile keys at a time. The longer, the less often queries are loaded and dq is added
// to memory; 256 keys of head_dim 128 are 512 KB.
inline constexpr int64_t kKeySpan = 256;

// The division of a backward call, a function of the problem alone: so results are bitwise the same
// from run to run and on any number of threads. A group is a set of (batch, kv head) pairs that one
// worker goes through in order: one pair, or all pairs that add to the same entries of dbias. A
// group's key spans are dealt out to `chunks` items in turn; each chunk has its own fp32 dq, and
// these are summed in order at the end.
struct BackwardPlan {
  int64_t group_batches = 1;  // batches in a group: 1, or all of them
  int64_t group_heads = 1;    // kv heads in a group: 1, or all of them
  int64_t groups = 0;
  int64_t chunks = 1;
  // Whether chunk 0 adds straight to dq: where that is fp32.
  bool direct_dq = false;

  explicit BackwardPlan(const AttentionProblem& p);
  // fp32 dq copies in the workspace.
  int64_t dq_copies() const { return chunks - (direct_dq ? 1 : 0); }
  // Floats before the dq copies: row_dot − dlse of every row.
  static int64_t DeltaFloats(const AttentionProblem& p) { return RoundUp(LseElements(p), 16); }
  // Saturates at the largest int64_t: a header may state any shape.
  int64_t WorkspaceBytes(const AttentionProblem& p) const {
    const __int128 floats = static_cast<__int128>(DqElements(p)) * dq_copies() + DeltaFloats(p);
    return static_cast<int64_t>(
        std::min<__int128>(floats * 4, std::numeric_limits<int64_t>::max()));
  }
};

// Valid query rows (folded over the group) whose panels see some key of [begin, end), which must
// not be empty and lie within Lk. The begin is a multiple of kPanelRows.
KeyRange RowsThatSee(const AttentionProblem& p, const Sequence& s, int64_t begin, int64_t end);

absl::Status RunFlashBackward(const AttentionProblem& p, const BackwardTensors& tensors,
                              const RunContext& context, ThreadPool* pool);

// What RunFlashBackward() loads and stores. O(key spans and, where SumsRowDot(), panels of rows)
// for each distinct shape of sequence; with a bias or a block mask, O(tiles).
TileModel ModelFlashBackward(const AttentionProblem& p);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_FLASH_BACKWARD_H_
