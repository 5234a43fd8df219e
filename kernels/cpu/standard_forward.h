// Forward of the standard CPU path. Source: FlashAttention (Dao et al. 2022), Algorithm 0.
#ifndef ATTN_KERNELS_CPU_STANDARD_FORWARD_H_
#define ATTN_KERNELS_CPU_STANDARD_FORWARD_H_

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace attn::standard {

// Errors: those of Backend::Forward().
absl::Status Forward(const AttentionProblem& p, const ForwardTensors& tensors,
                     const RunContext& context, ThreadPool& pool);

}  // namespace attn::standard

#endif  // ATTN_KERNELS_CPU_STANDARD_FORWARD_H_
