// The CPU paths, as Backends.
#ifndef ATTN_KERNELS_CPU_BACKENDS_H_
#define ATTN_KERNELS_CPU_BACKENDS_H_

#include <memory>

#include "kernels/api/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace attn {

// flash_cpu: tiled online softmax, backward by recomputation. Takes head_dim and head_dim_v up to
// 256, and block masks whose blocks are multiples of 64. Results are bitwise equal from run to run
// and do not depend on the number of threads. `pool` must outlive the backend.
std::unique_ptr<Backend> MakeFlashCpuBackend(ThreadPool* pool);

// standard_cpu: materialises the scores. Takes every valid problem. `pool` must outlive the
// backend.
std::unique_ptr<Backend> MakeStandardCpuBackend(ThreadPool* pool);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_BACKENDS_H_
