// How the standard CUDA path cuts a call into chunks of heads that fit its workspace, and the bytes
// it moves. Host code without CUDA in it.
#ifndef ATTN_KERNELS_CUDA_STANDARD_PLAN_H_
#define ATTN_KERNELS_CUDA_STANDARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/problem.h"

namespace attn::cuda::standard {

// Consecutive sequences of the same lengths at the same distance from each other in every tensor,
// so that one strided batched product takes all of them.
struct SequenceRun {
  int64_t first = 0;
  int64_t count = 0;
};
// Every sequence with a query, in order; those without keys too, whose rows still have an lse.
std::vector<SequenceRun> FindRuns(const AttentionProblem& p);

// Part of a run: sequences [batch0, batch0 + batch), their kv heads [kv0, kv0 + kv_heads), and
// query heads [group0, group0 + group_heads) of each kv head's group.
struct Chunk {
  int64_t batch0 = 0, batch = 0;
  int64_t kv0 = 0, kv_heads = 0;
  int64_t group0 = 0, group_heads = 0;

  int64_t matrices() const { return batch * kv_heads * group_heads; }
};

// Elements from one row of a score matrix to the next: 32 bytes and so vector loads stay aligned,
// and a block of eight keys, which share a draw of the dropout mask, is never cut.
constexpr int64_t ScoreStride(int64_t len_k) { return (len_k + 7) / 8 * 8; }

// Whether several (sequence, query head) pairs add into the same entries of dbias: over sequences,
// over heads.
bool DbiasSumsBatch(const AttentionProblem& p);
bool DbiasSumsHeads(const AttentionProblem& p);

// fp32 score matrices in memory per (sequence, query head): forward S, which P overwrites in place;
// backward S, then P, and dP, then dS; and ds before the softcap's slope where dbias is summed from
// it and it differs from dS.
int64_t ScoreMatrices(const AttentionProblem& p, Pass pass);

// The type in which P and dS of a sequence are stored. The exactness rule lets them be rounded to
// the input type, but then grants backward, which sees out with P's rounding in it, no more than
// out's own. Over many keys the roundings of P average out; over a handful they need not, so there
// P and dS stay fp32.
inline constexpr int64_t kFewKeys = 16;

// Keys of a row that the softmax kernel keeps in registers; longer rows are read twice, and with a
// bias keep P in fp32, since the two halves of a split row cannot be written over a row that is not
// read whole.
inline constexpr int64_t kMaxRowInRegisters = 16384;

DType ProbabilityType(const AttentionProblem& p, Pass pass, const Sequence& s);

// Whether forward stores P as a sum of two numbers of the input type, the second in the second half
// of each row of fp32 scores, and multiplies both with V: out then has no error but its own
// rounding. So with a bias, because dbias is ds itself, an element at a time, and nothing averages
// out what P's rounding does to row_dot through out. Costs 4 bytes of traffic per score.
bool SplitsProbabilities(const AttentionProblem& p, const Sequence& s);

// Whether dk and dv are summed over the group in fp32 scratch memory before they are rounded.
bool NeedsAccumulators(const AttentionProblem& p);

// Whether a sequence has rows of queries or keys that nothing computes: padding, or no keys.
bool HasIdleRows(const AttentionProblem& p);

// The parts of the workspace and the size of chunks: as large as fits `limit_bytes`.
class Plan {
 public:
  Plan(const AttentionProblem& p, Pass pass, int64_t limit_bytes);

  // Bytes of the workspace; where not even one query head of the longest sequence fits, what that
  // needs, which is more than the limit. Saturates.
  int64_t bytes() const { return bytes_; }
  bool fits() const { return bytes_ <= limit_bytes_; }

  // Offsets in the workspace, multiples of 256.
  int64_t blas_at() const { return 0; }
  int64_t blas_bytes() const { return blas_bytes_; }  // scratch of cuBLAS
  int64_t delta_at() const { return delta_at_; }  // fp32, lse-shaped: dlse - row_dot; backward only
  int64_t sinks_at() const { return sinks_at_; }  // double [batch, num_heads]; dsink's parts
  int64_t chunk_at() const { return chunk_at_; }  // the score matrices and accumulators of a chunk

  // Chunks of a run, in the order in which they are computed. fits() must hold.
  std::vector<Chunk> Chunks(const SequenceRun& run) const;

  // Within a chunk: the accumulators of dk and of dv, fp32 [batch, kv_heads, len_k, head_dim or
  // head_dim_v], or of out, fp32 [batch, kv_heads, group_heads, len_q, head_dim_v], and factors,
  // then fp32 [matrices, len_q, ScoreStride] for each of ScoreMatrices().
  int64_t ScoreBytes(const Chunk& chunk) const;  // of one of ScoreMatrices()
  int64_t DkBytes(const Chunk& chunk) const;
  int64_t DvBytes(const Chunk& chunk) const;
  int64_t OutBytes(const Chunk& chunk) const;
  int64_t FactorBytes(const Chunk& chunk) const;

 private:
  Chunk Largest(const SequenceRun& run, int64_t budget) const;  // extents only; all 0: none fits
  int64_t HeadBytes(const Sequence& s) const;    // scores, factors, out's accumulator
  int64_t KvHeadBytes(const Sequence& s) const;  // accumulators
  int64_t ChunkBytes(const Chunk& chunk) const;
  // Elements of out per query head that lie in fp32 until they are multiplied by their row's
  // factor.
  int64_t OutSums(const Sequence& s) const;

  const AttentionProblem& p_;
  const Pass pass_;
  const int64_t limit_bytes_;
  const int64_t score_matrices_;
  const bool accumulators_;
  int64_t blas_bytes_ = 0, delta_at_ = 0, sinks_at_ = 0, chunk_at_ = 0, bytes_ = 0;
};

// What the path's own loop nest moves. Score matrices are written and read whole at their real
// widths (S and dP 4 bytes, P and dS those of the input type), except that the row kernels read
// only the pairs that lengths, causal, window and block mask show. Forward 4 passes over the score
// matrix: write S, read S, write P, read P. Backward 9: S and dP written and read, P written and
// read, dS written and read twice; that is the 7 of FlashAttention (Dao et al. 2022), Algorithm 4,
// and S computed again instead of kept. Every operand of a product is counted once per product.
// Saturates.
TileModel Model(const AttentionProblem& p, Pass pass);

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_PLAN_H_
