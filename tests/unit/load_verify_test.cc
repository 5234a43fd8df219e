#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/load/verify.h"

namespace attn::load {
namespace {

using client::HostTensor;
using ::testing::HasSubstr;

constexpr int64_t kHeads = 2, kDim = 4;

HostTensor Make(std::vector<int64_t> shape, float first) {
  HostTensor tensor = HostTensor::Allocate(v1::DTYPE_FP32, std::move(shape));
  const std::span<std::byte> bytes = tensor.mutable_bytes();
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    const float value = first + 0.25f * static_cast<float>(i % 7);
    std::memcpy(&bytes[4 * i], &value, 4);
  }
  return tensor;
}

float At(const HostTensor& tensor, size_t i) {
  float value = 0;
  std::memcpy(&value, &tensor.bytes[4 * i], 4);
  return value;
}

void Set(HostTensor* tensor, size_t i, float value) {
  std::memcpy(&tensor->mutable_bytes()[4 * i], &value, 4);
}

// One query and one key: out is v, lse the one logit, dv is dout, dq and dk are 0.
MixEntry OneKey(bool backward) {
  MixEntry entry;
  entry.name = "one-key";
  client::AttentionInputs in;
  in.q = Make({1, 1, kHeads, kDim}, -1);
  in.k = Make({1, 1, kHeads, kDim}, 0.5);
  in.v = Make({1, 1, kHeads, kDim}, 2);
  const auto fill = [&](auto* header) {
    header->mutable_shape()->set_layout(v1::LAYOUT_BSHD);
    header->mutable_shape()->set_num_heads(kHeads);
    header->mutable_shape()->set_num_kv_heads(kHeads);
    header->mutable_options()->set_softmax_scale(0.5f);
  };
  fill(&entry.forward.header);
  entry.forward.inputs = in;
  if (!backward) return entry;
  entry.pass = v1::PASS_BACKWARD;
  fill(&entry.backward.header);
  entry.backward.inputs = in;
  entry.backward.dout = Make({1, 1, kHeads, kDim}, -0.5);
  return entry;
}

std::vector<HostTensor> RightForward(const MixEntry& entry) {
  HostTensor out = Make({1, 1, kHeads, kDim}, 2);
  HostTensor lse = HostTensor::Allocate(v1::DTYPE_FP32, {1, kHeads, 1});
  for (int64_t h = 0; h < kHeads; ++h) {
    double logit = 0;
    for (int64_t d = 0; d < kDim; ++d) {
      logit +=
          0.5 * At(entry.forward.inputs.q, h * kDim + d) * At(entry.forward.inputs.k, h * kDim + d);
    }
    Set(&lse, h, static_cast<float>(logit));
  }
  return {out, lse};
}

std::unique_ptr<Verifier> MakeVerifier(const MixEntry& entry) {
  auto verifier = Verifier::Create({entry});
  EXPECT_TRUE(verifier.ok()) << verifier.status();
  return *std::move(verifier);
}

TEST(VerifierTest, TakesWhatIsRight) {
  const MixEntry entry = OneKey(false);
  const auto verifier = MakeVerifier(entry);
  for (int i = 0; i < 10; ++i) verifier->Offer(0, RightForward(entry), "t");
  const Verification result = verifier->Result();
  EXPECT_EQ(result.replies, 10);
  EXPECT_EQ(result.wrong, 0);
  EXPECT_LE(result.worst_ratio.at("out"), 1);
  EXPECT_LE(result.worst_ratio.at("lse"), 1);
}

TEST(VerifierTest, FindsOneElementThatIsOff) {
  const MixEntry entry = OneKey(false);
  const auto verifier = MakeVerifier(entry);
  std::vector<HostTensor> results = RightForward(entry);
  // 2^-18 of the value: some 16 units of the rule's fp32.
  Set(&results[0], 5, At(results[0], 5) * (1 + 0x1p-18f));
  verifier->Offer(0, results, "trace-1");
  results = RightForward(entry);
  Set(&results[1], 1, NAN);
  verifier->Offer(0, results, "trace-2");
  const Verification result = verifier->Result();
  EXPECT_EQ(result.wrong, 2);
  ASSERT_EQ(result.faults.size(), 2u);
  EXPECT_THAT(result.faults[0], HasSubstr("one-key, trace trace-1: out index 5"));
  EXPECT_THAT(result.faults[1], HasSubstr("lse"));
  EXPECT_GT(result.worst_ratio.at("out"), 1);
}

TEST(VerifierTest, ChecksGradients) {
  const MixEntry entry = OneKey(true);
  const auto verifier = MakeVerifier(entry);
  const HostTensor zero = HostTensor::Allocate(v1::DTYPE_FP32, {1, 1, kHeads, kDim});
  verifier->Offer(0, {zero, zero, entry.backward.dout}, "right");
  EXPECT_EQ(verifier->Result().wrong, 0);
  verifier->Offer(0, {zero, zero, zero}, "wrong");
  EXPECT_EQ(verifier->Result().wrong, 1);
  EXPECT_THAT(verifier->Result().faults[0], HasSubstr("dv"));
}

TEST(VerifierTest, ShapesMustAgree) {
  const MixEntry entry = OneKey(false);
  const auto verifier = MakeVerifier(entry);
  std::vector<HostTensor> results = RightForward(entry);
  verifier->Offer(0, {results[1], results[1]}, "t");
  verifier->Offer(0, {results[0]}, "t");
  EXPECT_EQ(verifier->Result().wrong, 2);
}

TEST(VerifierTest, RefusesAnInvalidCall) {
  MixEntry entry = OneKey(false);
  entry.forward.header.mutable_shape()->set_num_heads(3);
  const auto verifier = Verifier::Create({entry});
  ASSERT_FALSE(verifier.ok());
  EXPECT_THAT(std::string(verifier.status().message()), HasSubstr("one-key"));
}

TEST(SpecOfTest, CarriesEveryOption) {
  MixEntry entry = OneKey(false);
  v1::AttentionOptions* options = entry.forward.header.mutable_options();
  options->set_causal(true);
  options->set_alignment(v1::ALIGNMENT_TOP_LEFT);
  options->set_window_left(3);
  options->set_softcap(2.5f);
  options->add_seqlens_k(1);
  options->set_out_dtype(v1::DTYPE_FP32);
  options->mutable_dropout()->set_p(0.25f);
  options->mutable_dropout()->set_seed(9);
  options->mutable_dropout()->set_offset(4);
  options->mutable_block_mask()->set_block_q(64);
  entry.forward.inputs.block_mask = HostTensor::Allocate(v1::DTYPE_UINT8, {1, 1, 1, 1});
  entry.forward.inputs.alibi_slopes = Make({kHeads}, 0.5);
  entry.forward.inputs.bias = Make({1, 1, 1, 1}, 0.5);
  entry.forward.inputs.sinks = Make({kHeads}, 0.5);
  const auto spec = SpecOf(entry);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->causal);
  EXPECT_EQ(spec->alignment, Alignment::kTopLeft);
  EXPECT_EQ(spec->window_left, 3);
  EXPECT_FALSE(spec->window_right.has_value());
  EXPECT_EQ(spec->softmax_scale, 0.5f);
  EXPECT_EQ(spec->softcap, 2.5f);
  EXPECT_EQ(spec->seqlens_k, std::vector<int64_t>{1});
  EXPECT_EQ(spec->out_dtype, DType::kFp32);
  EXPECT_EQ(spec->dropout->p, 0.25f);
  EXPECT_EQ(spec->dropout->seed, 9u);
  EXPECT_EQ(spec->dropout->offset, 4u);
  EXPECT_EQ(spec->block_mask->block_q, 64);
  EXPECT_EQ(spec->block_mask->block_k, 128);
  EXPECT_TRUE(spec->alibi_slopes && spec->bias && spec->sinks);
}

}  // namespace
}  // namespace attn::load
