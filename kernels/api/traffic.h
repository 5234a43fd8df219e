// Bytes and floating-point operations of an attention problem, whatever the path.
#ifndef ATTN_KERNELS_API_TRAFFIC_H_
#define ATTN_KERNELS_API_TRAFFIC_H_

#include <cstdint>

#include "kernels/api/problem.h"

namespace attn {

// Visible (i, j) pairs over all sequences and query heads: lengths, causal, window and block mask
// counted, bias -inf not. O(rows + blocks), not O(pairs).
uint64_t VisiblePairs(const AttentionProblem& p);

// Forward 2 * pairs * (head_dim + head_dim_v); backward 2 * pairs * (3 * head_dim + 2 *
// head_dim_v).
uint64_t Flops(const AttentionProblem& p, Pass pass);

// Each input read once, each output written once: valid tokens only for inputs, option tensors
// included; outputs whole.
uint64_t CompulsoryBytes(const AttentionProblem& p, Pass pass);

// What the standard algorithm moves: per query head and sequence 4 * N * M score elements forward,
// 7 * N * M backward, stored as FP32 on a CPU path and in the input dtype on CUDA, plus compulsory
// bytes. Source: FlashAttention (Dao et al. 2022), Algorithm 0 and Appendix B.
uint64_t StandardBytes(const AttentionProblem& p, Pass pass, int64_t score_bytes);

// The picture FlashAttention is explained with (same source, Theorem 2), per head, in elements, N
// queries, M keys, d head_dim, forward.
double StandardElementsPerHead(int64_t n, int64_t m, int64_t d);  // 2NM + 2(N+M)d
double FlashElementsPerHead(int64_t n, int64_t m, int64_t d,
                            int64_t on_chip_elements);  // 2(N+M)d + 2NMd²/M_c

}  // namespace attn

#endif  // ATTN_KERNELS_API_TRAFFIC_H_
