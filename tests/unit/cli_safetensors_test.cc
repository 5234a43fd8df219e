#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/cli/safetensors.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string File(const std::string& header, const std::string& data = "") {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
  return file + header + data;
}

std::string Tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

std::string ErrorOf(const std::string& file) {
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(AsBytes(file));
  EXPECT_FALSE(entries.ok());
  if (entries.ok()) return "";
  EXPECT_EQ(entries.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(entries.status().message());
}

TEST(SafetensorsTest, ReadsBackWhatItWrites) {
  const std::string data(2 * 3 * 5 * 8, 'd');
  std::vector<SafetensorsEntry> entries;
  for (const FileDType dtype :
       {FileDType::kBool, FileDType::kU8, FileDType::kI8, FileDType::kF16, FileDType::kBF16,
        FileDType::kI16, FileDType::kU16, FileDType::kF32, FileDType::kI32, FileDType::kU32,
        FileDType::kF64, FileDType::kI64, FileDType::kU64}) {
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{}, {0}, {3}, {2, 0}, {2, 3, 5}}) {
      int64_t bytes = SizeOf(dtype);
      for (const int64_t extent : shape) bytes *= extent;
      entries.push_back({std::string(Name(dtype)) + ShapeString(shape), dtype, "", shape,
                         AsBytes(data).subspan(0, bytes)});
    }
  }
  const size_t count = entries.size();
  std::string file = SafetensorsPrefix(&entries, {{"made", "here"}, {"quote", "\"\n"}});
  const size_t prefix_size = file.size();
  EXPECT_EQ(prefix_size % 8, 0u);
  for (const SafetensorsEntry& entry : entries) file.append(entry.data.size(), 'd');

  absl::StatusOr<std::vector<SafetensorsEntry>> parsed = ParseSafetensors(AsBytes(file));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->size(), count);
  std::map<std::string, SafetensorsEntry> by_name;
  for (const SafetensorsEntry& entry : *parsed) by_name[entry.name] = entry;
  ASSERT_EQ(by_name.size(), count);
  for (const SafetensorsEntry& entry : entries) {
    const SafetensorsEntry& read = by_name[entry.name];
    EXPECT_EQ(read.dtype, entry.dtype) << entry.name;
    EXPECT_EQ(read.shape, entry.shape) << entry.name;
    EXPECT_EQ(read.data.size(), entry.data.size()) << entry.name;
    // Aligned within the file to its element size.
    const int64_t at = read.data.data() - AsBytes(file).data();
    EXPECT_EQ(at % SizeOf(read.dtype), 0) << entry.name;
  }
}

TEST(SafetensorsTest, KeepsDataApart) {
  const std::string a = Raw<float>({1, 2}), b = Raw<uint16_t>({3});
  const std::string file = SafetensorsFile(
      {{"b", FileDType::kBF16, "", {1}, AsBytes(b)}, {"a", FileDType::kF32, "", {2}, AsBytes(a)}});
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(AsBytes(file));
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ((*entries)[0].name, "a");
  EXPECT_EQ(0, std::memcmp((*entries)[0].data.data(), a.data(), a.size()));
  EXPECT_EQ(0, std::memcmp((*entries)[1].data.data(), b.data(), b.size()));
}

TEST(SafetensorsTest, TakesNoTensorsMetadataAndPadding) {
  for (const std::string& header :
       {std::string("{}"), std::string("{}   "), std::string(R"({"__metadata__":{"a":"b"}})")}) {
    absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(AsBytes(File(header)));
    ASSERT_TRUE(entries.ok()) << entries.status();
    EXPECT_THAT(*entries, IsEmpty());
  }
}

TEST(SafetensorsTest, KeepsTensorsOfUnknownTypesByName) {
  const std::string file = File(R"({"x":)" + Tensor("F8_E4M3", "[3]", "[0,3]") + "}", "abc");
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(AsBytes(file));
  ASSERT_TRUE(entries.ok()) << entries.status();
  EXPECT_EQ((*entries)[0].dtype, FileDType::kOther);
  EXPECT_EQ((*entries)[0].dtype_name, "F8_E4M3");
}

TEST(SafetensorsTest, RefusesHostileHeaders) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("shorter than 8"));
  EXPECT_THAT(ErrorOf(std::string(8, '\xFF')), HasSubstr("a header of 18446744073709551615 bytes"));
  EXPECT_THAT(ErrorOf(std::string("\x00\x00\x00\x02\x00\x00\x00\x00{}", 10)),
              HasSubstr("at most 16777216"));
  EXPECT_THAT(ErrorOf(std::string("\x10\x00\x00\x00\x00\x00\x00\x00{}", 10)),
              HasSubstr("only 2 follow"));
  EXPECT_THAT(ErrorOf(std::string(8, '\0')), HasSubstr("'{'"));
  EXPECT_THAT(ErrorOf(File(" {}")), HasSubstr("'{'"));
  EXPECT_THAT(ErrorOf(File("{")), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(File("{}x")), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(File("{\"\xFF\":1}")), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(File(R"({"x":1})")), HasSubstr("'x' is a number"));
  EXPECT_THAT(ErrorOf(File(R"({"x":[]})")), HasSubstr("'x' is an array"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"dtype":"F32"}})")), HasSubstr("lacks"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"dtype":7}})")),
              HasSubstr("'dtype' of tensor 'x' is a number"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"dtype":["F32"]}})")), HasSubstr("an array"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"shape":[[1]]}})")), HasSubstr("an array"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"shape":[{}]}})")), HasSubstr("an object"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"shape":[-1]}})")), HasSubstr("negative"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"shape":[1.5]}})")), HasSubstr("fraction"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"shape":[1e99999]}})")), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(File(R"({"x":{"strides":[1]}})")), HasSubstr("'strides' of tensor 'x'"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":{"a":1}})")), HasSubstr("__metadata__ 'a'"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":{"a":{}}})")), HasSubstr("an object"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":"a"})")), HasSubstr("a string"));
  // Deep nesting must not become deep recursion.
  EXPECT_THAT(ErrorOf(File("{\"x\":" + std::string(1 << 20, '['))), HasSubstr("'x' is an array"));
}

TEST(SafetensorsTest, RefusesDuplicates) {
  const std::string tensor = Tensor("U8", "[1]", "[0,1]");
  EXPECT_THAT(ErrorOf(File(R"({"x":)" + tensor + R"(,"x":)" + tensor + "}", "a")),
              HasSubstr("'x' is there twice"));
  // The same name, spelt with an escape.
  EXPECT_THAT(ErrorOf(File(R"({"x":)" + tensor + R"(,"\u0078":)" + tensor + "}", "a")),
              HasSubstr("'x' is there twice"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":{},"__metadata__":{}})")), HasSubstr("twice"));
  EXPECT_THAT(
      ErrorOf(File(R"({"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})")),
      HasSubstr("'dtype' of tensor 'x' is there twice"));
}

TEST(SafetensorsTest, RefusesOffsetsThatLie) {
  const auto one = [](const std::string& shape, const std::string& offsets,
                      const std::string& data) {
    return ErrorOf(File(R"({"x":)" + Tensor("F32", shape, offsets) + "}", data));
  };
  EXPECT_THAT(one("[1]", "[0,4]", "abc"), HasSubstr("end at 4, but the file holds 3"));
  EXPECT_THAT(one("[1]", "[4,0]", "abcd"), HasSubstr("run from 4 to 0"));
  EXPECT_THAT(one("[1]", "[0]", "abcd"), HasSubstr("1 entries instead of 2"));
  EXPECT_THAT(one("[1]", "[0,4,8]", "abcd"), HasSubstr("3 entries instead of 2"));
  EXPECT_THAT(one("[2]", "[0,4]", "abcd"), HasSubstr("takes 8 bytes, but data_offsets hold 4"));
  EXPECT_THAT(one("[1]", "[0,4]", "abcde"), HasSubstr("1 bytes after the last tensor"));
  EXPECT_THAT(one("[1]", "[1,5]", "abcde"),
              HasSubstr("starts at 1, but the data before it end at 0"));
  EXPECT_THAT(one("[1]", "[0,18446744073709551615]", "abcd"), HasSubstr("over 2^63"));
  EXPECT_THAT(one("[4294967296,4294967296]", "[0,4]", "abcd"), HasSubstr("2^62"));
  EXPECT_THAT(one("[0,4294967296,4294967296]", "[0,0]", ""), HasSubstr("2^62"));

  const auto two = [](const std::string& first, const std::string& second,
                      const std::string& data) {
    return ErrorOf(File(
        R"({"x":)" + Tensor("U8", "[2]", first) + R"(,"y":)" + Tensor("U8", "[2]", second) + "}",
        data));
  };
  EXPECT_THAT(two("[0,2]", "[1,3]", "abc"), HasSubstr("'y' starts at 1"));  // overlap
  EXPECT_THAT(two("[0,2]", "[0,2]", "ab"), HasSubstr("starts at 0"));       // the same bytes twice
  EXPECT_THAT(two("[0,2]", "[3,5]", "abcde"), HasSubstr("'y' starts at 3"));  // a hole
}

TEST(SafetensorsTest, TakesTensorsInAnyOrderOfNames) {
  const std::string file = File(
      R"({"y":)" + Tensor("U8", "[2]", "[1,3]") + R"(,"x":)" + Tensor("U8", "[1]", "[0,1]") + "}",
      "abc");
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(AsBytes(file));
  ASSERT_TRUE(entries.ok()) << entries.status();
  EXPECT_EQ((*entries)[0].name, "x");
  EXPECT_THAT((*entries)[1].shape, ElementsAre(2));
}

TEST(SafetensorsTest, EveryTruncationIsRefused) {
  const std::string data = Raw<float>({1, 2, 3});
  const std::string file = SafetensorsFile({{"a", FileDType::kF32, "", {3}, AsBytes(data)}});
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(ParseSafetensors(AsBytes(std::string_view(file).substr(0, size))).ok()) << size;
  }
}

}  // namespace
}  // namespace attn::cli
