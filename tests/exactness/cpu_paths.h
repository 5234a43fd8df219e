// The CPU paths of this build, for tests that go through all of them.
#ifndef ATTN_TESTS_EXACTNESS_CPU_PATHS_H_
#define ATTN_TESTS_EXACTNESS_CPU_PATHS_H_

#include <span>

#include "kernels/api/backend.h"

namespace attn::exactness {

// Fastest first; two workers. They live until the process ends.
std::span<const Backend* const> CpuPaths();

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_CPU_PATHS_H_
