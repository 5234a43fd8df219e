// Gemm() against double precision, on every SIMD target of this machine.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"

namespace attn {
namespace {

class GemmTest : public ::testing::TestWithParam<SimdTarget> {
 protected:
  GemmTest() : chosen_(ChosenSimdTarget()) { SetSimdTargetForTest(GetParam()); }
  ~GemmTest() override { SetSimdTargetForTest(chosen_); }

 private:
  const SimdTarget chosen_;
};

constexpr float kGuard = 12345.0f;

void CheckProduct(std::mt19937& rng, int64_t m, int64_t n, int64_t k, bool transposed_a,
                  GemmOutput output) {
  std::uniform_int_distribution<int64_t> gap(0, 5);
  std::normal_distribution<float> normal;
  const int64_t lda = (transposed_a ? m : k) + gap(rng), ldb = n + gap(rng), ldc = n + gap(rng);
  // Exactly as long as the operands reach, so that a sanitizer sees any read beyond.
  const auto reach = [](int64_t rows, int64_t cols, int64_t ld) {
    return rows == 0 || cols == 0 ? int64_t{0} : (rows - 1) * ld + cols;
  };
  std::vector<float> a(reach(transposed_a ? k : m, transposed_a ? m : k, lda));
  std::vector<float> b(reach(k, n, ldb)), scale(n);
  std::vector<float> c(m * ldc, kGuard);
  for (auto* x : {&a, &b, &scale}) {
    for (float& value : *x) value = normal(rng);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      c[i * ldc + j] =
          output == GemmOutput::kStore ? std::numeric_limits<float>::quiet_NaN() : normal(rng);
    }
  }
  const std::vector<float> before = c;
  const GemmLeft left{a.data(), transposed_a ? 1 : lda, transposed_a ? lda : 1};
  Gemm(m, n, k, left, b.data(), ldb, c.data(), ldc, output,
       output == GemmOutput::kScaleAdd ? scale.data() : nullptr);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < ldc; ++j) {
      if (j >= n) {
        ASSERT_EQ(c[i * ldc + j], kGuard) << "written beyond column " << n;
        continue;
      }
      double sum = 0, magnitude = 0;
      for (int64_t e = 0; e < k; ++e) {
        const double term = static_cast<double>(a[i * left.row_stride + e * left.k_stride]) *
                            static_cast<double>(b[e * ldb + j]);
        sum += term;
        magnitude += std::abs(term);
      }
      const double old = before[i * ldc + j];
      if (output == GemmOutput::kAdd) sum += old;
      if (output == GemmOutput::kScaleAdd) sum += old * static_cast<double>(scale[j]);
      if (output != GemmOutput::kStore) magnitude += std::abs(old) * (1 + std::abs(scale[j]));
      const double bound = std::ldexp(magnitude * (2 + std::sqrt(static_cast<double>(k))), -23);
      ASSERT_NEAR(c[i * ldc + j], sum, bound + 1e-30)
          << "m " << m << " n " << n << " k " << k << " at " << i << ", " << j;
    }
  }
}

TEST_P(GemmTest, MatchesDoublePrecisionOnAnyExtentAndStride) {
  std::mt19937 rng(1);
  const GemmOutput outputs[] = {GemmOutput::kStore, GemmOutput::kAdd, GemmOutput::kScaleAdd};
  for (int64_t m : {1, 2, 5, 6, 7, 8, 9, 13, 31}) {
    for (int64_t n : {1, 3, 7, 16, 17, 31, 33, 48, 63, 64, 65, 80, 129}) {
      for (int64_t k : {0, 1, 2, 3, 17, 64, 100}) {
        const uint32_t pick = rng();
        CheckProduct(rng, m, n, k, pick % 2 == 0, outputs[pick / 2 % 3]);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(GemmTest, TakesEmptyExtents) {
  Gemm(0, 5, 3, {nullptr, 3, 1}, nullptr, 5, nullptr, 5, GemmOutput::kStore);
  Gemm(5, 0, 3, {nullptr, 3, 1}, nullptr, 0, nullptr, 0, GemmOutput::kStore);
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, GemmTest, ::testing::ValuesIn(SupportedSimdTargets()),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace attn
