#include <array>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {

std::span<const Backend* const> Paths() {
  // Two workers.
  static ThreadPool* const kPool = new ThreadPool(2);
  static const std::array<const Backend*, 2> kPaths = {MakeFlashCpuBackend(kPool).release(),
                                                       MakeStandardCpuBackend(kPool).release()};
  return kPaths;
}

}  // namespace attn::exactness
