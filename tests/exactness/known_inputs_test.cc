// Inputs that broke other attention libraries, each with the right answer, on every path. The
// numbers are those of the list in tests/exactness/README.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

using ::testing::ElementsAreArray;

std::vector<float> Floats(const GuardedBuffer& buffer, DType dtype) {
  std::vector<float> x(buffer.bytes() / SizeOf(dtype));
  for (size_t n = 0; n < x.size(); ++n) x[n] = LoadElement(buffer.data(), dtype, n);
  return x;
}

class KnownInputsTest : public ::testing::TestWithParam<const Backend*> {
 protected:
  static const Backend& backend() { return *GetParam(); }
  static std::span<const Backend* const> Only() {
    static const Backend* only;
    only = GetParam();
    return {&only, 1};
  }
  static bool Takes(const Case& c) {
    const absl::StatusOr<AttentionProblem> problem = Call(c).Problem(Pass::kBackward);
    return problem.ok() && !Takers(*problem, Pass::kForward, Only()).empty() &&
           BackwardOf(backend(), *problem, Paths()) != nullptr;
  }
  // The case as the path takes it: in BF16 where it does not take FP32, with head dims in steps of
  // 8 where it takes no others. Where flash_sm90 still declines, by what it documents, the test is
  // skipped (and has to look at IsSkipped()).
  static Case Fit(Case c) {
    if (Takes(c)) return c;
    c.dtype = DType::kBf16;
    c.dim = (c.dim + 7) / 8 * 8;
    c.dim_v = (c.dim_v + 7) / 8 * 8;
    if (!Takes(c)) SkipIfDocumented(c);
    return c;
  }
  static ForwardOutputs Forward(const Call& call) {
    absl::StatusOr<ForwardOutputs> f = RunForward(backend(), call);
    EXPECT_TRUE(f.ok()) << f.status();
    return f.ok() ? *std::move(f) : ForwardOutputs{};
  }
  // Gradients from the path's own forward outputs, by whatever path runs its backward passes.
  static absl::StatusOr<BackwardOutputs> TryBackward(const Call& call, const ForwardOutputs& f) {
    const absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kBackward);
    if (!problem.ok()) return problem.status();
    const Backend* taker = BackwardOf(backend(), *problem, Paths());
    if (taker == nullptr) return absl::FailedPreconditionError("no path takes the backward pass");
    return RunBackward(*taker, call, f);
  }
  static BackwardOutputs Backward(const Call& call) {
    absl::StatusOr<BackwardOutputs> b = TryBackward(call, Forward(call));
    EXPECT_TRUE(b.ok()) << b.status();
    return b.ok() ? *std::move(b) : BackwardOutputs{};
  }

 private:
  static void SkipIfDocumented(const Case& c) {
    ASSERT_EQ(backend().path(), PathId::kFlashSm90) << "declines " << c;
    const absl::StatusOr<AttentionProblem> problem = Call(c).Problem(Pass::kForward);
    ASSERT_TRUE(problem.ok()) << problem.status();
    std::vector<Rejection> rejections;
    backend().AppendRejections(*problem, Pass::kForward, &rejections);
    ASSERT_FALSE(rejections.empty()) << "no path takes the backward pass of " << c;
    for (const Rejection& r : rejections) {
      ASSERT_TRUE(MayReject(r, *problem, Pass::kForward)) << Sentence(r) << " " << c;
    }
    GTEST_SKIP() << Sentence(rejections[0]);
  }
};

// Q = 0 and V_j = j in every channel.
Values Counting() {
  Values values;
  values.q = [](auto...) { return 0.0f; };
  values.v = [](int64_t, int64_t j, int64_t, int64_t) { return static_cast<float>(j); };
  return values;
}

Case CausalCounting(int64_t seqlen_q, int64_t seqlen_k, Alignment alignment) {
  Case c;
  c.heads = c.kv_heads = 1;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.dim = 8;
  c.dim_v = 1;
  c.causal = true;
  c.alignment = alignment;
  return c;
}

// The first channel of each row: all are alike.
std::vector<float> Rows(const ForwardOutputs& f, const Case& c) {
  const std::vector<float> all = Floats(f.out, f.dtype);
  std::vector<float> rows;
  for (size_t n = 0; n < all.size(); n += c.dim_v) {
    rows.push_back(all[n]);
    for (int64_t d = 1; d < c.dim_v; ++d) EXPECT_EQ(all[n + d], all[n]);
  }
  return rows;
}

TEST_P(KnownInputsTest, Case01CausalMoreQueriesThanKeys) {
  const Case br_case = Fit(CausalCounting(5, 2, Alignment::kBottomRight));
  if (IsSkipped()) return;
  const ForwardOutputs br = Forward(Call(br_case, Counting()));
  EXPECT_THAT(Rows(br, br_case), ElementsAreArray({0.0f, 0.0f, 0.0f, 0.0f, 0.5f}));
  const std::vector<float> lse = Floats(br.lse, DType::kFp32);
  for (int i : {0, 1, 2}) EXPECT_EQ(lse[i], -INFINITY);
  EXPECT_EQ(lse[3], 0.0f);
  EXPECT_FLOAT_EQ(lse[4], std::log(2.0f));
  const Case tl = Fit(CausalCounting(5, 2, Alignment::kTopLeft));
  EXPECT_THAT(Rows(Forward(Call(tl, Counting())), tl),
              ElementsAreArray({0.0f, 0.5f, 0.5f, 0.5f, 0.5f}));
}

TEST_P(KnownInputsTest, Case02CausalMoreKeysThanQueries) {
  const Case br = Fit(CausalCounting(2, 5, Alignment::kBottomRight));
  if (IsSkipped()) return;
  EXPECT_THAT(Rows(Forward(Call(br, Counting())), br), ElementsAreArray({1.5f, 2.0f}));
  const Case tl = Fit(CausalCounting(2, 5, Alignment::kTopLeft));
  EXPECT_THAT(Rows(Forward(Call(tl, Counting())), tl), ElementsAreArray({0.0f, 0.5f}));
}

TEST_P(KnownInputsTest, Case03RowsWithoutKeysHaveLseMinusInfinity) {
  for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    Case c;
    c.dtype = dtype;
    c.seqlen_q = 150;
    c.seqlen_k = 20;
    c.causal = true;
    if (dtype == DType::kFp32) c = Fit(c);
    const std::vector<float> lse = Floats(Forward(Call(c)).lse, DType::kFp32);
    for (int i = 0; i < 150; ++i) EXPECT_EQ(std::isinf(lse[i]), i < 130) << i;
    ExpectExact(c, Only());
  }
}

// Case04 is MergePartialsTest.EmptyWithEmptyIsEmpty.

TEST_P(KnownInputsTest, Case05PackedWithEmptySequencesBackward) {
  Case c;
  c.dtype = DType::kBf16;
  c.heads = 2;
  c.layout = Layout::kThd;
  c.lens_q = {0, 0, 1023};
  c.lens_k = {0, 1, 2045};
  const BackwardOutputs b = Backward(Call(c));
  const std::vector<float> dk = Floats(b.dk, c.dtype), dv = Floats(b.dv, c.dtype);
  for (int64_t n = 0; n < 2 * c.dim; ++n) {  // key 0 belongs to a sequence without queries
    EXPECT_EQ(dk[n], 0.0f);
    EXPECT_EQ(dv[n], 0.0f);
  }
  ExpectExact(c, Only());
}

TEST_P(KnownInputsTest, Case06PackedEmptySequencesGroupedHeads) {
  Case c;
  c.heads = 9;
  c.kv_heads = 3;
  c.layout = Layout::kThd;
  c.lens_q = {0, 1, 0, 1};
  c.lens_k = {0, 3, 0, 5};
  c = Fit(c);
  if (IsSkipped()) return;
  ExpectExact(c, Only());
}

// Padding of q, k, v, dout and dlse is NaN in every Call.
TEST_P(KnownInputsTest, Case07PaddedKeysAreNeverUsed) {
  Case c;
  c.batch = 4;
  c.seqlen_q = c.seqlen_k = 128;
  c.lens_k = {32, 64, 96, 48};
  c = Fit(c);
  const Call padded(c);
  const ForwardOutputs all = Forward(padded);
  const std::vector<float> out = Floats(all.out, c.dtype);
  for (float x : out) ASSERT_TRUE(std::isfinite(x));
  const std::vector<float> dk = Floats(Backward(padded).dk, c.dtype);
  for (int64_t b = 0; b < 4; ++b) {
    for (int64_t j = c.lens_k[b]; j < 128; ++j) EXPECT_EQ(dk[(b * 128 + j) * 2 * c.dim], 0.0f);
  }
  ExpectExact(c, Only());
  // The first sequence alone, without padding.
  Case alone = c;
  alone.batch = 1;
  alone.seqlen_k = 32;
  alone.lens_k.clear();
  const std::vector<float> want = Floats(Forward(Call(alone)).out, c.dtype);
  for (size_t n = 0; n < want.size(); ++n) {
    // BF16: out and the probabilities of either are rounded, 2^-9 each; values are about 1.
    const double limit = c.dtype == DType::kFp32 ? 1e-6 : std::ldexp(1 + std::abs(want[n]), -8);
    ASSERT_NEAR(out[n], want[n], limit) << n;
  }
}

TEST_P(KnownInputsTest, Case08HeadsInOneCall) {
  Case c;
  c.heads = c.kv_heads = 71280;
  c.seqlen_q = c.seqlen_k = 2;
  c.dim = c.dim_v = 8;
  c = Fit(c);
  if (IsSkipped()) return;
  ExpectExact(c, Only());
}

TEST_P(KnownInputsTest, Case08Batch) {
  for (int64_t batch : {65536, 65537}) {
    Case c;
    c.dtype = DType::kFp16;
    c.batch = batch;
    c.heads = c.kv_heads = 1;
    c.seqlen_q = 1;
    c.seqlen_k = 2;
    c.dim = c.dim_v = 8;
    c = Fit(c);
    if (IsSkipped()) return;
    ExpectExact(c, Only());
  }
}

TEST_P(KnownInputsTest, Case09WindowRightZeroIsCausal) {
  Case causal;
  causal.seqlen_q = 130;
  causal.seqlen_k = 150;
  causal.causal = true;
  causal = Fit(causal);
  Case window = causal;
  window.causal = false;
  window.window_right = 0;
  EXPECT_TRUE(Forward(Call(causal)).out == Forward(Call(window)).out);
  EXPECT_TRUE(Backward(Call(causal)).dk == Backward(Call(window)).dk);
  ExpectExact(window, Only());
}

TEST_P(KnownInputsTest, Case11DeterministicThirtyTimes) {
  for (DType dtype : {DType::kFp32, DType::kBf16}) {
    Case c;
    c.dtype = dtype;
    c.batch = 2;
    c.heads = 6;
    c.kv_heads = 2;
    c.seqlen_q = 190;
    c.seqlen_k = 260;
    c.causal = c.deterministic = true;
    c.bias = BiasShape::kSharedBoth;
    c.sinks = true;
    if (dtype == DType::kFp32) c = Fit(c);
    const Call call(c);
    const ForwardOutputs forward = Forward(call);
    const absl::StatusOr<BackwardOutputs> first = TryBackward(call, forward);
    ASSERT_TRUE(first.ok());
    for (int run = 1; run < 30; ++run) {
      const absl::StatusOr<BackwardOutputs> again = TryBackward(call, forward);
      ASSERT_TRUE(again.ok());
      ASSERT_TRUE(again->dq == first->dq && again->dk == first->dk && again->dv == first->dv)
          << "run " << run;
      ASSERT_TRUE(again->dbias == first->dbias && again->dsink == first->dsink) << "run " << run;
      ASSERT_TRUE(Forward(call).out == forward.out) << "run " << run;
    }
  }
}

TEST_P(KnownInputsTest, Case12LossOfLseAlone) {
  Case c;
  c.heads = c.kv_heads = 1;
  c.seqlen_q = 3;
  c.seqlen_k = 70;
  c.dim = c.dim_v = 16;
  c.causal = c.dlse = true;
  c = Fit(c);
  if (IsSkipped()) return;
  const bool fp32 = c.dtype == DType::kFp32;
  Values values = Counting();
  values.k = [fp32](int64_t, int64_t j, int64_t, int64_t d) {
    const float x = std::sin(0.1f * j + d);
    return fp32 ? x : Bf16ToFloat(FloatToBf16(x));
  };
  values.dout = [](auto...) { return 0.0f; };
  values.dlse = [](auto...) { return 1.0f; };
  const std::vector<float> dq = Floats(Backward(Call(c, values)).dq, c.dtype);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t d = 0; d < 16; ++d) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t j = 0; j < 68 + i; ++j) {
        sum += values.k(0, j, 0, d);
        magnitude += std::abs(values.k(0, j, 0, d));
      }
      const double want = 0.25 * sum / (68 + i);
      // BF16: the rule's bound here, u |dq| + scale sum of w |k| with w = 2 u p.
      const double limit =
          fp32 ? 1e-6 : std::ldexp(std::abs(want) + 0.25 * 2 * magnitude / (68 + i), -8);
      EXPECT_NEAR(dq[i * 16 + d], want, limit);
    }
  }
  ExpectExact(c, Only(), values);
}

TEST_P(KnownInputsTest, Case13TensorsOfTheSecondGpu) {
  GTEST_SKIP() << "needs two CUDA devices and a CUDA path; CPU paths have no device";
}

TEST_P(KnownInputsTest, Case14HeadDims) {
  for (auto [d, dv] : {std::pair{72, 72},
                       {88, 88},
                       {112, 112},
                       {128, 96},
                       {20, 20},
                       {33, 33},
                       {100, 100},
                       {264, 264}}) {
    Case c;
    c.dtype = DType::kBf16;
    c.seqlen_q = c.seqlen_k = 100;
    c.dim = d;
    c.dim_v = dv;
    c.causal = true;
    const Call call(c);
    std::vector<Rejection> rejections;
    backend().AppendRejections(*call.Problem(Pass::kForward), Pass::kForward, &rejections);
    if (rejections.empty()) {
      ExpectExact(c, Only());
    } else {
      EXPECT_TRUE(MayReject(rejections[0], *call.Problem(Pass::kForward), Pass::kForward))
          << Sentence(rejections[0]);
      EXPECT_EQ(rejections[0].reason, Reason::kHeadDimUnsupported);
      EXPECT_THAT(rejections[0].detail, ::testing::HasSubstr(absl::StrCat(d)));
    }
  }
}

TEST_P(KnownInputsTest, Case19AllMaskedBlockRow) {
  Case c;
  c.seqlen_q = c.seqlen_k = 256;
  c.block_mask = true;
  c = Fit(c);
  Values values;
  values.block_mask = [](int64_t, int64_t, int64_t r, int64_t) { return r != 1; };
  const Call call(c, values);
  const ForwardOutputs f = Forward(call);
  const std::vector<float> out = Floats(f.out, c.dtype), lse = Floats(f.lse, DType::kFp32),
                           dq = Floats(Backward(call).dq, c.dtype);
  for (int64_t i = 64; i < 128; ++i) {
    EXPECT_EQ(lse[i], -INFINITY);
    for (int64_t n = 0; n < 2 * 64; ++n) {
      EXPECT_EQ(out[i * 128 + n], 0.0f);
      EXPECT_EQ(dq[i * 128 + n], 0.0f);
    }
  }
  ExpectExact(c, Only(), values);
}

TEST_P(KnownInputsTest, Case20OneLogitFarAboveTheRest) {
  for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    Case c;
    c.dtype = dtype;
    c.heads = c.kv_heads = 1;
    c.seqlen_q = c.seqlen_k = 200;
    c.dim = c.dim_v = 128;
    c.numbers = Numbers::kSpike;
    if (!Takes(c)) continue;
    Values values;
    values.v = [](int64_t, int64_t j, int64_t, int64_t d) { return ((j * 7 + d) % 31) * 0.125f; };
    const Call call(c, values);
    const std::vector<float> out = Floats(Forward(call).out, dtype);
    for (size_t n = 0; n < out.size(); ++n) {
      ASSERT_EQ(out[n], values.v(0, 100, 0, static_cast<int64_t>(n) % 128)) << n;
    }
    const BackwardOutputs b = Backward(call);
    for (const GuardedBuffer* x : {&b.dq, &b.dk, &b.dv}) {
      for (float e : Floats(*x, dtype)) ASSERT_TRUE(std::isfinite(e));
    }
    ExpectExact(c, Only(), values);
  }
}

// A NaN is no missing key: rows that see it are NaN, and others are as without it.
TEST_P(KnownInputsTest, NanInAKeyShowsInTheRowsThatSeeIt) {
  constexpr int64_t kNan = 70;
  const Case c = Fit(CausalCounting(200, 200, Alignment::kBottomRight));
  if (IsSkipped()) return;
  Values values = Counting();
  values.k = [](int64_t, int64_t j, int64_t, int64_t) { return j == kNan ? std::nanf("") : 0.0f; };
  const Call call(c, values);
  const ForwardOutputs f = Forward(call);
  const std::vector<float> lse = Floats(f.lse, DType::kFp32);
  const std::vector<float> out = Floats(f.out, f.dtype);
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    const float first = out[i * c.dim_v];
    if (i >= kNan) {
      EXPECT_TRUE(std::isnan(first)) << i << ": " << first;
      EXPECT_TRUE(std::isnan(lse[i])) << i << ": " << lse[i];
    } else {
      EXPECT_NEAR(first, static_cast<float>(i) / 2, 0.25f) << i;
      EXPECT_NEAR(lse[i], std::log(static_cast<float>(i + 1)), 1e-4f) << i;
    }
  }
}

TEST_P(KnownInputsTest, Case21PaddedSelfAttention) {
  Case c;
  c.batch = 2;
  c.seqlen_q = c.seqlen_k = 8;
  c.lens_q = c.lens_k = {5, 3};
  c.causal = c.dlse = true;
  c = Fit(c);
  if (IsSkipped()) return;
  const Call call(c);
  const std::vector<float> lse = Floats(Forward(call).lse, DType::kFp32);
  EXPECT_EQ(lse[5], -INFINITY);
  const BackwardOutputs b = Backward(call);
  for (const GuardedBuffer* x : {&b.dk, &b.dv}) {
    for (float e : Floats(*x, c.dtype)) ASSERT_TRUE(std::isfinite(e));
  }
  ExpectExact(c, Only());
}

// Case22 is ProbeTest, which looks at every key rather than at the first and the last.
// Case23 is MergeTest.SinkInTwoPartsCountsTwice, and PartsEqualTheWhole for the right use.

INSTANTIATE_TEST_SUITE_P(Path, KnownInputsTest, ::testing::ValuesIn(Paths()),
                         [](const auto& info) { return std::string(Name(info.param->path())); });

// ------------------------------------------------------------------- refused by name

AttentionSpec ValidSpec(Layout layout = Layout::kBshd) {
  AttentionSpec spec;
  spec.layout = layout;
  spec.num_heads = spec.num_kv_heads = 4;
  const std::vector<int64_t> shape =
      layout == Layout::kBshd ? std::vector<int64_t>{2, 16, 4, 8} : std::vector<int64_t>{32, 4, 8};
  spec.q.shape = spec.k.shape = spec.v.shape = shape;
  if (layout == Layout::kThd) spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 10, 32};
  return spec;
}

void ExpectRefused(const AttentionSpec& spec, std::vector<std::string> words) {
  const absl::StatusOr<AttentionProblem> problem = Validate(spec, Pass::kForward);
  ASSERT_EQ(problem.status().code(), absl::StatusCode::kInvalidArgument) << problem.status();
  for (const std::string& word : words) {
    EXPECT_THAT(std::string(problem.status().message()), ::testing::HasSubstr(word));
  }
}

TEST(RefusedInputsTest, ValidSpecIsAccepted) {
  EXPECT_TRUE(Validate(ValidSpec(), Pass::kForward).ok());
  EXPECT_TRUE(Validate(ValidSpec(Layout::kThd), Pass::kForward).ok());
}

TEST(RefusedInputsTest, Case10NegativeWindow) {
  AttentionSpec spec = ValidSpec();
  spec.window_left = -1;
  ExpectRefused(spec, {"window_left", "-1"});
  spec.window_left.reset();
  spec.window_right = -1;
  ExpectRefused(spec, {"window_right", "-1"});
}

TEST(RefusedInputsTest, Case15SeqlenOfVDiffersFromK) {
  AttentionSpec spec = ValidSpec();
  spec.v.shape = {2, 17, 4, 8};
  ExpectRefused(spec, {"v.shape[1]", "17", "k.shape[1]", "16"});
}

TEST(RefusedInputsTest, Case16HeadsAndSeqlenSwapped) {
  AttentionSpec spec = ValidSpec();
  spec.q.shape = spec.k.shape = spec.v.shape = {2, 4, 16, 8};
  ExpectRefused(spec, {"q.shape[2]", "16", "num_heads", "4"});
}

TEST(RefusedInputsTest, Case17CuSeqlens) {
  AttentionSpec spec = ValidSpec(Layout::kThd);
  spec.cu_seqlens_q = {1, 10, 32};
  ExpectRefused(spec, {"cu_seqlens_q[0]", "1"});
  spec.cu_seqlens_q = {0, 33, 32};
  ExpectRefused(spec, {"cu_seqlens_q[2]", "32", "33"});
  spec.cu_seqlens_q = {0, 10, 31};
  ExpectRefused(spec, {"cu_seqlens_q[2]", "31", "32"});
  spec.cu_seqlens_q = {0, 10, 32};
  spec.cu_seqlens_k = {0, 40, 32};
  ExpectRefused(spec, {"cu_seqlens_k[2]", "32", "40"});
}

}  // namespace
}  // namespace attn::exactness
