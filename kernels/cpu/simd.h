// Which instruction set the SIMD code runs with. Chosen once, from the processor, so one binary
// runs on any x86-64. Highway supplies the vectors; its own run-time dispatch is not used because
// that needs libhwy.so beside the binary.
#ifndef ATTN_KERNELS_CPU_SIMD_H_
#define ATTN_KERNELS_CPU_SIMD_H_

#include <string_view>
#include <vector>

namespace attn {

enum class SimdTarget { kBaseline, kSse4, kAvx2, kAvx3 };

// "baseline", "sse4", "avx2", "avx3" (AVX-512).
std::string_view Name(SimdTarget target);

// Every target that this binary has and this processor runs, slowest first. Thread-safe.
std::vector<SimdTarget> SupportedSimdTargets();

// The target in use: the fastest supported one. Thread-safe.
SimdTarget ChosenSimdTarget();

// Makes `target`, which must be supported, the target in use. Not while kernels run.
void SetSimdTargetForTest(SimdTarget target);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_SIMD_H_
