// Chooses at run time between the per-target copies of a function that Highway's foreach_target.h
// makes. For the HWY_ONCE part of a SIMD source file.
#ifndef ATTN_KERNELS_CPU_SIMD_DISPATCH_H_
#define ATTN_KERNELS_CPU_SIMD_DISPATCH_H_

#include <array>
#include <cstddef>

#include "kernels/cpu/simd.h"

namespace attn {

// One function per SimdTarget. A target that was not compiled (another architecture, or a build
// whose baseline is higher) takes the next slower one; the baseline is always there.
template <class Function>
class SimdTable {
 public:
  constexpr SimdTable(Function baseline, Function sse4, Function avx2, Function avx3)
      : functions_{baseline, sse4, avx2, avx3} {
    for (size_t i = 1; i < functions_.size(); ++i) {
      if (functions_[i] == nullptr) functions_[i] = functions_[i - 1];
    }
  }
  Function Get() const { return functions_[static_cast<size_t>(ChosenSimdTarget())]; }

 private:
  std::array<Function, 4> functions_;
};

}  // namespace attn

// Defines k<function>Table in the current namespace; k<function>Table.Get()(…) calls.
#define ATTN_SIMD_TABLE(function)                                                           \
  constexpr ::attn::SimdTable<decltype(&HWY_STATIC_DISPATCH(function))> k##function##Table( \
      HWY_CHOOSE_FALLBACK(function), HWY_CHOOSE_SSE4(function), HWY_CHOOSE_AVX2(function),  \
      HWY_CHOOSE_AVX3(function))

#endif  // ATTN_KERNELS_CPU_SIMD_DISPATCH_H_
