#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "client/cli/check.h"
#include "client/cli/merge_results.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBatch = 2, kTokens = 3, kHeads = 2, kDim = 4, kKeys = 7;

// A number that depends on all of its arguments.
double Logit(int64_t b, int64_t t, int64_t h, int64_t j) {
  return std::sin(1.0 + 3 * b + 5 * t + 11 * h + 17 * j) * 4;
}
double Value(int64_t b, int64_t j, int64_t h, int64_t d) {
  return std::cos(2.0 + 7 * b + 3 * j + 5 * h + 13 * d);
}

struct Direct {
  std::vector<float> out, lse;
};

// Softmax over keys [begin, end): out [batch, tokens, heads, dim], lse [batch, heads, tokens].
Direct Compute(int64_t begin, int64_t end) {
  Direct direct{std::vector<float>(kBatch * kTokens * kHeads * kDim),
                std::vector<float>(kBatch * kHeads * kTokens)};
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        double sum = 0;
        for (int64_t j = begin; j < end; ++j) sum += std::exp(Logit(b, t, h, j));
        direct.lse[(b * kHeads + h) * kTokens + t] = static_cast<float>(std::log(sum));
        for (int64_t d = 0; d < kDim; ++d) {
          double out = 0;
          for (int64_t j = begin; j < end; ++j) {
            out += std::exp(Logit(b, t, h, j)) / sum * Value(b, j, h, d);
          }
          direct.out[((b * kTokens + t) * kHeads + h) * kDim + d] =
              begin == end ? 0.0f : static_cast<float>(out);
        }
      }
    }
  }
  return direct;
}

std::string PartFile(const Direct& direct) {
  const std::string out = Raw(direct.out), lse = Raw(direct.lse);
  return SafetensorsFile(
      {{"out", FileDType::kF32, "", {kBatch, kTokens, kHeads, kDim}, AsBytes(out)},
       {"lse", FileDType::kF32, "", {kBatch, kHeads, kTokens}, AsBytes(lse)}});
}

TEST(MergeTest, PartsOverDisjointKeysGiveTheWhole) {
  TempFolder folder;
  const std::string a = folder.Write("a.safetensors", PartFile(Compute(0, 2)));
  const std::string b = folder.Write("b.safetensors", PartFile(Compute(2, 2)));  // no keys
  const std::string c = folder.Write("c.safetensors", PartFile(Compute(2, kKeys)));
  const std::string merged = folder / "m.safetensors";
  const Ran ran = RunCommand({"merge", a, b, c, "--output", merged, "--json"});
  ASSERT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("\"command\": \"merge\""));

  const Direct whole = Compute(0, kKeys);
  absl::StatusOr<FileTensor> out = OpenTensor(merged, "out");
  absl::StatusOr<FileTensor> lse = OpenTensor(merged, "lse");
  ASSERT_TRUE(out.ok() && lse.ok());
  for (size_t i = 0; i < whole.out.size(); ++i) {
    EXPECT_NEAR(ElementAsDouble(*out, i), whole.out[i], 1e-6) << i;
  }
  for (size_t i = 0; i < whole.lse.size(); ++i) {
    EXPECT_NEAR(ElementAsDouble(*lse, i), whole.lse[i], 1e-6) << i;
  }
}

// THD: the same numbers with the batch axis of 1 gone.
TEST(MergeTest, PackedLayout) {
  const std::string out = Raw<float>({1, 2, 3, 4, 5, 6});  // [3, 2, 1]
  const std::string lse = Raw<float>({0, 0, 0, 0, 0, 0});  // [2, 3]
  const std::string zeros = Raw(std::vector<float>(6, 0.0f));
  const auto part = [&](const std::string& data) {
    return Partial{{"p: out", FileDType::kF32, "F32", {3, 2, 1}, nullptr, AsBytes(data)},
                   {"p: lse", FileDType::kF32, "F32", {2, 3}, nullptr, AsBytes(lse)}};
  };
  const std::vector<Partial> parts = {part(out), part(zeros)};
  absl::StatusOr<Merged> merged = MergeResults(parts);
  ASSERT_TRUE(merged.ok()) << merged.status();
  float values[6], lses[6];
  std::memcpy(values, merged->out.bytes.data(), sizeof(values));
  std::memcpy(lses, merged->lse.bytes.data(), sizeof(lses));
  for (int i = 0; i < 6; ++i) {
    EXPECT_FLOAT_EQ(values[i], (i + 1) / 2.0f);
    EXPECT_FLOAT_EQ(lses[i], std::log(2.0f));
  }
}

TEST(MergeTest, RefusesPartsThatDoNotFit) {
  TempFolder folder;
  const std::string good = folder.Write("good.safetensors", PartFile(Compute(0, 2)));
  Direct broken = Compute(2, 4);
  broken.lse[3] = std::numeric_limits<float>::quiet_NaN();
  const std::string nan = folder.Write("nan.safetensors", PartFile(broken));
  const std::string x = Raw(std::vector<float>(12, 0.0f));
  const std::string swapped = folder.Write(
      "swapped.safetensors",
      SafetensorsFile({{"out", FileDType::kF32, "", {1, 3, 2, 2}, AsBytes(x)},
                       {"lse", FileDType::kF32, "", {1, 3, 2}, AsBytes(x).first(24)}}));
  const std::string lone = folder.Write(
      "lone.safetensors", SafetensorsFile({{"out", FileDType::kF32, "", {12}, AsBytes(x)}}));
  const std::string output = folder / "m.safetensors";
  Ran ran = RunCommand({"merge", good, nan, "--output", output});
  EXPECT_EQ(ran.exit_code, 2);
  EXPECT_THAT(ran.err, HasSubstr("lse"));
  ran = RunCommand({"merge", swapped, "--output", output});
  EXPECT_EQ(ran.exit_code, 2);
  EXPECT_THAT(ran.err, HasSubstr("belongs [1, 2, 3]"));
  ran = RunCommand({"merge", good, lone, "--output", output});
  EXPECT_EQ(ran.exit_code, 2);
  EXPECT_THAT(ran.err, HasSubstr("has no tensor 'lse'"));
  EXPECT_EQ(RunCommand({"merge", "--output", output}).exit_code, 2);
  EXPECT_EQ(RunCommand({"merge", good, "--output", folder / "m.npy"}).exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(output));
}

NamedTensor Result(const std::string& name, const std::vector<float>& values) {
  client::HostTensor tensor =
      client::HostTensor::Allocate(client::v1::DTYPE_FP32, {static_cast<int64_t>(values.size())});
  std::memcpy(tensor.mutable_bytes().data(), values.data(), values.size() * 4);
  return {name, tensor};
}

TensorMap Expected(const std::string& name, const std::string& doubles) {
  return {{name,
           {name,
            FileDType::kF64,
            "F64",
            {static_cast<int64_t>(doubles.size() / 8)},
            nullptr,
            AsBytes(doubles)}}};
}

TEST(CheckTest, ErrorIsRelativeToTheLargestValue) {
  const std::string expected = Raw<double>({100.0, 0.0});
  absl::StatusOr<std::vector<TensorCheck>> checks =
      CheckResults({Result("out", {100.0f, 0.0005f})}, Expected("out", expected), "",
                   client::v1::DTYPE_FP32, std::nullopt);
  ASSERT_TRUE(checks.ok()) << checks.status();
  EXPECT_NEAR((*checks)[0].error, 5e-6, 1e-9);
  EXPECT_TRUE(AllPassed(*checks));
  checks = CheckResults({Result("out", {100.0f, 0.0005f})}, Expected("out", expected), "",
                        client::v1::DTYPE_FP32, 1e-6);
  EXPECT_FALSE(AllPassed(*checks));
}

TEST(CheckTest, InfinitiesMustAgreeAndNanNeverPasses) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto passes = [&](float actual, double wanted) {
    const std::string expected = Raw<double>({wanted, 1.0});
    absl::StatusOr<std::vector<TensorCheck>> checks =
        CheckResults({Result("lse", {actual, 1.0f})}, Expected("lse", expected), "",
                     client::v1::DTYPE_FP32, 1e9);
    return AllPassed(*checks);
  };
  EXPECT_TRUE(passes(-inf, -inf));
  EXPECT_FALSE(passes(inf, -inf));
  EXPECT_FALSE(passes(0, -inf));
  EXPECT_FALSE(passes(-inf, 0));
  EXPECT_FALSE(passes(std::nanf(""), 0));
  EXPECT_FALSE(passes(std::nanf(""), std::nan("")));
}

TEST(CheckTest, ShapesMustAgreeAndSomethingMustBeChecked) {
  const std::string three = Raw<double>({1, 2, 3});
  absl::StatusOr<std::vector<TensorCheck>> checks = CheckResults(
      {Result("out", {1, 2})}, Expected("out", three), "", client::v1::DTYPE_FP32, std::nullopt);
  ASSERT_TRUE(checks.ok());
  EXPECT_FALSE(AllPassed(*checks));
  EXPECT_THAT((*checks)[0].problem, HasSubstr("shape [2], expected [3]"));
  EXPECT_FALSE(CheckResults({Result("out", {1, 2})}, Expected("dq", three), "",
                            client::v1::DTYPE_FP32, std::nullopt)
                   .ok());
}

}  // namespace
}  // namespace attn::cli
