// Backward of the standard CPU path. Source: FlashAttention (Dao et al. 2022), Algorithm 3, with P
// computed again from lse.
#ifndef ATTN_KERNELS_CPU_STANDARD_BACKWARD_H_
#define ATTN_KERNELS_CPU_STANDARD_BACKWARD_H_

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace attn::standard {

// Errors: those of Backend::Backward().
absl::Status Backward(const AttentionProblem& p, const BackwardTensors& tensors,
                      const RunContext& context, ThreadPool& pool);

}  // namespace attn::standard

#endif  // ATTN_KERNELS_CPU_STANDARD_BACKWARD_H_
