// The checker itself: a correct implementation passes, each known fault is caught, in the tensor
// where it shows first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/exactness/check.h"
#include "tests/exactness/naive_backend.h"

namespace attn::exactness {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;

std::vector<Fault> Check(Mutation mutation, const Case& c) {
  const NaiveBackend backend(mutation);
  const Backend* const backends[] = {&backend};
  return CheckCall(Call(c), backends);
}

class CorrectTest : public ::testing::TestWithParam<Case> {};

TEST_P(CorrectTest, Passes) {
  const NaiveBackend plain(Mutation::kNone), rounded(Mutation::kRoundedOperands);
  const Backend* const both[] = {&plain, &rounded};  // fp32 operands are not rounded
  const size_t n = GetParam().dtype == DType::kFp32 ? 1 : 2;
  for (const Fault& f : CheckCall(Call(GetParam()), std::span(both, n))) {
    ADD_FAILURE() << f.what << ": " << f.details;
  }
}

// A share of the matrix: what every path must pass is tested on the paths themselves.
std::vector<Case> Share(std::vector<Case> cases, size_t step) {
  std::vector<Case> share;
  for (size_t n = 0; n < cases.size(); n += step) share.push_back(cases[n]);
  return share;
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) { return Name(info.param); }
INSTANTIATE_TEST_SUITE_P(Option, CorrectTest, ::testing::ValuesIn(Share(SingleOptionCases(), 2)),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Numbers, CorrectTest, ::testing::ValuesIn(Share(NumbersCases(), 7)),
                         CaseName);

struct Known {
  Mutation mutation;
  void (*apply)(Case& c);  // makes the fault matter
  const char* shows_in;
};

void PrintTo(const Known& known, std::ostream* os) { *os << Name(known.mutation); }

// Whether the fault is larger than what the dtype's own rounding allows.
bool Matters(Mutation mutation, DType dtype) {
  switch (mutation) {
    case Mutation::kTf32:  // of 16-bit operands, nothing is lost
    case Mutation::kCoarseExp:
      return dtype == DType::kFp32;
    case Mutation::kTanhApprox:
      return dtype != DType::kBf16;
    case Mutation::kLowAccumulator:
      return dtype != DType::kFp32;
    default:
      return true;
  }
}

class MutationTest : public ::testing::TestWithParam<std::tuple<Known, DType>> {};

TEST_P(MutationTest, IsCaught) {
  const auto& [known, dtype] = GetParam();
  Case c;
  c.dtype = dtype;
  c.batch = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.seqlen_q = 70;
  c.seqlen_k = 97;
  c.dim = 32;
  c.dim_v = 24;
  known.apply(c);
  EXPECT_THAT(Check(Mutation::kNone, c), ::testing::IsEmpty());
  EXPECT_THAT(Check(known.mutation, c), Contains(Field(&Fault::what, HasSubstr(known.shows_in))));
}

void Nothing(Case&) {}
void Causal(Case& c) { c.causal = true; }
void Softcap(Case& c) { c.softcap = 1.0f, c.bias = BiasShape::kFull; }
void Dropout(Case& c) { c.dropout = 0.3f; }
void Lengths(Case& c) { c.lens_q = {70, 33}, c.lens_k = {50, 97}; }

const Known kKnown[] = {
    {Mutation::kSeesNextKey, Causal, "forward out"},
    {Mutation::kMissesOwnKey, Causal, "forward out"},
    {Mutation::kWindowLeftLong, [](Case& c) { c.window_left = 30; }, "forward out"},
    {Mutation::kDropsLastKey, Nothing, "forward out"},
    {Mutation::kTopLeft, Causal, "forward out"},
    {Mutation::kNoScale, Nothing, "forward lse"},
    {Mutation::kLowAccumulator, Nothing, "forward out"},
    {Mutation::kTf32, Nothing, "forward out"},
    {Mutation::kCoarseExp, Nothing, "forward out"},
    {Mutation::kTanhApprox, [](Case& c) { c.softcap = 8.0f, c.numbers = Numbers::kTimes8; },
     "forward out"},
    {Mutation::kNoCapGradient, Softcap, "backward dq"},
    {Mutation::kCapAfterBias, Softcap, "forward out"},
    {Mutation::kFiniteLse, [](Case& c) { c.causal = true, c.seqlen_k = 40; }, "forward lse"},
    {Mutation::kLseBase2, Nothing, "forward lse"},
    {Mutation::kSinkNotInLse, [](Case& c) { c.sinks = true; }, "forward lse"},
    {Mutation::kAlibiByKey, [](Case& c) { c.alibi = 1, c.causal = true; }, "forward lse"},
    {Mutation::kWrongKvHead, Nothing, "forward out"},
    {Mutation::kDropoutUnscaled, Dropout, "forward out"},
    {Mutation::kDropoutInLse, Dropout, "forward lse"},
    {Mutation::kDropoutByTile, Dropout, "forward out"},
    {Mutation::kBlockTransposed,
     [](Case& c) { c.block_mask = true, c.block_q = 7, c.block_k = 13; }, "forward out"},
    {Mutation::kNoRowDot, Nothing, "backward dq"},
    {Mutation::kNoDlse, [](Case& c) { c.dlse = true; }, "backward dk"},
    {Mutation::kReadsPaddedDout, Lengths, "backward dv"},
    {Mutation::kGroupNotSummed, Nothing, "backward dk"},
    {Mutation::kDbiasNotSummed, [](Case& c) { c.bias = BiasShape::kSharedBoth; }, "backward dbias"},
    {Mutation::kDsinkSign, [](Case& c) { c.sinks = true; }, "backward dsink"},
    {Mutation::kPaddingUntouched, Lengths, "backward dk"},
    {Mutation::kWritesPastEnd, Nothing, "forward"},
};

std::vector<std::tuple<Known, DType>> KnownFaults() {
  std::vector<std::tuple<Known, DType>> faults;
  for (const Known& known : kKnown) {
    for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
      if (Matters(known.mutation, dtype)) faults.emplace_back(known, dtype);
    }
  }
  return faults;
}

INSTANTIATE_TEST_SUITE_P(Known, MutationTest, ::testing::ValuesIn(KnownFaults()),
                         [](const auto& info) {
                           return Name(std::get<0>(info.param).mutation) + "_" +
                                  std::string(LowerName(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace attn::exactness
