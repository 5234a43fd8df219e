// Every gradient of the reference against finite differences of its forward, in float64.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <ostream>
#include <string>

#include "tests/reference/small_call.h"

namespace attn::reference {
namespace {

double Loss(const SmallCall& call) {
  const Result r = call.Forward();
  double loss = 0.0;
  for (size_t n = 0; n < r.out.value.size(); ++n) loss += call.dout[n] * r.out.value[n];
  for (size_t n = 0; n < call.dlse.size(); ++n) {
    if (std::isfinite(r.lse.value[n])) loss += call.dlse[n] * r.lse.value[n];
  }
  return loss;
}

// Central difference, extrapolated twice: error of order step^6.
double Slope(const SmallCall& call, float& entry) {
  const float at = entry;
  std::array<double, 3> d;
  for (int level = 0; level < 3; ++level) {
    const float step = std::ldexp(1.0f, -5 - level);
    entry = at + step;
    const double plus = Loss(call);
    entry = at - step;
    d[level] = (plus - Loss(call)) / (2.0 * step);
  }
  entry = at;
  const double a = (4 * d[1] - d[0]) / 3, b = (4 * d[2] - d[1]) / 3;
  return (16 * b - a) / 15;
}

void ExpectSlopes(SmallCall& call, std::vector<float>& entries, const Tensor& gradient,
                  const char* name) {
  ASSERT_EQ(entries.size(), gradient.value.size()) << name;
  for (size_t n = 0; n < entries.size(); ++n) {
    if (std::isinf(entries[n])) {
      EXPECT_EQ(gradient.value[n], 0.0) << name << "[" << n << "]";
      continue;
    }
    EXPECT_NEAR(Slope(call, entries[n]), gradient.value[n], 2e-8) << name << "[" << n << "]";
  }
}

struct Options {
  const char* name;
  std::function<void(SmallCall&)> apply;
};

void PrintTo(const Options& options, std::ostream* os) { *os << options.name; }

class GradientTest : public ::testing::TestWithParam<Options> {};

TEST_P(GradientTest, AgreesWithFiniteDifferences) {
  SmallCall call(2, 5, 6, 4, 2, 4, 3);
  GetParam().apply(call);
  const Result r = call.Backward();
  ExpectSlopes(call, call.q, r.dq, "dq");
  ExpectSlopes(call, call.k, r.dk, "dk");
  ExpectSlopes(call, call.v, r.dv, "dv");
  if (call.spec.bias) ExpectSlopes(call, call.bias, r.dbias, "dbias");
  if (call.spec.sinks) ExpectSlopes(call, call.sinks, r.dsink, "dsink");
}

const float kMinusInfinity = -std::numeric_limits<float>::infinity();

const Options kOptions[] = {
    {"Plain", [](SmallCall&) {}},
    {"Dlse", [](SmallCall& c) { c.AddDlse(); }},
    {"CausalMoreQueries",
     [](SmallCall& c) {
       c.spec.causal = true;
       c.spec.seqlens_k = {2, 6};
       c.AddDlse();
     }},
    {"CausalTopLeft",
     [](SmallCall& c) {
       c.spec.causal = true;
       c.spec.alignment = Alignment::kTopLeft;
     }},
    {"Window",
     [](SmallCall& c) {
       c.spec.window_left = 1;
       c.spec.window_right = 2;
       c.AddDlse();
     }},
    {"Lengths",
     [](SmallCall& c) {
       c.spec.seqlens_q = {3, 5};
       c.spec.seqlens_k = {6, 0};
       c.AddDlse();
       c.AddSinks();
     }},
    {"Softcap",
     [](SmallCall& c) {
       c.spec.softcap = 0.75f;
       c.spec.softmax_scale = 1.5f;
       c.AddDlse();
     }},
    {"Alibi", [](SmallCall& c) { c.AddAlibi(2); }},
    {"Bias",
     [](SmallCall& c) {
       c.AddBias(2, 4);
       c.AddDlse();
     }},
    {"BiasBroadcast", [](SmallCall& c) { c.AddBias(1, 1); }},
    {"BiasHides",
     [](SmallCall& c) {
       c.AddBias(1, 4);
       for (size_t n = 0; n < c.bias.size(); n += 3) c.bias[n] = kMinusInfinity;
       for (size_t n = 0; n < 6; ++n) c.bias[n] = kMinusInfinity;  // a row without keys
       c.AddDlse();
     }},
    {"Sinks",
     [](SmallCall& c) {
       c.AddSinks();
       c.sinks[1] = kMinusInfinity;
       c.AddDlse();
     }},
    {"SinksAndRowsWithoutKeys",
     [](SmallCall& c) {
       c.AddSinks();
       c.AddDlse();
       c.spec.causal = true;
       c.spec.seqlens_k = {1, 2};
     }},
    {"Dropout",
     [](SmallCall& c) {
       c.spec.dropout = DropoutSpec{.p = 0.4f, .seed = 77, .offset = 3};
       c.AddDlse();
     }},
    {"Blocks",
     [](SmallCall& c) {
       c.spec.block_mask =
           BlockMaskSpec{.mask = {.dtype = DType::kUint8, .shape = {2, 1, 3, 2}, .strides = {}},
                         .block_q = 2,
                         .block_k = 4};
       c.block_mask = {1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0};
     }},
    {"Everything",
     [](SmallCall& c) {
       c.spec.causal = true;
       c.spec.window_left = 3;
       c.spec.seqlens_q = {5, 4};
       c.spec.seqlens_k = {6, 3};
       c.spec.softcap = 2.0f;
       c.spec.softmax_scale = -0.8f;
       c.spec.dropout = DropoutSpec{.p = 0.25f, .seed = uint64_t{1} << 40, .offset = 0};
       c.AddAlibi(1);
       c.AddBias(2, 1);
       c.AddSinks();
       c.AddDlse();
     }},
};

INSTANTIATE_TEST_SUITE_P(Option, GradientTest, ::testing::ValuesIn(kOptions),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace attn::reference
