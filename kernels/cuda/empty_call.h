// Calls without a query row or without a key, answered on the host.
#ifndef ATTN_KERNELS_CUDA_EMPTY_CALL_H_
#define ATTN_KERNELS_CUDA_EMPTY_CALL_H_

#include "kernels/api/problem.h"

namespace attn::cuda {

// Whether there is nothing to compute: no query row is stored, or no key.
inline bool IsEmpty(const AttentionProblem& p) { return p.total_q == 0 || p.total_k == 0; }

// Write all outputs of a call for which IsEmpty() holds. Pointers to tensors without elements may
// be null.
void AnswerEmptyForward(const AttentionProblem& p, const ForwardTensors& tensors);
void AnswerEmptyBackward(const AttentionProblem& p, const BackwardTensors& tensors);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_EMPTY_CALL_H_
