#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "kernels/api/spec.h"
#include "kernels/cuda/standard/plan.h"
#include "kernels/cuda/standard/product.h"
#include "kernels/cuda/standard/standard_cuda.h"
#include "tests/unit/api_test_util.h"

namespace attn::cuda::standard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

AttentionProblem Valid(const AttentionSpec& spec, Pass pass = Pass::kForward) {
  absl::StatusOr<AttentionProblem> problem = Validate(spec, pass);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return *std::move(problem);
}

std::vector<std::pair<int64_t, int64_t>> Runs(const AttentionProblem& p) {
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (const SequenceRun& run : FindRuns(p)) runs.emplace_back(run.first, run.count);
  return runs;
}

TEST(StandardPlanTest, SequencesOfTheSameLengthsAreOneRun) {
  AttentionSpec spec = BshdSpec({.batch = 6});
  EXPECT_THAT(Runs(Valid(spec)), ElementsAre(std::pair(0, 6)));
  spec.seqlens_q = {5, 5, 0, 4, 4, 4};
  spec.seqlens_k = {7, 7, 7, 7, 0, 0};
  EXPECT_THAT(Runs(Valid(spec)), ElementsAre(std::pair(0, 2), std::pair(3, 1), std::pair(4, 2)));
}

TEST(StandardPlanTest, AnEmptySequenceEndsARun) {
  const AttentionProblem p = Valid(ThdSpec({3, 3, 0, 3, 2}, {4, 4, 9, 4, 4}));
  EXPECT_THAT(Runs(p), ElementsAre(std::pair(0, 2), std::pair(3, 1), std::pair(4, 1)));
  EXPECT_TRUE(HasIdleRows(p));
}

TEST(StandardPlanTest, SequencesWithoutQueriesHaveNoRun) {
  AttentionSpec spec = BshdSpec({.batch = 2});
  spec.seqlens_q = {0, 0};
  EXPECT_THAT(Runs(Valid(spec)), IsEmpty());
}

// Every (sequence, query head) of a plan's chunks, with how often it occurs.
std::map<std::pair<int64_t, int64_t>, int> Covered(const AttentionProblem& p, const Plan& plan) {
  std::map<std::pair<int64_t, int64_t>, int> covered;
  for (const SequenceRun& run : FindRuns(p)) {
    for (const Chunk& c : plan.Chunks(run)) {
      for (int64_t n = 0; n < c.matrices(); ++n) {
        const int64_t g = n % c.group_heads, kv = n / c.group_heads % c.kv_heads;
        const int64_t head = (c.kv0 + kv) * p.group() + c.group0 + g;
        ++covered[{c.batch0 + n / c.group_heads / c.kv_heads, head}];
      }
    }
  }
  return covered;
}

TEST(StandardPlanTest, ChunksCoverEveryHeadOnceWithinTheLimit) {
  std::mt19937_64 random(11);
  const auto below = [&random](uint64_t n) { return static_cast<int64_t>(random() % n); };
  int split_groups = 0, whole = 0, refused = 0;
  for (int n = 0; n < 3000; ++n) {
    const int64_t kv = 1 + below(4), group = 1 + below(5);
    AttentionSpec spec = BshdSpec({.batch = 1 + below(5),
                                   .seqlen_q = 1 + below(90),
                                   .seqlen_k = 1 + below(90),
                                   .num_heads = kv * group,
                                   .num_kv_heads = kv,
                                   .head_dim = 8 * (1 + below(8))},
                                  below(2) == 0 ? DType::kFp32 : DType::kBf16);
    spec.v.shape[3] = spec.q.shape[3];
    if (below(2) == 0) {
      for (int64_t b = 0; b < spec.q.shape[0]; ++b) {
        spec.seqlens_q.push_back(below(spec.q.shape[1] + 1));
        spec.seqlens_k.push_back(below(spec.k.shape[1] + 1));
      }
    }
    if (below(3) == 0) spec.bias = Shape({1, 1, spec.q.shape[1], spec.k.shape[1]});
    if (below(3) == 0) spec.softcap = 2.0f;
    const Pass pass = below(2) == 0 ? Pass::kForward : Pass::kBackward;
    const AttentionProblem p = Valid(spec, pass);
    const int64_t least = Plan(p, pass, 0).bytes();
    const int64_t limit = least + (below(4) == 0 ? 0 : below(int64_t{1} << (8 + below(16))));
    const Plan plan(p, pass, limit);
    ASSERT_TRUE(plan.fits()) << plan.bytes() << " > " << limit;
    refused += !Plan(p, pass, least - 1).fits();
    int64_t heads = 0;
    for (const Sequence& s : p.sequences) heads += s.len_q > 0 ? p.num_heads : 0;
    const auto covered = Covered(p, plan);
    ASSERT_EQ(static_cast<int64_t>(covered.size()), heads);
    for (const auto& [head, count] : covered) ASSERT_EQ(count, 1);
    for (const SequenceRun& run : FindRuns(p)) {
      for (const Chunk& c : plan.Chunks(run)) {
        const int64_t end = plan.chunk_at() + plan.ScoreBytes(c) * ScoreMatrices(p, pass) +
                            plan.DkBytes(c) + plan.DvBytes(c) + plan.OutBytes(c) +
                            plan.FactorBytes(c);
        ASSERT_LE(end, plan.bytes());
        // Accumulators of dk and dv stay in place only if a split group is a chunk of its own.
        if (c.group_heads < p.group()) {
          ASSERT_EQ(c.batch * c.kv_heads, 1);
        }
        split_groups += c.group_heads < p.group();
        whole += c.batch > 1;
      }
    }
  }
  EXPECT_EQ(refused, 3000);
  EXPECT_GT(split_groups, 100);
  EXPECT_GT(whole, 100);
}

TEST(StandardPlanTest, ChunksOfARunAreEvenAndAsFewAsFit) {
  const AttentionProblem p = Valid(
      BshdSpec({.batch = 10, .seqlen_q = 64, .seqlen_k = 64, .num_heads = 2, .num_kv_heads = 2}));
  constexpr int64_t kSequence = 2 * 64 * (64 + 1) * 4;  // scores and factors of two heads
  // Four sequences and a bit, and nothing for cuBLAS beyond that bit.
  const Plan plan(p, Pass::kForward, kSequence / 2 + 1280 + (4 * kSequence) * 4 / 3);
  std::vector<int64_t> sizes;
  for (const Chunk& c : plan.Chunks(FindRuns(p)[0])) sizes.push_back(c.batch);
  EXPECT_THAT(sizes, ElementsAre(4, 4, 2));
}

TEST(StandardPlanTest, MatricesOfALaunchStayWithinAGrid) {
  const AttentionProblem p = Valid(
      BshdSpec({.batch = 65537, .seqlen_q = 1, .seqlen_k = 1, .num_heads = 1, .num_kv_heads = 1}));
  const Plan plan(p, Pass::kForward, int64_t{1} << 40);
  for (const Chunk& c : plan.Chunks(FindRuns(p)[0])) EXPECT_LE(c.matrices(), 65535);
  const AttentionProblem heads = Valid(
      BshdSpec({.batch = 2, .seqlen_q = 1, .seqlen_k = 1, .num_heads = 140000, .num_kv_heads = 1}));
  const Plan by_heads(heads, Pass::kForward, int64_t{1} << 40);
  for (const Chunk& c : by_heads.Chunks(FindRuns(heads)[0])) EXPECT_LE(c.matrices(), 65535);
  EXPECT_EQ(Covered(heads, by_heads).size(), 280000u);
}

TEST(StandardPlanTest, AbsurdShapesSaturateInsteadOfOverflowing) {
  const AttentionProblem p = Valid(BshdSpec({.batch = 1,
                                             .seqlen_q = int64_t{1} << 39,
                                             .seqlen_k = int64_t{1} << 39,
                                             .num_heads = 1,
                                             .num_kv_heads = 1,
                                             .head_dim = 8,
                                             .head_dim_v = 8}));
  const Plan plan(p, Pass::kForward, int64_t{1} << 40);
  EXPECT_FALSE(plan.fits());
  EXPECT_GT(plan.bytes(), int64_t{1} << 62);
  EXPECT_GT(Model(p, Pass::kForward).bytes(), uint64_t{1} << 63);
}

TEST(StandardPlanTest, WorkspaceLimitNamesValueAndLimit) {
  const AttentionProblem p = Valid(
      BshdSpec({.batch = 1, .seqlen_q = 100, .seqlen_k = 100, .num_heads = 1, .num_kv_heads = 1}));
  DeviceProperties device;
  device.major = 9;
  std::vector<Rejection> rejections;
  MakeStandardCudaPath(4096)->AppendRejections(p, Pass::kForward, device, &rejections);
  // 100 rows of 104 fp32 scores and a factor, and what aligning the parts can take.
  EXPECT_THAT(rejections, ElementsAre(Rejection{PathId::kStandardCuda, Reason::kWorkspaceLimit,
                                                "workspace of one head 43280 bytes > 4096 bytes"}));
  rejections.clear();
  MakeStandardCudaPath(43280)->AppendRejections(p, Pass::kForward, device, &rejections);
  EXPECT_THAT(rejections, IsEmpty());
}

TEST(StandardPlanTest, OldDevicesAreRefused) {
  DeviceProperties device;
  device.major = 7;
  device.minor = 5;
  std::vector<Rejection> rejections;
  MakeStandardCudaPath()->AppendRejections(Valid(BshdSpec()), Pass::kForward, device, &rejections);
  EXPECT_THAT(rejections, ElementsAre(Rejection{PathId::kStandardCuda, Reason::kArchUnsupported,
                                                "compute capability 7.5 < 8.0"}));
}

TEST(StandardPlanTest, DbiasIsSharedOverBroadcastAxes) {
  AttentionSpec spec = BshdSpec();
  const auto sums = [&spec](int64_t batch, int64_t heads) {
    spec.bias = Shape({batch, heads, 5, 7});
    const AttentionProblem p = Valid(spec);
    return std::pair(DbiasSumsBatch(p), DbiasSumsHeads(p));
  };
  EXPECT_EQ(sums(2, 4), std::pair(false, false));
  EXPECT_EQ(sums(1, 4), std::pair(true, false));
  EXPECT_EQ(sums(2, 1), std::pair(false, true));
  EXPECT_EQ(sums(1, 1), std::pair(true, true));
  spec.softcap = 1.0f;
  EXPECT_EQ(ScoreMatrices(Valid(spec), Pass::kBackward), 3);
  spec.softcap.reset();
  EXPECT_EQ(ScoreMatrices(Valid(spec), Pass::kBackward), 2);
}

// The traffic of GPT-2 medium's attention, per head: 1024 queries and keys, head_dim 64, fp16.
TEST(StandardModelTest, CountsEveryPassOverTheScores) {
  AttentionSpec spec = BshdSpec({.batch = 64,
                                 .seqlen_q = 1024,
                                 .seqlen_k = 1024,
                                 .num_heads = 16,
                                 .num_kv_heads = 16,
                                 .head_dim = 64,
                                 .head_dim_v = 64},
                                DType::kFp16);
  constexpr uint64_t kHeads = 64 * 16, kScores = 1024 * 1024, kRows = 1024 * 64 * 2;
  const TileModel forward = Model(Valid(spec), Pass::kForward);
  // q k; S; P v; P v in fp32, factors.
  EXPECT_EQ(forward.loaded_bytes,
            kHeads * (2 * kRows + 4 * kScores + 2 * kScores + kRows + 2 * kRows + 1024 * 4));
  // S; P, lse, factors; P v in fp32; out.
  EXPECT_EQ(forward.stored_bytes,
            kHeads * (4 * kScores + 2 * kScores + 2 * 1024 * 4 + 2 * kRows + kRows));
  const TileModel backward = Model(Valid(spec, Pass::kBackward), Pass::kBackward);
  // out dout; q k; dout v; S dP lse delta; P dout; dS q; dS k.
  EXPECT_EQ(backward.loaded_bytes, kHeads * (2 * kRows + 2 * kRows + 2 * kRows + 8 * kScores +
                                             2 * 1024 * 4 + 3 * (2 * kScores + kRows)));
  // delta; S; dP; P dS; dk dv; dq.
  EXPECT_EQ(backward.stored_bytes,
            kHeads * (1024 * 4 + 4 * kScores + 4 * kScores + 4 * kScores + 2 * kRows + kRows));
}

TEST(StandardModelTest, RowKernelsReadWhatIsVisible) {
  AttentionSpec spec =
      BshdSpec({.batch = 1, .seqlen_q = 256, .seqlen_k = 256, .num_heads = 1, .num_kv_heads = 1});
  const TileModel full = Model(Valid(spec), Pass::kForward);
  spec.causal = true;
  const TileModel causal = Model(Valid(spec), Pass::kForward);
  EXPECT_EQ(full.loaded_bytes - causal.loaded_bytes, 4u * 256 * 255 / 2);
  EXPECT_EQ(full.stored_bytes, causal.stored_bytes);
}

Product MakeProduct(DType a, DType b, DType c, int64_t k) {
  Product product;
  product.m = product.n = 32;
  product.k = k;
  product.a.dtype = a;
  product.b.dtype = b;
  product.c_dtype = c;
  product.a.ld = k;
  product.b.ld = 32;
  return product;
}

TEST(StandardProductTest, CublasServesWhatStaysExact) {
  constexpr DType k16 = DType::kBf16, k32 = DType::kFp32;
  EXPECT_TRUE(CublasServes(MakeProduct(k16, k16, k16, 100000)));
  EXPECT_TRUE(CublasServes(MakeProduct(k16, k16, k32, 100000)));
  EXPECT_FALSE(CublasServes(MakeProduct(k32, k32, k32, 64)));  // a sum in fp32
  Product scores = MakeProduct(k32, k32, k32, 128);
  scores.scores = true;
  EXPECT_TRUE(CublasServes(scores));
  scores.k = 129;
  EXPECT_FALSE(CublasServes(scores));
  EXPECT_FALSE(CublasServes(MakeProduct(k16, k32, k32, 64)));
  Product overlapping = MakeProduct(k16, k16, k16, 64);
  overlapping.b.ld = 0;
  EXPECT_FALSE(CublasServes(overlapping));
  Product group = MakeProduct(k16, k16, k16, 64);
  group.sum_group = true;
  EXPECT_TRUE(CublasServes(group));
  group.extents[2] = 2;  // the sum would be rounded between two heads
  EXPECT_FALSE(CublasServes(group));
  group.c_dtype = k32;
  EXPECT_TRUE(CublasServes(group));
}

}  // namespace
}  // namespace attn::cuda::standard
