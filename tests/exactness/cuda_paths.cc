#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/backends.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

std::vector<const Backend*> MakePaths() {
  // Poisoned outputs: what a kernel does not write shows as NaN. To a checker of uninitialised
  // memory, poison is a value like any other: run.sh turns it off for that one.
  const bool poison = std::getenv("ATTN_TEST_NO_POISON") == nullptr;
  const absl::StatusOr<std::shared_ptr<cuda::DeviceSet>> devices = cuda::DeviceSet::Create(
      {.indices = std::vector<int>{0}, .lanes = 1, .poison = poison, .measure_roofline = false},
      cuda::CudaDriver());
  std::vector<const Backend*> paths;
  if (!devices.ok()) {
    std::fprintf(stderr, "%s\n", devices.status().ToString().c_str());
    return paths;
  }
  for (auto& backend : cuda::MakeCudaBackends(*devices)) paths.push_back(backend.release());
  return paths;
}

}  // namespace

std::span<const Backend* const> Paths() {
  static const auto* const kPaths = new std::vector<const Backend*>(MakePaths());
  return *kPaths;
}

}  // namespace attn::exactness
