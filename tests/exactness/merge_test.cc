// Partial results over disjoint keys, merged, equal the whole.
#include "kernels/api/merge.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

constexpr int64_t kQueries = 40, kKeys = 200, kBounds[] = {0, 96, 160, 200};

struct Variant {
  const char* name;
  void (*apply)(Case& c);
};

void PrintTo(const Variant& variant, std::ostream* os) { *os << variant.name; }

class MergeTest : public ::testing::TestWithParam<std::tuple<Variant, DType>> {
 protected:
  static Case Whole() {
    Case c;
    c.dtype = std::get<1>(GetParam());
    c.batch = 2;
    c.heads = 4;
    c.seqlen_q = kQueries;
    c.seqlen_k = kKeys;
    c.out_fp32 = true;
    c.seed = 77;
    std::get<0>(GetParam()).apply(c);
    return c;
  }

  // Keys `begin` … `end` - 1 of the whole. Causal rows start within the last part, so only that
  // part is causal.
  static Call Part(int64_t begin, int64_t end, bool sinks) {
    Case c = Whole();
    c.seqlen_k = end - begin;
    c.causal = c.causal && end == kKeys;
    c.sinks = sinks;
    return Call(c, PartValues(begin));
  }

  static Values PartValues(int64_t begin) {
    const Case whole = Whole();
    Values values;
    values.k = [=](int64_t b, int64_t j, int64_t h, int64_t d) {
      return Gauss(1, 1, Mix(b * 4 + h) + (begin + j) * 1024 + d);
    };
    values.v = [=](int64_t b, int64_t j, int64_t h, int64_t d) {
      return Gauss(1, 2, Mix(b * 4 + h) + (begin + j) * 1024 + d);
    };
    values.bias = [=](int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t key = begin + j;
      // Row 3 sees nothing; row 5 sees nothing in the first part.
      if (i == 3 || (i == 5 && key < kBounds[1]) || (i + key) % 7 == 0) return -INFINITY;
      return Gauss(1, 3, Mix(b * 4 + h) + i * 1024 + key);
    };
    return values;
  }

  // The paths that take the parts; at least one does.
  static std::vector<const Backend*> Takers(const Call& whole) {
    const absl::StatusOr<AttentionProblem> problem = whole.Problem(Pass::kForward);
    EXPECT_TRUE(problem.ok()) << problem.status();
    std::vector<const Backend*> takers = exactness::Takers(*problem, Pass::kForward, Paths());
    EXPECT_FALSE(takers.empty());
    return takers;
  }

  static ForwardOutputs Run(const Backend& backend, const Call& call) {
    absl::StatusOr<ForwardOutputs> out = RunForward(backend, call);
    EXPECT_TRUE(out.ok()) << out.status();
    return *std::move(out);
  }

  // lse is [batch, heads, seqlen]; the rows of out are [batch, seqlen, heads].
  static std::vector<float> ByRowOfOut(const ForwardOutputs& f, const Case& c) {
    std::vector<float> lse(c.batch * c.seqlen_q * c.heads);
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t i = 0; i < c.seqlen_q; ++i) {
          lse[(b * c.seqlen_q + i) * c.heads + h] =
              LoadElement(f.lse.data(), DType::kFp32, (b * c.heads + h) * c.seqlen_q + i);
        }
      }
    }
    return lse;
  }

  // Parts of all keys, merged; `sinks_in` parts carry the sink. In the layout of forward outputs.
  static ForwardOutputs Merged(const Backend& backend, int sinks_in) {
    const Case whole = Whole();
    std::vector<ForwardOutputs> outs;
    std::vector<std::vector<float>> lses;
    std::vector<PartialResult> parts;
    for (int n = 0; n < 3; ++n) {
      outs.push_back(Run(backend, Part(kBounds[n], kBounds[n + 1], whole.sinks && n < sinks_in)));
      lses.push_back(ByRowOfOut(outs.back(), whole));
    }
    for (int n = 0; n < 3; ++n) {
      parts.push_back({reinterpret_cast<const float*>(outs[n].out.data()), lses[n].data()});
    }
    const int64_t rows = whole.batch * whole.seqlen_q * whole.heads;
    ForwardOutputs merged{DType::kFp32, GuardedBuffer(rows * whole.dim_v * 4),
                          GuardedBuffer(rows * 4)};
    std::vector<float> lse(rows);
    const absl::Status status = MergePartials(
        parts, rows, whole.dim_v, reinterpret_cast<float*>(merged.out.data()), lse.data());
    EXPECT_TRUE(status.ok()) << status;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t b = row / (kQueries * whole.heads), i = row / whole.heads % kQueries;
      StoreElement(merged.lse.data(), DType::kFp32,
                   (b * whole.heads + row % whole.heads) * kQueries + i, lse[row]);
    }
    return merged;
  }
};

TEST_P(MergeTest, PartsEqualTheWhole) {
  const Call whole(Whole(), PartValues(0));
  const reference::Result want = reference::Compute(whole.spec(), whole.data());
  for (const Backend* backend : Takers(whole)) {
    const ForwardOutputs merged = Merged(*backend, 1);
    EXPECT_TRUE(merged.out.GuardsIntact());
    const std::string who(Name(backend->path()));
    for (const Fault& f : CheckForward(want, merged, who + " merged")) {
      ADD_FAILURE() << f.what << ": " << f.details;
    }
  }
}

// A sink belongs to one part; in two of them it counts twice in the denominator, as documented.
TEST_P(MergeTest, SinkInTwoPartsCountsTwice) {
  if (!Whole().sinks) GTEST_SKIP() << "no sink";
  const Call whole(Whole(), PartValues(0));
  const reference::Result want = reference::Compute(whole.spec(), whole.data());
  for (const Backend* backend : Takers(whole)) {
    const ForwardOutputs twice = Merged(*backend, 2);
    const double sink = whole.data().sinks[0];
    const float got = LoadElement(twice.lse.data(), DType::kFp32, 0);
    EXPECT_NEAR(got, std::log(std::exp(want.lse.value[0]) + std::exp(sink)), 1e-4);
    EXPECT_GT(got, want.lse.value[0] + 1e-4) << "the sink must matter in this test";
  }
}

const Variant kVariants[] = {
    {"Plain", [](Case&) {}},
    {"Causal", [](Case& c) { c.causal = true; }},
    {"BiasHides", [](Case& c) { c.bias = BiasShape::kFull; }},
    {"Sinks", [](Case& c) { c.sinks = true, c.scale = 0.02f; }},
    {"SinksAndHiddenRows", [](Case& c) { c.sinks = true, c.bias = BiasShape::kFull; }},
    {"Softcap", [](Case& c) { c.softcap = 3.0f; }},
};

INSTANTIATE_TEST_SUITE_P(Variant, MergeTest,
                         ::testing::Combine(::testing::ValuesIn(kVariants),
                                            ::testing::Values(DType::kFp32, DType::kFp16,
                                                              DType::kBf16)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + std::string("_") +
                                  std::string(LowerName(std::get<1>(info.param)));
                         });

// Case 4 of the cases that broke other libraries.
TEST(MergePartialsTest, EmptyWithEmptyIsEmpty) {
  const float zeros[4] = {0, 0, 0, 0}, lse[2] = {-INFINITY, -INFINITY};
  float out[4] = {1, 2, 3, 4}, merged[2] = {0, 0};
  const PartialResult parts[] = {{zeros, lse}, {zeros, lse}};
  ASSERT_TRUE(MergePartials(parts, 2, 2, out, merged).ok());
  for (float x : out) EXPECT_EQ(x, 0.0f);
  for (float x : merged) EXPECT_EQ(x, -INFINITY);
}

}  // namespace
}  // namespace attn::exactness
