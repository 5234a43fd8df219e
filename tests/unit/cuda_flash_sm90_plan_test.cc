// What flash_sm90 takes, and what it launches. Planning needs no GPU.
#ifdef ATTN_HAVE_SM90

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "kernels/api/problem.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/common/merge.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/sm90/flash_sm90.h"
#include "kernels/cuda/sm90/plan.h"
#include "kernels/cuda/sm90/tensor_map.h"
#include "tests/exactness/call.h"
#include "tests/unit/api_test_util.h"

namespace attn::cuda::sm90 {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

DeviceProperties H200() {
  DeviceProperties d;
  d.major = 9;
  d.multiprocessors = 132;
  d.l2_bytes = int64_t{60} << 20;
  d.shared_bytes = 227 << 10;
  return d;
}

struct Shape {
  int64_t batch = 2, seqlen_q = 256, seqlen_k = 256, heads = 4, kv_heads = 2, dim = 128,
          dim_v = 128;
};

AttentionSpec SpecOf(const Shape& s, DType dtype = DType::kBf16) {
  return BshdSpec({.batch = s.batch,
                   .seqlen_q = s.seqlen_q,
                   .seqlen_k = s.seqlen_k,
                   .num_heads = s.heads,
                   .num_kv_heads = s.kv_heads,
                   .head_dim = s.dim,
                   .head_dim_v = s.dim_v},
                  dtype);
}

AttentionProblem ProblemOf(const AttentionSpec& spec) {
  absl::StatusOr<AttentionProblem> problem = Validate(spec, Pass::kForward);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return *std::move(problem);
}

std::vector<Rejection> Rejections(const AttentionProblem& p, Pass pass = Pass::kForward,
                                  const DeviceProperties& device = H200()) {
  std::vector<Rejection> rejections;
  MakeFlashSm90Path()->AppendRejections(p, pass, device, &rejections);
  return rejections;
}

void ExpectRejected(const AttentionProblem& p, Reason reason, const std::string& detail,
                    Pass pass = Pass::kForward, const DeviceProperties& device = H200()) {
  const std::vector<Rejection> rejections = Rejections(p, pass, device);
  ASSERT_EQ(rejections.size(), 1u);
  EXPECT_EQ(rejections[0], (Rejection{PathId::kFlashSm90, reason, detail}));
}

std::string Kernel(const AttentionSpec& spec) {
  return MakeFlashSm90Path()->KernelId(ProblemOf(spec), Pass::kForward, H200());
}

ForwardPlan PlanOf(const AttentionSpec& spec) {
  const AttentionProblem p = ProblemOf(spec);
  return PlanForward(p, KernelsFor(p), H200());
}

// ---- what it takes

TEST(FlashSm90RejectionsTest, TakesEveryTileAndOption) {
  for (DType dtype : {DType::kFp16, DType::kBf16}) {
    for (int64_t dim = 8; dim <= 256; dim += 8) {
      AttentionSpec spec = SpecOf({.dim = dim, .dim_v = 264 - dim}, dtype);
      EXPECT_THAT(Rejections(ProblemOf(spec)), IsEmpty()) << dim;
      spec.causal = true;
      EXPECT_THAT(Rejections(ProblemOf(spec)), IsEmpty()) << dim;
      spec.softcap = 20.0f;
      EXPECT_THAT(Rejections(ProblemOf(spec)), IsEmpty()) << dim;
    }
  }
}

TEST(FlashSm90RejectionsTest, NamesFieldValueAndLimit) {
  DeviceProperties device = H200();
  device.major = 10;
  ExpectRejected(ProblemOf(SpecOf({})), Reason::kArchUnsupported,
                 "compute capability 10.0, not 9.0", Pass::kForward, device);
  device = H200();
  device.shared_bytes = 100 << 10;
  EXPECT_THAT(Rejections(ProblemOf(SpecOf({})), Pass::kForward, device)[0].detail,
              HasSubstr("bytes of shared memory > 102400 of the device"));
  ExpectRejected(ProblemOf(SpecOf({}, DType::kFp32)), Reason::kDtypeUnsupported,
                 "FP32, not FP16 or BF16");
  ExpectRejected(ProblemOf(SpecOf({.dim = 264})), Reason::kHeadDimUnsupported,
                 "head_dim 264 > 256");
  ExpectRejected(ProblemOf(SpecOf({.seqlen_q = 16})), Reason::kOptionUnsupported,
                 "seqlen_q 16 <= 16: flash_sm80 has a kernel for few queries");
  EXPECT_THAT(Rejections(ProblemOf(SpecOf({.seqlen_q = 17}))), IsEmpty());
  AttentionSpec spec = SpecOf({});
  spec.block_mask = BlockMaskSpec{
      .mask = attn::Shape({2, 4, 8, 2}, DType::kUint8), .block_q = 32, .block_k = 128};
  ExpectRejected(ProblemOf(spec), Reason::kOptionUnsupported,
                 "block_mask.block_q 32 not a multiple of 64");
}

TEST(FlashSm90RejectionsTest, DropoutFactorThatFp16CannotHold) {
  const auto rejections = [](DType dtype, float kept) {
    AttentionSpec spec = SpecOf({}, dtype);
    spec.dropout = DropoutSpec{.p = 1.0f - kept / 65536};
    return Rejections(ProblemOf(spec));
  };
  EXPECT_THAT(
      rejections(DType::kFp16, 1),
      ElementsAre(Rejection{PathId::kFlashSm90, Reason::kOptionUnsupported,
                            "dropout_p keeps 1 of 65536: its factor, 65536 > 65504, is no FP16 "
                            "number"}));
  EXPECT_THAT(rejections(DType::kFp16, 2), IsEmpty());
  EXPECT_THAT(rejections(DType::kBf16, 1), IsEmpty());
}

TEST(FlashSm90RejectionsTest, BackwardIsNotBuilt) {
  AttentionSpec spec = SpecOf({});
  spec.out = spec.dout = spec.q;
  spec.lse = attn::Shape({2, 4, 256});
  const absl::StatusOr<AttentionProblem> p = Validate(spec, Pass::kBackward);
  ASSERT_TRUE(p.ok()) << p.status();
  ExpectRejected(*p, Reason::kNotBuilt,
                 "pass backward: this binary has no such kernel of flash_sm90", Pass::kBackward);
  EXPECT_THAT(Rejections(*p, Pass::kForward), IsEmpty());
}

// 2^31 tiles of work: counted before anything is launched.
TEST(FlashSm90RejectionsTest, TooMuchWorkForItsCounter) {
  AttentionSpec spec = SpecOf({.batch = 1 << 20, .seqlen_q = 128, .heads = 2048, .kv_heads = 2048});
  const std::vector<Rejection> rejections = Rejections(ProblemOf(spec));
  ASSERT_FALSE(rejections.empty());
  EXPECT_EQ(rejections.back().reason, Reason::kOptionUnsupported);
  EXPECT_THAT(rejections.back().detail, HasSubstr("tiles > 2147483647"));
}

// More than an hour of a device that does nothing else.
TEST(FlashSm90RejectionsTest, TooManyKeyTilesForTheirCounter) {
  constexpr int64_t kTokens = 1 << 25;
  const auto rejections = [](int64_t heads) {
    return Rejections(ProblemOf(SpecOf({.batch = 1,
                                        .seqlen_q = kTokens,
                                        .seqlen_k = kTokens,
                                        .heads = heads,
                                        .kv_heads = heads})));
  };
  EXPECT_THAT(rejections(1), IsEmpty());
  const std::vector<Rejection> many = rejections(8);
  ASSERT_EQ(many.size(), 1);
  EXPECT_EQ(many[0].reason, Reason::kOptionUnsupported);
  EXPECT_THAT(many[0].detail, AllOf(HasSubstr("batch * num_heads * seqlen_q * seqlen_k: "),
                                    HasSubstr(" tiles of keys for a multiprocessor > 2147483647")));
}

// ---- tensor maps

StridedTensor Strided(Strides strides) {
  return {.element_bytes = 2, .batch = 2, .tokens = 10, .heads = 3, .dim = 64, .strides = strides};
}

TEST(TensorMapTest, ObstaclesNameTensorAxisValueAndLimit) {
  EXPECT_EQ(MapObstacle("q", Strided({.batch = 1920, .token = 192, .head = 64})), "");
  EXPECT_EQ(MapObstacle("q", Strided({.batch = 1920, .token = 192, .head = 68})),
            "q stride of heads 136 bytes, not a multiple of 16");
  EXPECT_EQ(MapObstacle("k", Strided({.batch = 1920, .token = 192, .head = 0})),
            "k stride of heads 0 bytes <= 0");
  EXPECT_EQ(MapObstacle("v", Strided({.batch = 1920, .token = -192, .head = 64})),
            "v stride of tokens -384 bytes <= 0");
  EXPECT_EQ(MapObstacle("v", Strided({.batch = (int64_t{1} << 39) - 8, .token = 192, .head = 64})),
            "");
  EXPECT_THAT(MapObstacle("v", Strided({.batch = int64_t{1} << 39, .token = 192, .head = 64})),
              HasSubstr("v stride of batch 1099511627776 bytes >= 1099511627776"));
  StridedTensor far = Strided({.batch = int64_t{1} << 61, .token = 192, .head = 64});
  EXPECT_THAT(MapObstacle("v", far), HasSubstr(">= 1099511627776"));
  far.batch = 1;  // an axis of one element has no stride to speak of
  EXPECT_EQ(MapObstacle("v", far), "");
  far.tokens = int64_t{1} << 31;
  EXPECT_EQ(MapObstacle("v", far), "v tokens 2147483648 >= 2147483648");
}

// A host without a driver starts; only a call on a device needs the encoder. Where there is one, it
// takes these.
TEST(TensorMapTest, EncodingSaysWhatIsMissing) {
  CUtensorMap map;
  alignas(16) static std::byte data[16];
  const absl::Status status =
      EncodeTensorMap(Strided({.batch = 1920, .token = 192, .head = 64}), data, DType::kBf16,
                      {.heads = 1, .tokens = 128}, &map);
  if (status.ok()) GTEST_SKIP() << "this host has a driver";
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuTensorMapEncodeTiled"));
}

// What HostBackend makes of strides that no map holds.
TEST(TensorMapTest, PackedStridesHaveNoObstacle) {
  AttentionSpec spec = SpecOf({});
  spec.q.strides = {256 * 4 * 131, 4 * 131, 131, 1};
  spec.k.strides = {1, 131, 1, 1};
  spec.k.shape = {1, 256, 1, 128};
  spec.v = spec.k;
  spec.q.shape[0] = 1;
  spec.num_kv_heads = 1;
  AttentionProblem p = ProblemOf(spec);
  EXPECT_THAT(Rejections(p), testing::Not(IsEmpty()));
  UsePackedStrides(Pass::kForward, &p);
  EXPECT_THAT(Rejections(p), IsEmpty());
}

// A map holds no stride of 0: a head stored once is one head, other axes are declined.
TEST(TensorMapTest, OneHeadStoredForAllIsOneHead) {
  AttentionSpec spec = SpecOf({});
  EXPECT_EQ(MapInput(ProblemOf(spec), kSlotK).heads, 2);
  EXPECT_EQ(MapGroup(ProblemOf(spec)), 2);
  spec.k.strides = spec.v.strides = {256 * 128, 128, 0, 1};
  const AttentionProblem shared = ProblemOf(spec);
  EXPECT_THAT(Rejections(shared), IsEmpty());
  EXPECT_EQ(MapInput(shared, kSlotQ).heads, 4);
  EXPECT_EQ(MapInput(shared, kSlotK).heads, 1);
  EXPECT_EQ(MapInput(shared, kSlotV).heads, 1);
  EXPECT_EQ(MapGroup(shared), 4);
  spec.v.strides.clear();
  ExpectRejected(ProblemOf(spec), Reason::kAlignment, "k stride of heads 0 bytes <= 0");
  spec.k.strides = {0, 256, 128, 1};
  ExpectRejected(ProblemOf(spec), Reason::kAlignment, "k stride of batch 0 bytes <= 0");
}

TEST(FlashSm90PlanTest, LooseKeysAreThoseThatEndBeforeTheTensor) {
  EXPECT_FALSE(HasLooseKeys(ProblemOf(SpecOf({}))));
  AttentionSpec spec = SpecOf({});
  spec.seqlens_k = {256, 255};
  EXPECT_TRUE(HasLooseKeys(ProblemOf(spec)));
  spec.seqlens_k = {256, 0};  // reads nothing
  EXPECT_FALSE(HasLooseKeys(ProblemOf(spec)));
  EXPECT_FALSE(HasLooseKeys(ProblemOf(ThdSpec({20}, {30}))));
  EXPECT_FALSE(HasLooseKeys(ProblemOf(ThdSpec({20, 0}, {30, 0}))));
  EXPECT_TRUE(HasLooseKeys(ProblemOf(ThdSpec({20, 20}, {30, 30}))));
}

// ---- kernels

TEST(FlashSm90PlanTest, KernelIdsNameTileLimitsOptionsAndSplits) {
  const Shape wide{.batch = 8, .seqlen_q = 1024, .seqlen_k = 1024, .heads = 16, .kv_heads = 16};
  AttentionSpec spec = SpecOf(wide);
  EXPECT_EQ(Kernel(spec), "sm90_fwd_bf16_d128");
  spec.causal = true;
  EXPECT_EQ(Kernel(spec), "sm90_fwd_bf16_d128_causal");
  spec.window_left = 100;
  EXPECT_EQ(Kernel(spec), "sm90_fwd_bf16_d128_window");
  spec.softcap = 30.0f;
  EXPECT_EQ(Kernel(spec), "sm90_fwd_bf16_d128_window_options");
  for (const auto& [dim, dim_v, tile] :
       std::vector<std::tuple<int64_t, int64_t, std::string>>{{8, 64, "d64"},
                                                              {64, 72, "d96"},
                                                              {104, 8, "d128"},
                                                              {136, 128, "d192x128"},
                                                              {128, 136, "d192"},
                                                              {192, 200, "d256"}}) {
    Shape shape = wide;
    shape.dim = dim;
    shape.dim_v = dim_v;
    EXPECT_EQ(Kernel(SpecOf(shape, DType::kFp16)), "sm90_fwd_fp16_" + tile);
  }
  Shape grouped = wide;
  grouped.batch = 32;
  grouped.seqlen_q = 48;
  grouped.kv_heads = 4;
  EXPECT_EQ(Kernel(SpecOf(grouped)), "sm90_fwd_bf16_d128_pack4");
  spec = SpecOf({.batch = 1, .seqlen_q = 128, .seqlen_k = 1 << 16, .heads = 8, .kv_heads = 8});
  const ForwardPlan split = PlanOf(spec);
  EXPECT_GE(split.splits, 8);
  EXPECT_EQ(Kernel(spec), "sm90_fwd_bf16_d128_q128_split" + std::to_string(split.splits));
}

TEST(FlashSm90PlanTest, ModeIsTheLeastThatTheCallNeeds) {
  AttentionSpec spec = SpecOf({});
  EXPECT_EQ(ModeOf(ProblemOf(spec)), Mode::kFull);
  spec.sinks = attn::Shape({4});
  spec.seqlens_k = {100, 256};
  EXPECT_EQ(ModeOf(ProblemOf(spec)), Mode::kFull);
  const auto with = [&spec](auto&& change) {
    AttentionSpec changed = spec;
    change(changed);
    return ModeOf(ProblemOf(changed));
  };
  EXPECT_EQ(with([](auto& s) { s.causal = true; }), Mode::kLimited);
  EXPECT_EQ(with([](auto& s) { s.window_left = 5; }), Mode::kLimited);
  EXPECT_EQ(with([](auto& s) {
              s.block_mask = BlockMaskSpec{.mask = attn::Shape({1, 1, 2, 2}, DType::kUint8)};
            }),
            Mode::kBlocks);
  EXPECT_EQ(with([](auto& s) { s.softcap = 1.0f; }), Mode::kOptions);
  EXPECT_EQ(with([](auto& s) { s.alibi_slopes = attn::Shape({4}); }), Mode::kOptions);
  EXPECT_EQ(with([](auto& s) { s.bias = attn::Shape({1, 1, 256, 256}); }), Mode::kOptions);
  EXPECT_EQ(with([](auto& s) { s.dropout = DropoutSpec{.p = 0.5f}; }), Mode::kOptions);
  EXPECT_EQ(with([](auto& s) { s.softmax_scale = 0.0f; }), Mode::kOptions);
  EXPECT_EQ(with([](auto& s) { s.softmax_scale = -1.0f; }), Mode::kOptions);
}

// 60 MiB of L2; of 4096 keys half of it.
TEST(FlashSm90PlanTest, SectionsAreEqualAndWhatL2Holds) {
  Shape shape{.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096, .heads = 32, .kv_heads = 32};
  AttentionSpec spec = SpecOf(shape);
  EXPECT_EQ(PlanOf(spec).section, 1) << "tiles of equal length go head by head";
  spec.causal = true;
  EXPECT_EQ(PlanOf(spec).section, 16) << "2 MiB a head, 64 heads";
  shape.kv_heads = 8;
  spec = SpecOf(shape);
  spec.causal = true;
  EXPECT_EQ(PlanOf(spec).section, 64) << "32 MiB are one section";
  shape.seqlen_k = 256;
  spec = SpecOf(shape);
  spec.causal = true;
  EXPECT_EQ(PlanOf(spec).section, 64) << "no more than there are";
  shape.seqlen_k = 1 << 20;
  shape.kv_heads = 32;
  spec = SpecOf(shape);
  spec.causal = true;
  EXPECT_EQ(PlanOf(spec).section, 1) << "at least one";
}

TEST(FlashSm90PlanTest, LastSectionKeepsEveryMultiprocessorBusyToTheEnd) {
  AttentionSpec spec = SpecOf({.batch = 8,
                               .seqlen_q = 2048,
                               .seqlen_k = 2048,
                               .heads = 8,
                               .kv_heads = 8,
                               .dim = 256,
                               .dim_v = 256});
  spec.causal = true;
  const ForwardPlan plan = PlanOf(spec);
  EXPECT_EQ(plan.section, 8);
  EXPECT_LT(plan.section * plan.tiles, 2 * 132);
  EXPECT_GE(plan.last_section * plan.tiles, 2 * 132);
  EXPECT_EQ((64 - plan.last_section) % plan.section, 0) << "the others are whole";
  spec.causal = false;
  EXPECT_EQ(PlanOf(spec).last_section, 1) << "tiles of equal length go head by head";
  spec = SpecOf({.batch = 1, .seqlen_q = 256, .seqlen_k = 1 << 16, .heads = 2});
  spec.causal = true;
  EXPECT_EQ(PlanOf(spec).last_section, 2) << "no more than there are";
}

// Rows of heads that share keys stand in one tile where one head's do not fill it.
TEST(FlashSm90PlanTest, PacksHeadsOfFewQueries) {
  const auto pack = [](int64_t queries, int64_t heads, int64_t kv_heads, auto&& change) {
    AttentionSpec spec =
        SpecOf({.seqlen_q = queries, .seqlen_k = 1 << 14, .heads = heads, .kv_heads = kv_heads});
    change(spec);
    return PlanOf(spec).pack;
  };
  const auto nothing = [](AttentionSpec&) {};
  EXPECT_EQ(pack(17, 32, 8, nothing), 2) << "68 rows of 4 heads";
  EXPECT_EQ(pack(17, 64, 8, nothing), 3) << "136 rows of 8 heads";
  EXPECT_EQ(pack(36, 64, 1, nothing), 4) << "3 tiles of 16 heads: a warp has 16 rows";
  EXPECT_EQ(pack(17, 24, 8, nothing), 0) << "three heads";
  EXPECT_EQ(pack(17, 48, 8, nothing), 1) << "six heads: three times two";
  EXPECT_EQ(pack(17, 8, 8, nothing), 0) << "no group";
  EXPECT_EQ(pack(192, 32, 8, nothing), 0) << "a head fills its tile";
  EXPECT_EQ(pack(200, 32, 8, nothing), 2) << "5 tiles, not 8";
  EXPECT_EQ(pack(4096, 32, 8, nothing), 0) << "86 tiles, not 88: too little gained";
  EXPECT_EQ(pack(17, 32, 8, [](auto& s) { s.causal = true; }), 2);
  EXPECT_EQ(pack(17, 32, 8, [](auto& s) { s.softcap = 1.0f; }), 0) << "options are a head's own";
  AttentionSpec spec = SpecOf({.batch = 16, .seqlen_q = 32, .seqlen_k = 448, .heads = 32});
  const uint64_t queries = uint64_t{16} * 32 * 32 * 128 * 2;
  const uint64_t keys = uint64_t{16} * 2 * 448 * 2 * 128 * 2;
  const ForwardPlan plan = PlanOf(spec);
  EXPECT_EQ(plan.pack, 2);
  // The 16 heads of a kv head are four tiles of 4 times 32 rows, of which each reads the keys.
  EXPECT_EQ(plan.tiles, 1);
  EXPECT_EQ(plan.splits, 1);
  EXPECT_EQ(MakeFlashSm90Path()->Model(ProblemOf(spec), Pass::kForward, H200()).loaded_bytes,
            queries + keys * 4);
}

// The model's choices, of shapes like those where an H200 showed that they pay.
TEST(FlashSm90PlanTest, TilingsFillMultiprocessorsWhereThatPays) {
  const auto expect = [](const Shape& shape, int tile_q, int pack, int splits) {
    const ForwardPlan plan = PlanOf(SpecOf(shape));
    EXPECT_EQ(plan.tile_q, tile_q) << shape.seqlen_q << " x " << shape.seqlen_k;
    EXPECT_EQ(plan.pack, pack) << shape.seqlen_q << " x " << shape.seqlen_k;
    EXPECT_EQ(plan.splits, splits) << shape.seqlen_q << " x " << shape.seqlen_k;
  };
  const auto shape = [](int64_t batch, int64_t q, int64_t k, int64_t heads, int64_t kv_heads) {
    return Shape{
        .batch = batch, .seqlen_q = q, .seqlen_k = k, .heads = heads, .kv_heads = kv_heads};
  };
  // 88 tiles of 132 multiprocessors would have something to do: twice 132, a third of the keys.
  expect(shape(1, 512, 1 << 16, 32, 8), 192, 2, 3);
  expect(shape(1, 200, 1 << 16, 64, 8), 128, 3, 5);  // 520 works of a fifth: four turns
  expect(shape(16, 17, 1 << 14, 64, 8), 192, 3, 1);  // 128 tiles of 136 rows
  expect(shape(1, 17, 1 << 12, 32, 8), 128, 2, 16);
  // 128 narrow tiles, or 256, instead of 96 or 192.
  expect(shape(1, 512, 1 << 12, 32, 8), 128, 0, 1);
  expect(shape(1, 1024, 1 << 12, 32, 8), 128, 0, 1);
  expect(shape(8, 1000, 1000, 16, 16), 192, 0, 1);  // many are of the tile that is faster
  // Half of the multiprocessors are idle, but the merge takes longer.
  expect(shape(4, 64, 1 << 10, 16, 16), 128, 0, 1);
}

TEST(FlashSm90PlanTest, CtasAreMultiprocessorsOrLessWork) {
  const ForwardPlan many =
      PlanOf(SpecOf({.batch = 8, .seqlen_q = 1000, .heads = 16, .kv_heads = 16}));
  EXPECT_EQ(many.splits, 1);
  EXPECT_EQ(many.tiles, CeilDiv(1000, many.tile_q));
  EXPECT_EQ(many.work, many.tiles * 8 * 16);
  EXPECT_EQ(many.ctas, 132);
  const ForwardPlan few = PlanOf(SpecOf({.batch = 1, .seqlen_q = 100, .seqlen_k = 100}));
  EXPECT_EQ(few.splits, 1);
  EXPECT_EQ(few.work, few.tiles * 4);
  EXPECT_EQ(few.ctas, few.work);
  EXPECT_LT(few.ctas, 132);
}

// Where rows see thousands of keys two CTAs share a tile of queries and copy its keys for each
// other.
TEST(FlashSm90PlanTest, ClustersWhereRowsSeeManyKeys) {
  const auto plan_of = [](const AttentionSpec& spec) {
    const ForwardPlan plan = PlanOf(spec);
    EXPECT_EQ(plan.ctas % plan.cluster, 0);
    EXPECT_LE(plan.ctas, plan.work * plan.cluster);
    EXPECT_LE(plan.ctas, 132);
    return plan;
  };
  Shape shape{.batch = 1,
              .seqlen_q = 4096,
              .seqlen_k = 4096,
              .heads = 8,
              .kv_heads = 8,
              .dim = 256,
              .dim_v = 256};
  const ForwardPlan square = plan_of(SpecOf(shape));
  EXPECT_EQ(square.cluster, 2);
  EXPECT_EQ(square.tiles, 16);
  EXPECT_EQ(square.work, 8 * 16);
  EXPECT_EQ(square.ctas, 132);
  const auto path = MakeFlashSm90Path();
  const AttentionProblem p = ProblemOf(SpecOf(shape));
  EXPECT_THAT(path->KernelId(p, Pass::kForward, H200()), HasSubstr("_cluster2"));
  // Keys and values reach both CTAs: as often as without clusters.
  const uint64_t head = 4096 * 256 * 2;
  EXPECT_EQ(path->Model(p, Pass::kForward, H200()).loaded_bytes, 8 * (head + 32 * 2 * head));

  shape.seqlen_k = 4095;
  EXPECT_EQ(plan_of(SpecOf(shape)).cluster, 1) << "too few keys";
  shape.seqlen_k = 8192;
  shape.seqlen_q = 130;
  shape.heads = shape.kv_heads = 66;
  EXPECT_EQ(plan_of(SpecOf(shape)).cluster, 2) << "two tiles";
  shape.seqlen_q = 128;
  shape.heads = shape.kv_heads = 200;
  EXPECT_EQ(plan_of(SpecOf(shape)).cluster, 1) << "the second CTA would have nothing to do";
  shape.seqlen_q = 257;
  EXPECT_EQ(plan_of(SpecOf(shape)).cluster, 1) << "nor would that of the last tile";
  shape.seqlen_q = 4096;
  shape.heads = shape.kv_heads = 8;
  AttentionSpec spec = SpecOf(shape);
  spec.window_left = 1000;
  spec.window_right = 0;
  EXPECT_EQ(plan_of(spec).cluster, 1) << "rows see a window";
  spec.window_left = 5000;
  EXPECT_EQ(plan_of(spec).cluster, 2);
  spec = SpecOf(shape);
  spec.causal = true;
  EXPECT_EQ(plan_of(spec).cluster, 2);
  spec.alignment = Alignment::kTopLeft;
  EXPECT_EQ(plan_of(spec).cluster, 2);
  spec.q.shape[1] = 2048;
  EXPECT_EQ(plan_of(spec).cluster, 1) << "the last row sees 2048";
  spec = SpecOf(shape);
  spec.softcap = 20.0f;
  EXPECT_EQ(plan_of(spec).cluster, 1) << "kernels with options have no clusters";
  shape.seqlen_q = 256;
  shape.heads = shape.kv_heads = 1;
  const ForwardPlan split = plan_of(SpecOf(shape));
  EXPECT_GT(split.splits, 1);
  EXPECT_EQ(split.cluster, 1);
  EXPECT_EQ(plan_of(SpecOf({.batch = 4, .seqlen_q = 16384, .seqlen_k = 16384})).cluster, 2);
  EXPECT_EQ(plan_of(SpecOf({.batch = 4, .seqlen_q = 8192, .seqlen_k = 8192})).cluster, 1);
  EXPECT_EQ(
      plan_of(SpecOf({.batch = 4, .seqlen_q = 32768, .seqlen_k = 32768, .dim = 64, .dim_v = 64}))
          .cluster,
      1);
}

// Every generated case: splits cover the keys, work and sections are in range, scratch memory is
// what the splits need, and the model counts at least what must move.
TEST(FlashSm90PlanTest, EveryPlanCoversTheCall) {
  const auto path = MakeFlashSm90Path();
  int planned = 0, split = 0;
  std::vector<exactness::Case> cases = exactness::RandomCases(400, 5);
  for (int64_t rows : {17, 100, 300}) {
    for (int64_t keys : {2000, 9000}) {
      exactness::Case c;
      c.dtype = DType::kBf16;
      c.seqlen_q = rows;
      c.seqlen_k = keys;
      c.causal = rows == 100;
      cases.push_back(c);
    }
  }
  for (const exactness::Case& c : cases) {
    SCOPED_TRACE(exactness::Name(c));
    const exactness::Call call(c);
    absl::StatusOr<AttentionProblem> p = call.Problem(Pass::kForward);
    ASSERT_TRUE(p.ok()) << p.status();
    UsePackedStrides(Pass::kForward, &*p);
    if (!Rejections(*p).empty() || p->total_q == 0 || p->total_k == 0) continue;
    const ForwardPlan plan = PlanForward(*p, KernelsFor(*p), H200());
    EXPECT_GE(plan.tiles * plan.tile_q, p->seqlen_q << plan.pack);
    EXPECT_EQ(p->group() % (1 << plan.pack), 0);
    const int64_t heads = (p->num_heads >> plan.pack) * p->batch;
    EXPECT_EQ(plan.work, plan.tiles * plan.splits * heads);
    EXPECT_GE(plan.section, 1);
    EXPECT_LE(plan.section, heads);
    EXPECT_GE(plan.last_section, plan.section);
    EXPECT_LE(plan.last_section, heads);
    EXPECT_EQ((heads - plan.last_section) % plan.section, 0);
    EXPECT_GE(plan.ctas, 1);
    EXPECT_LE(plan.ctas, plan.work);
    EXPECT_LE(plan.splits, cuda::kMaxSplits);
    EXPECT_GE(int64_t{plan.splits} * plan.split_tiles * plan.tile_k,
              std::max_element(p->sequences.begin(), p->sequences.end(),
                               [](const auto& a, const auto& b) { return a.len_k < b.len_k; })
                  ->len_k);
    const int64_t rows = p->num_heads * p->total_q;
    const int64_t workspace = path->WorkspaceBytes(*p, Pass::kForward, H200());
    EXPECT_EQ(workspace == 0, plan.splits == 1);
    EXPECT_GE(workspace, plan.splits == 1 ? 0 : rows * plan.splits * (p->head_dim_v + 1) * 4);
    const TileModel model = path->Model(*p, Pass::kForward, H200());
    EXPECT_EQ(model.tile_q, plan.tile_q);
    EXPECT_EQ(model.tile_k, plan.tile_k);
    EXPECT_GE(model.stored_bytes,
              static_cast<uint64_t>(OutElements(*p) * SizeOf(p->out_dtype) + rows * 4));
    ++planned;
    split += plan.splits > 1 ? 1 : 0;
  }
  EXPECT_GT(planned, 50);
  EXPECT_GT(split, 3);
}

TEST(FlashSm90PlanTest, ModelReadsKeysOncePerQueryTileAndSkipsMaskedTiles) {
  const Shape shape{.batch = 1, .seqlen_q = 1024, .seqlen_k = 1024, .heads = 64, .kv_heads = 64};
  AttentionSpec spec = SpecOf(shape);
  const auto loaded = [](const AttentionSpec& s) {
    return MakeFlashSm90Path()->Model(ProblemOf(s), Pass::kForward, H200()).loaded_bytes;
  };
  const uint64_t head = 1024 * 128 * 2;
  const auto tiles = static_cast<uint64_t>(PlanOf(spec).tiles);
  EXPECT_EQ(loaded(spec), 64 * (head + tiles * 2 * head));
  spec.causal = true;
  const ForwardPlan causal = PlanOf(spec);
  uint64_t keys = 0;  // tiles end with the last row
  for (int64_t seen = 1024; seen > 0; seen -= causal.tile_q) {
    keys += CeilDiv(seen, causal.tile_k) * causal.tile_k;
  }
  EXPECT_EQ(loaded(spec), 64 * (head + keys * 2 * 128 * 2));
}

}  // namespace
}  // namespace attn::cuda::sm90

#endif  // ATTN_HAVE_SM90
