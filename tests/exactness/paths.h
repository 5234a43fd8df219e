// The paths that this test program goes through. A program links one of attn_cpu_paths and
// attn_cuda_paths.
#ifndef ATTN_TESTS_EXACTNESS_PATHS_H_
#define ATTN_TESTS_EXACTNESS_PATHS_H_

#include <span>

#include "kernels/api/backend.h"

namespace attn::exactness {

// Fastest first. They live until the process ends. Empty where the host has no device for them.
std::span<const Backend* const> Paths();

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_PATHS_H_
