#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "server/rpc/convert.h"

namespace attn::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

void Fill(v1::Tensor* tensor, std::vector<int64_t> shape, uint32_t payload) {
  tensor->set_dtype(v1::DTYPE_FP32);
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  tensor->set_payload(payload);
}

// batch 1, 3 queries and 3 keys, 2 heads of 8.
v1::BackwardRequestHeader Header() {
  v1::BackwardRequestHeader header;
  header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  header.mutable_shape()->set_num_heads(2);
  header.mutable_shape()->set_num_kv_heads(2);
  Fill(header.mutable_q(), {1, 3, 2, 8}, 0);
  Fill(header.mutable_k(), {1, 3, 2, 8}, 1);
  Fill(header.mutable_v(), {1, 3, 2, 8}, 2);
  return header;
}

struct ErrorCase {
  const char* name;
  std::function<void(v1::BackwardRequestHeader&)> spoil;
  absl::StatusCode code;
  const char* message;
  Pass pass = Pass::kForward;
};

class ConvertErrorTest : public testing::TestWithParam<ErrorCase> {};

TEST_P(ConvertErrorTest, NamesTheField) {
  v1::BackwardRequestHeader header = Header();
  GetParam().spoil(header);
  ConvertedHeader converted;
  const absl::Status status = Convert(header, GetParam().pass, Purpose::kRun, &converted);
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(status.ToString(), HasSubstr(GetParam().message));
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kUnknown = absl::StatusCode::kUnimplemented;
using H = v1::BackwardRequestHeader;

INSTANTIATE_TEST_SUITE_P(
    All, ConvertErrorTest,
    testing::Values(
        ErrorCase{"NoShape", [](H& h) { h.clear_shape(); }, kInvalid, "shape is required"},
        ErrorCase{"NoLayout", [](H& h) { h.mutable_shape()->clear_layout(); }, kInvalid,
                  "shape.layout is required"},
        ErrorCase{"UnknownLayout",
                  [](H& h) { h.mutable_shape()->set_layout(static_cast<v1::Layout>(7)); }, kUnknown,
                  "shape.layout has the value 7"},
        ErrorCase{"NoQ", [](H& h) { h.clear_q(); }, kInvalid, "q is required"},
        ErrorCase{"NoK", [](H& h) { h.clear_k(); }, kInvalid, "k is required"},
        ErrorCase{"NoV", [](H& h) { h.clear_v(); }, kInvalid, "v is required"},
        ErrorCase{"NoDType", [](H& h) { h.mutable_q()->clear_dtype(); }, kInvalid,
                  "q.dtype is required"},
        ErrorCase{"UnknownDType",
                  [](H& h) { h.mutable_k()->set_dtype(static_cast<v1::DType>(99)); }, kUnknown,
                  "k.dtype has the value 99"},
        ErrorCase{"NoSource", [](H& h) { h.mutable_v()->clear_payload(); }, kInvalid,
                  "v has no source"},
        ErrorCase{"UnknownAlignment",
                  [](H& h) { h.mutable_options()->set_alignment(static_cast<v1::Alignment>(3)); },
                  kUnknown, "options.alignment has the value 3"},
        ErrorCase{"NoSeed", [](H& h) { h.mutable_options()->mutable_dropout()->set_p(0.5f); },
                  kInvalid, "options.dropout.seed is required"},
        ErrorCase{"NoMask", [](H& h) { h.mutable_options()->mutable_block_mask(); }, kInvalid,
                  "options.block_mask.mask is required"},
        ErrorCase{"BiasWithoutDType", [](H& h) { h.mutable_options()->mutable_bias(); }, kInvalid,
                  "options.bias.dtype is required"},
        ErrorCase{"UnknownOutDType",
                  [](H& h) { h.mutable_options()->set_out_dtype(static_cast<v1::DType>(50)); },
                  kUnknown, "options.out_dtype has the value 50"},
        ErrorCase{
            "UnknownPolicy",
            [](H& h) { h.mutable_path_policy()->set_mode(static_cast<v1::PathPolicyMode>(12)); },
            kUnknown, "path_policy.mode has the value 12"},
        ErrorCase{"UnknownPath",
                  [](H& h) {
                    h.mutable_path_policy()->set_mode(v1::PATH_POLICY_NAMED);
                    h.mutable_path_policy()->set_path("flash_tpu");
                  },
                  kInvalid, "flash_tpu"},
        ErrorCase{"PathWithoutNamed", [](H& h) { h.mutable_path_policy()->set_path("flash_cpu"); },
                  kInvalid, "path_policy.mode is not PATH_POLICY_NAMED"},
        ErrorCase{"UnknownReportLevel",
                  [](H& h) { h.set_report_level(static_cast<v1::ReportLevel>(5)); }, kUnknown,
                  "report_level has the value 5"},
        ErrorCase{"NoOut", [](H&) {}, kInvalid, "out is required", Pass::kBackward},
        ErrorCase{"NoLse",
                  [](H& h) {
                    Fill(h.mutable_out(), {1, 3, 2, 8}, 3);
                  },
                  kInvalid, "lse is required", Pass::kBackward}),
    [](const auto& info) { return info.param.name; });

TEST(ConvertTest, ForwardIgnoresWhatOnlyBackwardHas) {
  v1::BackwardRequestHeader header = Header();
  header.mutable_dout();  // malformed, were it looked at
  ConvertedHeader converted;
  ASSERT_TRUE(Convert(header, Pass::kForward, Purpose::kRun, &converted).ok());
  EXPECT_FALSE(converted.spec.dout.has_value());
}

TEST(ConvertTest, ZeroOptionsAreKeptApartFromUnset) {
  v1::BackwardRequestHeader header = Header();
  header.mutable_options()->set_window_left(0);
  header.mutable_options()->set_softmax_scale(0.0f);
  ConvertedHeader converted;
  ASSERT_TRUE(Convert(header, Pass::kForward, Purpose::kRun, &converted).ok());
  EXPECT_EQ(converted.spec.window_left, 0);
  EXPECT_EQ(converted.spec.softmax_scale, 0.0f);
  EXPECT_FALSE(converted.spec.window_right.has_value());
}

class PayloadTest : public testing::Test {
 protected:
  ConvertedHeader Converted(const v1::BackwardRequestHeader& header) {
    ConvertedHeader converted;
    EXPECT_TRUE(Convert(header, Pass::kForward, Purpose::kRun, &converted).ok());
    return converted;
  }
};

TEST_F(PayloadTest, SizesAreWhatTheTensorsNeed) {
  v1::BackwardRequestHeader header = Header();
  header.mutable_v()->set_payload(0);  // q and v share a payload
  header.mutable_v()->set_offset_bytes(192);
  ConvertedHeader converted = Converted(header);
  std::vector<uint64_t> sizes;
  ASSERT_TRUE(LocatePayloads(&converted, &sizes).ok());
  EXPECT_THAT(sizes, ElementsAre(384, 192));
  EXPECT_TRUE(CheckPayloadSizes(converted, sizes).ok());
}

TEST_F(PayloadTest, StridesCount) {
  v1::BackwardRequestHeader header = Header();
  for (int64_t stride : {999, 20, 8, 1}) header.mutable_q()->add_strides(stride);
  ConvertedHeader converted = Converted(header);
  std::vector<uint64_t> sizes;
  ASSERT_TRUE(LocatePayloads(&converted, &sizes).ok());
  EXPECT_EQ(sizes[0], (2 * 20 + 8 + 7 + 1) * 4u);
}

TEST_F(PayloadTest, BadPlacesAreNamed) {
  std::vector<uint64_t> sizes;
  v1::BackwardRequestHeader header = Header();
  header.mutable_q()->set_offset_bytes(2);
  ConvertedHeader converted = Converted(header);
  EXPECT_THAT(LocatePayloads(&converted, &sizes).ToString(),
              AllOf(HasSubstr("q.offset_bytes is 2"), HasSubstr("multiple")));
  header = Header();
  header.mutable_q()->set_payload(1000);
  converted = Converted(header);
  EXPECT_THAT(LocatePayloads(&converted, &sizes).ToString(), HasSubstr("q.payload is 1000"));
  header = Header();
  header.mutable_v()->set_payload(3);
  converted = Converted(header);
  EXPECT_THAT(LocatePayloads(&converted, &sizes).ToString(), HasSubstr("payload 2 is not named"));
  header = Header();
  header.mutable_k()->set_offset_bytes(~uint64_t{0} - 3);
  converted = Converted(header);
  EXPECT_FALSE(LocatePayloads(&converted, &sizes).ok());
}

TEST_F(PayloadTest, ShortMissingAndSurplusPayloadsAreNamed) {
  ConvertedHeader converted = Converted(Header());
  std::vector<uint64_t> sizes;
  ASSERT_TRUE(LocatePayloads(&converted, &sizes).ok());
  EXPECT_THAT(CheckPayloadSizes(converted, std::vector<uint64_t>{192, 191, 192}).ToString(),
              AllOf(HasSubstr("k needs 192 bytes"), HasSubstr("payload 1"), HasSubstr("191")));
  EXPECT_THAT(CheckPayloadSizes(converted, std::vector<uint64_t>{192, 192}).ToString(),
              AllOf(HasSubstr("v.payload is 2"), HasSubstr("2 payloads")));
  EXPECT_THAT(CheckPayloadSizes(converted, std::vector<uint64_t>{192, 192, 192, 1}).ToString(),
              HasSubstr("no tensor names payload 3"));
  EXPECT_TRUE(CheckPayloadSizes(converted, std::vector<uint64_t>{192, 192, 500}).ok());
}

TEST(ConvertTest, ReasonsHaveTheSameValuesOnTheWire) {
  for (Reason reason : kAllReasons) {
    EXPECT_EQ(v1::Reason_Name(ToProto(reason)), "REASON_" + std::string(Name(reason)));
  }
  EXPECT_EQ(kAllReasons.size() + 1, static_cast<size_t>(v1::Reason_ARRAYSIZE));
}

}  // namespace
}  // namespace attn::server
