#include "kernels/cpu/simd.h"

#include <atomic>

namespace attn {
namespace {

SimdTarget Detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd")) {
    return SimdTarget::kAvx3;
  }
  if (avx2) return SimdTarget::kAvx2;
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    return SimdTarget::kSse4;
  }
#endif
  return SimdTarget::kBaseline;
}

std::atomic<SimdTarget>& Chosen() {
  static std::atomic<SimdTarget> target{Detect()};
  return target;
}

}  // namespace

std::string_view Name(SimdTarget target) {
  switch (target) {
    case SimdTarget::kBaseline:
      return "baseline";
    case SimdTarget::kSse4:
      return "sse4";
    case SimdTarget::kAvx2:
      return "avx2";
    case SimdTarget::kAvx3:
      return "avx3";
  }
  return "unknown";
}

std::vector<SimdTarget> SupportedSimdTargets() {
  std::vector<SimdTarget> targets;
  const SimdTarget best = Detect();
  for (SimdTarget target :
       {SimdTarget::kBaseline, SimdTarget::kSse4, SimdTarget::kAvx2, SimdTarget::kAvx3}) {
    if (target <= best) targets.push_back(target);
  }
  return targets;
}

SimdTarget ChosenSimdTarget() { return Chosen().load(std::memory_order_relaxed); }

void SetSimdTargetForTest(SimdTarget target) { Chosen().store(target); }

}  // namespace attn
