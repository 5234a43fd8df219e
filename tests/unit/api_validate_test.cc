#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// One mistake made to a valid spec (see BshdSpec() and ThdSpec()), and the whole message it gets.
struct Mistake {
  std::function<void(AttentionSpec&)> make;
  std::string message;
};

void ExpectRefusals(const AttentionSpec& valid, Pass pass, const std::vector<Mistake>& mistakes) {
  ASSERT_EQ(ValidateText(valid, pass), "OK");
  for (const Mistake& mistake : mistakes) {
    AttentionSpec spec = valid;
    mistake.make(spec);
    EXPECT_EQ(ValidateText(spec, pass), "INVALID_ARGUMENT: " + mistake.message);
  }
}

TEST(ValidateTest, RefusesHeadsThatDisagree) {
  ExpectRefusals(
      BshdSpec(), Pass::kForward,
      {
          {[](auto& s) { s.num_heads = 0; }, "num_heads is 0; it must be 1 to 1048576"},
          {[](auto& s) { s.num_heads = kHuge; },
           "num_heads is 9223372036854775807; it must be 1 to 1048576"},
          {[](auto& s) { s.num_kv_heads = -1; }, "num_kv_heads is -1; it must be at least 1"},
          {[](auto& s) { s.num_kv_heads = 3; }, "num_kv_heads is 3; it must divide num_heads 4"},
          // [batch, heads, seqlen, dim] sent as BSHD (attention_cases 16).
          {[](auto& s) {
             s.q.shape = {2, 4, 5, 16};
           },
           "q.shape[2] is 5; it must be num_heads 4 (q is [batch, seqlen, num_heads, head_dim])"},
          {[](auto& s) {
             s.k.shape = {2, 2, 7, 16};
           },
           "k.shape[2] is 7; it must be num_kv_heads 2 (k is [batch, seqlen, num_kv_heads, "
           "head_dim])"},
          {[](auto& s) {
             s.v.shape = {2, 2, 7, 16};
           },
           "v.shape[2] is 7; it must be num_kv_heads 2 (v is [batch, seqlen, num_kv_heads, "
           "head_dim_v])"},
      });
}

TEST(ValidateTest, RefusesOperandShapes) {
  ExpectRefusals(
      BshdSpec(), Pass::kForward,
      {
          {[](auto& s) {
             s.q.shape = {2, 5, 64};
           },
           "q.shape is [2, 5, 64] with 3 axes; layout BSHD needs 4: [batch, seqlen, num_heads, "
           "head_dim]"},
          {[](auto& s) { s.q.shape = {}; },
           "q.shape is [] with 0 axes; layout BSHD needs 4: [batch, seqlen, num_heads, head_dim]"},
          {[](auto& s) { s.q.shape[1] = -5; }, "q.shape[1] is -5; it must be at least 0"},
          {[](auto& s) { s.k.shape[0] = 3; }, "k.shape[0] is 3; it must be the batch of q, 2"},
          {[](auto& s) { s.v.shape[0] = 3; }, "v.shape[0] is 3; it must be the batch of q, 2"},
          {[](auto& s) { s.k.shape[3] = 8; }, "k.shape[3] is 8; it must be the head_dim of q, 16"},
          // attention_cases 15.
          {[](auto& s) { s.v.shape[1] = 6; }, "v.shape[1] is 6; it must be k.shape[1], 7"},
          {[](auto& s) { s.q.shape[3] = 0; }, "head_dim (q.shape[3]) is 0; it must be 1 to 512"},
          {[](auto& s) { s.q.shape[3] = s.k.shape[3] = 513; },
           "head_dim (q.shape[3]) is 513; it must be 1 to 512"},
          {[](auto& s) { s.v.shape[3] = 513; },
           "head_dim_v (v.shape[3]) is 513; it must be 1 to 512"},
          {[](auto& s) { s.q.dtype = DType::kUint8; },
           "q.dtype is UINT8; it must be FP32, FP16 or BF16"},
          {[](auto& s) { s.k.dtype = DType::kFp16; },
           "k.dtype is FP16; it must be the dtype of q, FP32"},
          {[](auto& s) { s.v.dtype = DType::kBf16; },
           "v.dtype is BF16; it must be the dtype of q, FP32"},
          {[](auto& s) { s.out_dtype = DType::kFp16; }, "out_dtype is FP16; it must be FP32"},
      });
  AttentionSpec half = BshdSpec({}, DType::kFp16);
  ExpectRefusals(half, Pass::kForward,
                 {{[](auto& s) { s.out_dtype = DType::kBf16; },
                   "out_dtype is BF16; it must be FP16, the dtype of q, or FP32"}});
}

TEST(ValidateTest, HugeExtentsAreRefusedWithoutOverflow) {
  ExpectRefusals(
      BshdSpec(), Pass::kForward,
      {
          {[](auto& s) { s.q.shape[1] = kHuge; },
           "q.shape is [2, 9223372036854775807, 4, 16]; the number of elements must be below "
           "2^62"},
          {[](auto& s) { s.q.shape[0] = s.q.shape[1] = int64_t{1} << 32; },
           "q.shape is [4294967296, 4294967296, 4, 16]; the number of elements must be below "
           "2^62"},
          {[](auto& s) { s.q.shape[1] = kMaxTokens + 1; },
           "q.shape[1] is 1099511627777; it must be at most 1099511627776 tokens"},
          {[](auto& s) { s.q.shape[0] = kMaxBatch + 1; },
           "batch (q.shape[0]) is 1048577; it must be at most 1048576"},
          {[](auto& s) {
             s.q.strides = {kHuge, 64, 16, 1};
           },
           "q.strides is [9223372036854775807, 64, 16, 1] with shape [2, 5, 4, 16]; the span must "
           "be below 2^62 elements"},
          {[](auto& s) {
             s.q.strides = {int64_t{1} << 61, int64_t{1} << 60, 16, 1};
           },
           "q.strides is [2305843009213693952, 1152921504606846976, 16, 1] with shape [2, 5, 4, "
           "16]; the span must be below 2^62 elements"},
      });
  // out is larger than any input: 2^40 tokens, 2^14 heads, head_dim_v 512 is 2^63 elements.
  AttentionSpec wide = BshdSpec({1, kMaxTokens, 1, 1 << 14, 1 << 14, 1, 512});
  EXPECT_EQ(ValidateText(wide),
            "INVALID_ARGUMENT: out would have shape [1, 1099511627776, 16384, 512]; the number of "
            "elements must be below 2^62");
  // Nothing multiplies the other extents of an empty tensor.
  AttentionSpec empty = BshdSpec({0, kMaxTokens, kMaxTokens, kMaxHeads, kMaxHeads, 512, 512});
  EXPECT_EQ(ValidateText(empty), "OK");
}

TEST(ValidateTest, RefusesStrides) {
  ExpectRefusals(BshdSpec(), Pass::kForward,
                 {
                     {[](auto& s) {
                        s.k.strides = {16, 1};
                      },
                      "k.strides has 2 entries; it must have 4, one for each axis of k.shape"},
                     {[](auto& s) {
                        s.k.strides = {1, 1, -1, 1};
                      },
                      "k.strides[2] is -1; it must be at least 0"},
                     {[](auto& s) {
                        s.v.strides = {1, 1, 1, 2};
                      },
                      "v.strides[3] is 2; the innermost stride must be 1"},
                 });
}

TEST(ValidateTest, StridesAreKeptAndDefaultToContiguous) {
  AttentionSpec spec = BshdSpec();
  spec.k.strides = {0, 100, 0, 1};  // overlapping inputs are allowed
  const AttentionProblem p = *Validate(spec, Pass::kForward);
  EXPECT_EQ(p.q.batch, 5 * 4 * 16);
  EXPECT_EQ(p.q.token, 4 * 16);
  EXPECT_EQ(p.q.head, 16);
  EXPECT_EQ(p.k.batch, 0);
  EXPECT_EQ(p.k.token, 100);
  EXPECT_EQ(p.k.head, 0);
  const AttentionProblem thd = *Validate(ThdSpec({3}, {4}), Pass::kForward);
  EXPECT_EQ(thd.q.batch, 0);
  EXPECT_EQ(thd.q.token, 64);
  EXPECT_EQ(thd.v.token, 32);
}

TEST(ValidateTest, RefusesCuSeqlens) {  // attention_cases 17
  ExpectRefusals(
      ThdSpec({3, 2}, {4, 5}), Pass::kForward,
      {
          {[](auto& s) { s.cu_seqlens_q.clear(); },
           "cu_seqlens_q has 0 entries; layout THD needs batch + 1, at least 1"},
          {[](auto& s) { s.cu_seqlens_q[0] = 1; }, "cu_seqlens_q[0] is 1; it must be 0"},
          {[](auto& s) { s.cu_seqlens_k[1] = 10; },
           "cu_seqlens_k[2] is 9; it must be at least cu_seqlens_k[1], 10"},
          {[](auto& s) { s.cu_seqlens_k[1] = -1; },
           "cu_seqlens_k[1] is -1; it must be at least cu_seqlens_k[0], 0"},
          {[](auto& s) { s.cu_seqlens_q[2] = 6; },
           "cu_seqlens_q[2] is 6; the last must be the total tokens of q, 5"},
          {[](auto& s) { s.cu_seqlens_k.push_back(9); },
           "cu_seqlens_k has 4 entries; cu_seqlens_q has 3, and both must have batch + 1"},
          {[](auto& s) {
             s.seqlens_k = {4, 5};
           },
           "seqlens_k has 2 entries; with layout THD it must be empty (cu_seqlens states the "
           "lengths)"},
          {[](auto& s) {
             s.q.shape = {5, 2, 16};
           },
           "q.shape[1] is 2; it must be num_heads 4 (q is [total_tokens, num_heads, head_dim])"},
          {[](auto& s) { s.v.shape[0] = 8; }, "v.shape[0] is 8; it must be k.shape[0], 9"},
      });
  AttentionSpec bshd = BshdSpec();
  bshd.cu_seqlens_k = {0};
  EXPECT_EQ(ValidateText(bshd),
            "INVALID_ARGUMENT: cu_seqlens_k has 1 entries; with layout BSHD it must be empty");
}

TEST(ValidateTest, RefusesSeqlens) {
  ExpectRefusals(BshdSpec(), Pass::kForward,
                 {
                     {[](auto& s) { s.seqlens_q = {5}; },
                      "seqlens_q has 1 entries; it must have batch, 2, or none"},
                     {[](auto& s) {
                        s.seqlens_q = {5, 6};
                      },
                      "seqlens_q[1] is 6; it must be 0 to 5"},
                     {[](auto& s) {
                        s.seqlens_k = {-1, 7};
                      },
                      "seqlens_k[0] is -1; it must be 0 to 7"},
                 });
}

TEST(ValidateTest, RefusesOptions) {
  ExpectRefusals(
      BshdSpec(), Pass::kForward,
      {
          {[](auto& s) { s.softmax_scale = kNan; }, "softmax_scale is nan; it must be finite"},
          {[](auto& s) { s.softmax_scale = -kInf; }, "softmax_scale is -inf; it must be finite"},
          {[](auto& s) { s.softcap = 0.0f; },
           "softcap is 0; it must be finite and over 0 (no cap is an unset field)"},
          {[](auto& s) { s.softcap = kInf; },
           "softcap is inf; it must be finite and over 0 (no cap is an unset field)"},
          // attention_cases 10.
          {[](auto& s) { s.window_left = -1; },
           "window_left is -1; it must be at least 0 (unlimited is an unset field)"},
          {[](auto& s) { s.window_right = -1; },
           "window_right is -1; it must be at least 0 (unlimited is an unset field)"},
          {[](auto& s) {
             s.causal = true;
             s.window_right = 1;
           },
           "window_right is 1; with causal it must be 0 or unset"},
          {[](auto& s) { s.alibi_slopes = Shape({4}, DType::kFp16); },
           "alibi_slopes.dtype is FP16; it must be FP32"},
          {[](auto& s) { s.alibi_slopes = Shape({3}); },
           "alibi_slopes.shape[0] is 3; it must be num_heads 4 (alibi_slopes is [num_heads])"},
          {[](auto& s) {
             s.alibi_slopes = Shape({3, 4});
           },
           "alibi_slopes.shape[0] is 3; it must be batch 2 (alibi_slopes is [batch, num_heads])"},
          {[](auto& s) {
             s.alibi_slopes = Shape({1, 2, 4});
           },
           "alibi_slopes.shape is [1, 2, 4] with 3 axes; it must have 2: [batch, num_heads]"},
          {[](auto& s) {
             s.bias = Shape({2, 4, 5, 7}, DType::kUint8);
           },
           "bias.dtype is UINT8; it must be FP32, FP16 or BF16"},
          {[](auto& s) {
             s.bias = Shape({2, 3, 5, 7});
           },
           "bias.shape[1] is 3; it must be num_heads 4, or 1 (bias is [batch or 1, num_heads or 1, "
           "seqlen_q, seqlen_k])"},
          {[](auto& s) {
             s.bias = Shape({2, 4, 1, 7});
           },
           "bias.shape[2] is 1; it must be seqlen_q 5 (bias is [batch or 1, num_heads or 1, "
           "seqlen_q, seqlen_k])"},
          {[](auto& s) {
             s.bias = Shape({2, 4, 5, 7});
             s.bias->strides = {0, 35, 7, 1};
           },
           "bias.strides[0] is 0; bias must be contiguous, so it must be 140"},
          {[](auto& s) { s.sinks = Shape({2}); },
           "sinks.shape[0] is 2; it must be num_heads 4 (sinks is [num_heads])"},
          {[](auto& s) { s.sinks = Shape({4}, DType::kBf16); },
           "sinks.dtype is BF16; it must be FP32"},
      });
}

TEST(ValidateTest, RefusesBlockMasks) {
  AttentionSpec spec = BshdSpec({2, 300, 200, 4, 2, 16, 16});
  spec.block_mask = BlockMaskSpec{Shape({2, 1, 3, 2}, DType::kUint8), 128, 128};
  ExpectRefusals(
      spec, Pass::kForward,
      {
          {[](auto& s) { s.block_mask->block_q = 0; },
           "block_mask.block_q is 0; it must be at least 1"},
          {[](auto& s) { s.block_mask->block_k = -64; },
           "block_mask.block_k is -64; it must be at least 1"},
          {[](auto& s) { s.block_mask->mask.dtype = DType::kFp32; },
           "block_mask.mask.dtype is FP32; it must be UINT8"},
          {[](auto& s) { s.block_mask->block_q = 64; },
           "block_mask.mask.shape[2] is 3; it must be ceil(seqlen_q / block_q) 5 (block_mask.mask "
           "is [batch or 1, num_heads or 1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)])"},
          {[](auto& s) { s.block_mask->block_k = kHuge; },
           "block_mask.mask.shape[3] is 2; it must be ceil(seqlen_k / block_k) 1 (block_mask.mask "
           "is [batch or 1, num_heads or 1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)])"},
      });
}

TEST(ValidateTest, RefusesDropout) {
  AttentionSpec spec = BshdSpec();
  spec.dropout = DropoutSpec{0.5f, 1, 2};
  ExpectRefusals(spec, Pass::kForward,
                 {
                     {[](auto& s) { s.dropout->p = -0.1f; },
                      "dropout.p is -0.1; it must be at least 0 and below 1"},
                     {[](auto& s) { s.dropout->p = 1.0f; },
                      "dropout.p is 1; it must be at least 0 and below 1"},
                     {[](auto& s) { s.dropout->p = kNan; },
                      "dropout.p is nan; it must be at least 0 and below 1"},
                     {[](auto& s) { s.dropout->p = std::nextafter(1.0f, 0.0f); },
                      "dropout.p is 1; round(65536 * (1 - p)) is 0, and it must be at least 1"},
                 });
  // The three limits of the Philox counter.
  const int64_t words = int64_t{1} << 32;
  AttentionSpec rows = BshdSpec({1, words + 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(ValidateText(rows), "OK");
  rows.dropout = spec.dropout;
  EXPECT_EQ(ValidateText(rows),
            "INVALID_ARGUMENT: seqlen_q is 4294967297; with dropout it must be at most 4294967296");
  AttentionSpec keys = BshdSpec({1, 1, 8 * words + 1, 1, 1, 1, 1});
  keys.dropout = spec.dropout;
  EXPECT_EQ(
      ValidateText(keys),
      "INVALID_ARGUMENT: seqlen_k is 34359738369; with dropout it must be at most 34359738368");
  AttentionSpec heads = BshdSpec({1 << 16, 1, 1, (1 << 16) + 1, 1, 1, 1});
  heads.dropout = spec.dropout;
  EXPECT_EQ(ValidateText(heads),
            "INVALID_ARGUMENT: batch * num_heads is 4295032832; with dropout it must be at most "
            "4294967296");
  AttentionSpec fits = BshdSpec({1 << 16, 1, 1, 1 << 16, 1, 1, 1});
  fits.dropout = spec.dropout;
  EXPECT_EQ(ValidateText(fits), "OK");
}

TEST(ValidateTest, DropoutIsNormalised) {
  AttentionSpec spec = BshdSpec();
  spec.dropout = DropoutSpec{0.5f, 11, 2};
  AttentionProblem p = *Validate(spec, Pass::kForward);
  ASSERT_TRUE(p.dropout.has_value());
  EXPECT_EQ(p.dropout->seed, 11u);
  EXPECT_EQ(p.dropout->offset, 2u);
  EXPECT_EQ(p.dropout->threshold, 32768u);
  spec.dropout->p = 0.0f;  // keeps everything: no dropout at all
  EXPECT_FALSE(Validate(spec, Pass::kForward)->dropout.has_value());
}

TEST(ValidateTest, RefusesBackwardInputs) {
  AttentionSpec spec = BshdSpec({2, 5, 7, 4, 2, 16, 8}, DType::kFp16);
  spec.out = spec.dout = Shape({2, 5, 4, 8}, DType::kFp16);
  spec.lse = spec.dlse = Shape({2, 4, 5});
  ExpectRefusals(
      spec, Pass::kBackward,
      {
          {[](auto& s) { s.out->dtype = DType::kBf16; },
           "out.dtype is BF16; it must be FP16, the dtype of q, or FP32"},
          {[](auto& s) {
             s.out->shape = {2, 5, 4, 16};
           },
           "out.shape[3] is 16; it must be head_dim_v 8 (out is [batch, seqlen_q, num_heads, "
           "head_dim_v])"},
          {[](auto& s) {
             s.dout->strides = {1, 1, 1, 3};
           },
           "dout.strides[3] is 3; the innermost stride must be 1"},
          {[](auto& s) {
             s.dout->shape = {2, 4, 5, 8};
           },
           "dout.shape[1] is 4; it must be seqlen_q 5 (dout is [batch, seqlen_q, num_heads, "
           "head_dim_v])"},
          {[](auto& s) { s.lse->dtype = DType::kFp16; }, "lse.dtype is FP16; it must be FP32"},
          {[](auto& s) {
             s.lse->shape = {2, 5, 4};
           },
           "lse.shape[1] is 5; it must be num_heads 4 (lse is [batch, num_heads, seqlen_q])"},
          {[](auto& s) {
             s.lse->strides = {20, 1, 4};
           },
           "lse.strides[2] is 4; the innermost stride must be 1"},
          {[](auto& s) {
             s.dlse->strides = {0, 5, 1};
           },
           "dlse.strides[0] is 0; dlse must be contiguous, so it must be 20"},
          {[](auto& s) {
             s.dlse->shape = {2, 4, 6};
           },
           "dlse.shape[2] is 6; it must be seqlen_q 5 (dlse is [batch, num_heads, seqlen_q])"},
      });
  AttentionSpec thd = ThdSpec({3, 2}, {4, 5});
  thd.lse = Shape({5, 4});
  EXPECT_EQ(ValidateText(thd, Pass::kBackward),
            "INVALID_ARGUMENT: lse.shape[0] is 5; it must be num_heads 4 (lse is [num_heads, "
            "total_q])");
}

TEST(ValidateTest, BackwardInputsMayBeLeftOutToPlan) {
  const AttentionProblem p =
      *Validate(BshdSpec({2, 5, 7, 4, 2, 16, 8}, DType::kBf16), Pass::kBackward);
  EXPECT_EQ(p.bwd_out_dtype, DType::kBf16);
  EXPECT_EQ(p.bwd_dout_dtype, DType::kBf16);
  EXPECT_EQ(p.bwd_dout.token, 4 * 8);
  EXPECT_FALSE(p.has_dlse);
}

TEST(ValidateTest, BackwardInputsMayBeStridedAndFp32) {
  AttentionSpec spec = BshdSpec({2, 5, 7, 4, 2, 16, 8}, DType::kBf16);
  spec.out = Shape({2, 5, 4, 8});
  spec.dout = Shape({2, 5, 4, 8}, DType::kBf16);
  spec.dout->strides = {0, 0, 0, 1};  // an expanded gradient of ones
  spec.dlse = Shape({2, 4, 5});
  const AttentionProblem p = *Validate(spec, Pass::kBackward);
  EXPECT_EQ(p.bwd_out_dtype, DType::kFp32);
  EXPECT_EQ(p.bwd_dout_dtype, DType::kBf16);
  EXPECT_EQ(p.bwd_dout.batch, 0);
  EXPECT_EQ(p.bwd_dout.head, 0);
  EXPECT_TRUE(p.has_dlse);
}

TEST(ValidateTest, UnlimitedLeftAndZeroRightIsCausal) {  // attention_cases 9
  AttentionSpec causal = BshdSpec();
  causal.causal = true;
  AttentionSpec window = BshdSpec();
  window.window_right = 0;
  const AttentionProblem a = *Validate(causal, Pass::kForward);
  const AttentionProblem b = *Validate(window, Pass::kForward);
  EXPECT_EQ(a.window_left, kUnlimited);
  EXPECT_EQ(a.window_right, 0);
  EXPECT_EQ(b.window_left, a.window_left);
  EXPECT_EQ(b.window_right, a.window_right);
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(a.VisibleKeys(a.sequences[0], i).begin, 0);
    EXPECT_EQ(a.VisibleKeys(a.sequences[0], i).end, i + 3);  // 7 - 5 + 1
  }
  causal.window_right = 0;
  EXPECT_EQ(ValidateText(causal), "OK");
  // A window wider than anything is the same as none, and does not overflow.
  window.window_left = kHuge;
  EXPECT_EQ(Validate(window, Pass::kForward)->window_left, kUnlimited);
}

TEST(ValidateTest, AlignmentUsesTheValidLengths) {
  AttentionSpec spec = BshdSpec();
  spec.seqlens_q = {5, 3};
  spec.seqlens_k = {2, 7};
  AttentionProblem p = *Validate(spec, Pass::kForward);
  EXPECT_EQ(p.sequences[0].off, -3);
  EXPECT_EQ(p.sequences[1].off, 4);
  EXPECT_EQ(p.sequences[1].rows_q, 5);
  EXPECT_EQ(p.sequences[1].len_q, 3);
  spec.alignment = Alignment::kTopLeft;
  p = *Validate(spec, Pass::kForward);
  EXPECT_EQ(p.sequences[0].off, 0);
  EXPECT_EQ(p.sequences[1].off, 0);
}

TEST(ValidateTest, PackedSequences) {  // attention_cases 6
  const AttentionProblem p = *Validate(ThdSpec({0, 1, 0, 1}, {0, 3, 0, 5}, 9, 3), Pass::kForward);
  EXPECT_EQ(p.batch, 4);
  EXPECT_EQ(p.total_q, 2);
  EXPECT_EQ(p.total_k, 8);
  EXPECT_EQ(p.seqlen_q, 1);
  EXPECT_EQ(p.seqlen_k, 5);
  EXPECT_EQ(p.sequences[3].q_token, 1);
  EXPECT_EQ(p.sequences[3].k_token, 3);
  EXPECT_EQ(p.sequences[3].off, 4);
  EXPECT_EQ(p.group(), 3);
}

TEST(ValidateTest, EmptyProblemsAreValid) {
  for (const BshdExtents& e :
       {BshdExtents{0, 5, 7}, BshdExtents{2, 0, 7}, BshdExtents{2, 5, 0}, BshdExtents{0, 0, 0}}) {
    AttentionSpec spec = BshdSpec(e);
    spec.bias = Shape({1, 1, e.seqlen_q, e.seqlen_k});
    spec.block_mask = BlockMaskSpec{
        Shape({1, 1, e.seqlen_q == 0 ? 0 : 1, e.seqlen_k == 0 ? 0 : 1}, DType::kUint8), 128, 128};
    EXPECT_EQ(ValidateText(spec, Pass::kBackward), "OK");
  }
  EXPECT_EQ(ValidateText(ThdSpec({}, {})), "OK");
  EXPECT_EQ(ValidateText(ThdSpec({0, 0}, {0, 3})), "OK");
  const AttentionProblem p = *Validate(BshdSpec({0, 5, 7}), Pass::kBackward);
  EXPECT_EQ(OutElements(p), 0);
  EXPECT_EQ(DkElements(p), 0);
}

TEST(ValidateTest, ManyHeadsAndBatchesAreValid) {  // attention_cases 8
  EXPECT_EQ(ValidateText(BshdSpec({1, 1, 1, 71280, 71280, 1, 1})), "OK");
  EXPECT_EQ(ValidateText(BshdSpec({65537, 1, 1, 1, 1, 1, 1})), "OK");
}

TEST(ValidateTest, DefaultsAreNormalised) {
  const AttentionProblem p = *Validate(BshdSpec({}, DType::kBf16), Pass::kForward);
  EXPECT_EQ(p.softmax_scale, 0.25f);  // 1 / sqrt(16)
  EXPECT_EQ(p.out_dtype, DType::kBf16);
  EXPECT_EQ(p.softcap, 0.0f);
  EXPECT_EQ(p.alignment, Alignment::kBottomRight);
  EXPECT_FALSE(p.alibi || p.bias || p.block_mask || p.dropout || p.has_sinks);
  EXPECT_EQ(OutElements(p), 2 * 5 * 4 * 16);
  EXPECT_EQ(LseElements(p), 2 * 4 * 5);
  EXPECT_EQ(DqElements(p), 2 * 5 * 4 * 16);
  EXPECT_EQ(DvElements(p), 2 * 7 * 2 * 16);
  EXPECT_EQ(DbiasElements(p), 0);
  AttentionSpec spec = BshdSpec({}, DType::kBf16);
  spec.out_dtype = DType::kFp32;
  spec.softmax_scale = 0.0f;  // zero is a value, not "unset"
  EXPECT_EQ(Validate(spec, Pass::kForward)->out_dtype, DType::kFp32);
  EXPECT_EQ(Validate(spec, Pass::kForward)->softmax_scale, 0.0f);
}

TEST(ValidateTest, OptionShapesAreKept) {
  AttentionSpec spec = BshdSpec();
  spec.bias = Shape({1, 4, 5, 7}, DType::kFp16);
  spec.alibi_slopes = Shape({2, 4});
  spec.sinks = Shape({4});
  spec.block_mask = BlockMaskSpec{Shape({2, 1, 3, 2}, DType::kUint8), 2, 4};
  const AttentionProblem p = *Validate(spec, Pass::kForward);
  EXPECT_EQ(p.bias->batch, 1);
  EXPECT_EQ(p.bias->heads, 4);
  EXPECT_EQ(p.bias->dtype, DType::kFp16);
  EXPECT_EQ(p.BiasRowOffset(1, 2, 3), (2 * 5 + 3) * 7);
  EXPECT_EQ(p.alibi->batch, 2);
  EXPECT_TRUE(p.has_sinks);
  EXPECT_EQ(p.block_mask->rows, 3);
  EXPECT_EQ(p.block_mask->block_k, 4);
  EXPECT_EQ(DbiasElements(p), 4 * 5 * 7);
}

TEST(TensorSpecTest, ElementsAndSpan) {
  EXPECT_EQ(Shape({}).NumElements(), 1);
  EXPECT_EQ(Shape({2, 3}).NumElements(), 6);
  EXPECT_EQ(Shape({2, 0, kHuge, kHuge}).NumElements(), 0);
  EXPECT_EQ(Shape({2, -1}).NumElements(), -1);
  EXPECT_EQ(Shape({0, -1}).NumElements(), -1);
  EXPECT_EQ(Shape({kHuge, 2}).NumElements(), -1);
  EXPECT_EQ(Shape({int64_t{1} << 31, int64_t{1} << 31}).NumElements(), -1);  // 2^62 is too many
  EXPECT_EQ(Shape({kMaxElements - 1}).NumElements(), kMaxElements - 1);
  EXPECT_EQ((TensorSpec{DType::kFp32, {3, 4}, {10, 1}}).SpanElements(), 24);
  EXPECT_EQ((TensorSpec{DType::kFp32, {3, 4}, {0, 1}}).SpanElements(), 4);
  EXPECT_EQ((TensorSpec{DType::kFp32, {0, 4}, {10, 1}}).SpanElements(), 0);
  EXPECT_EQ((TensorSpec{DType::kFp32, {2, 2}, {kMaxElements, 1}}).SpanElements(), -1);
  EXPECT_EQ((TensorSpec{DType::kFp32, {2, 2}, {kMaxElements - 3, 1}}).SpanElements(),
            kMaxElements - 1);
  EXPECT_EQ((TensorSpec{DType::kFp32, {2, 2}, {kMaxElements - 2, 1}}).SpanElements(), -1);
}

}  // namespace
}  // namespace attn
