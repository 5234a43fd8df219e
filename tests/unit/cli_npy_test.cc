#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/npy.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A version 1.0 file with this header text and data, the length field honest.
std::string File(const std::string& header, const std::string& data = "") {
  std::string file = "\x93NUMPY";
  file += std::string{1, 0};
  file.push_back(static_cast<char>(header.size() & 0xFF));
  file.push_back(static_cast<char>(header.size() >> 8));
  return file + header + data;
}

std::string Dict(const std::string& descr, const std::string& fortran, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}

std::string ErrorOf(const std::string& file) {
  absl::StatusOr<NpyView> view = ParseNpy(AsBytes(file));
  EXPECT_FALSE(view.ok());
  if (view.ok()) return "";
  EXPECT_EQ(view.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(view.status().message());
}

TEST(NpyTest, ReadsBackWhatItWrites) {
  for (const FileDType dtype :
       {FileDType::kF64, FileDType::kF32, FileDType::kF16, FileDType::kI64, FileDType::kI32,
        FileDType::kI16, FileDType::kI8, FileDType::kU64, FileDType::kU32, FileDType::kU16,
        FileDType::kU8, FileDType::kBool, FileDType::kVoid2}) {
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{}, {0}, {1}, {7}, {3, 5}, {2, 0, 3}, {1, 2, 3, 5}}) {
      int64_t elements = 1;
      for (const int64_t extent : shape) elements *= extent;
      std::string data;
      for (int64_t i = 0; i < elements * SizeOf(dtype); ++i)
        data.push_back(static_cast<char>(i * 37));
      const std::string file = NpyPrefix(dtype, shape) + data;
      absl::StatusOr<NpyView> view = ParseNpy(AsBytes(file));
      ASSERT_TRUE(view.ok()) << view.status() << " " << Name(dtype) << ShapeString(shape);
      EXPECT_EQ(view->dtype, dtype);
      EXPECT_EQ(view->shape, shape);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(view->data.data()), view->data.size()),
                data);
    }
  }
}

TEST(NpyTest, DataStartsAtAMultipleOf64) {
  for (int64_t axes = 0; axes < 32; ++axes) {
    const std::string prefix = NpyPrefix(FileDType::kF32, std::vector<int64_t>(axes, 123456789));
    EXPECT_EQ(prefix.size() % 64, 0u) << axes;
    EXPECT_EQ(prefix.back(), '\n');
  }
}

TEST(NpyTest, WritesBfloat16AsUint16Bits) {
  EXPECT_THAT(NpyPrefix(FileDType::kBF16, std::vector<int64_t>{4}), HasSubstr("'descr': '<u2'"));
}

// What numpy.save(numpy.arange(3, dtype='<f4')) wrote (NumPy 1.24).
TEST(NpyTest, ReadsNumPysOwnBytes) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  header.append(117 - header.size(), ' ');
  header.push_back('\n');
  const std::string file = File(header, Raw<float>({0, 1, 2}));
  absl::StatusOr<NpyView> view = ParseNpy(AsBytes(file));
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->dtype, FileDType::kF32);
  EXPECT_THAT(view->shape, ElementsAre(3));
}

TEST(NpyTest, ReadsOtherSpellingsOfTheSameHeader) {
  for (const std::string& header :
       {std::string("{\"shape\":(2,2),\"fortran_order\":False,\"descr\":\"<f2\"}"),
        std::string(
            "{ 'shape' : ( 2L , 2L , ) , 'descr' : '<f2' , 'fortran_order' : False }  \n")}) {
    const std::string file = File(header, std::string(8, 'x'));
    absl::StatusOr<NpyView> view = ParseNpy(AsBytes(file));
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_THAT(view->shape, ElementsAre(2, 2));
  }
}

TEST(NpyTest, ReadsVersions2And3) {
  const std::string header = Dict("<f4", "False", "(1,)");
  for (const char version : {2, 3}) {
    std::string file = "\x93NUMPY";
    file += {version, 0, static_cast<char>(header.size()), 0, 0, 0};
    file += header + "abcd";
    EXPECT_TRUE(ParseNpy(AsBytes(file)).ok());
  }
}

TEST(NpyTest, RefusesByName) {
  const std::string four(4, 'x');
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "True", "(1,)"), four)), HasSubstr("Fortran order"));
  EXPECT_THAT(ErrorOf(File(Dict(">f4", "False", "(1,)"), four)), HasSubstr("big-endian"));
  EXPECT_THAT(ErrorOf(File(Dict("<c8", "False", "(1,)"), four)), HasSubstr("'<c8'"));
  EXPECT_THAT(ErrorOf(File(Dict("=f4", "False", "(1,)"), four)), HasSubstr("'=f4'"));
  EXPECT_THAT(ErrorOf(File(Dict("", "False", "(1,)"), four)), HasSubstr("element type"));
  EXPECT_THAT(ErrorOf(File("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }")),
              HasSubstr("structured"));
}

TEST(NpyTest, RefusesHostileHeaders) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("magic"));
  EXPECT_THAT(ErrorOf("\x93NUMPX\x01\x01\x01\x01"), HasSubstr("magic"));
  EXPECT_THAT(ErrorOf(std::string("\x93NUMPY\x04\x00\x01\x00", 10)), HasSubstr("version 4.0"));
  EXPECT_THAT(ErrorOf(std::string("\x93NUMPY\x01\x00\xFF\xFF", 10)), HasSubstr("only 0 follow"));
  EXPECT_THAT(ErrorOf(std::string("\x93NUMPY\x02\x00\xFF\xFF\xFF\xFF", 12)),
              HasSubstr("a header of 4294967295 bytes; at most 65536"));
  EXPECT_THAT(ErrorOf(std::string("\x93NUMPY\x02\x00\x01\x00", 10)), HasSubstr("ends within"));
  EXPECT_THAT(ErrorOf(File("")), HasSubstr("'{'"));
  EXPECT_THAT(ErrorOf(File("{")), HasSubstr("string was expected"));
  EXPECT_THAT(ErrorOf(File("{}")), HasSubstr("no 'descr'"));
  EXPECT_THAT(ErrorOf(File("{'descr': '<f4', 'descr': '<f4'}")), HasSubstr("twice"));
  EXPECT_THAT(ErrorOf(File("{'descr': '<f4")), HasSubstr("does not end"));
  EXPECT_THAT(ErrorOf(File("{'desc\\x72': '<f4'}")), HasSubstr("escape"));
  EXPECT_THAT(ErrorOf(File("{'other': 1}")), HasSubstr("unknown header key 'other'"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "0", "(1,)"))), HasSubstr("neither True nor False"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "1"))), HasSubstr("not a tuple"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(1 2)"))), HasSubstr("no ','"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(a,)"))), HasSubstr("not an integer"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(1,)") + "x", "abcd")), HasSubstr("text after"));
  EXPECT_THAT(ErrorOf(File("{'descr': '<f4', 'fortran_order': False}")), HasSubstr("no 'shape'"));
}

TEST(NpyTest, RefusesShapesThatOverflowOrLie) {
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(99999999999999999999,)"))),
              HasSubstr("over 2^63"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(4294967296, 4294967296)"))), HasSubstr("2^62"));
  // A zero extent does not hide an overflow, which would be one in an index computation.
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(0, 4294967296, 4294967296)"))),
              HasSubstr("2^62"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(-1,)"))), HasSubstr("negative"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(2,)"), "1234567")),
              HasSubstr("takes 8 bytes, but 7 follow"));
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", "(2,)"), "123456789")),
              HasSubstr("takes 8 bytes, but 9 follow"));
  std::string axes = "(";
  for (int i = 0; i < 33; ++i) axes += "1,";
  EXPECT_THAT(ErrorOf(File(Dict("<f4", "False", axes + ")"), "abcd")), HasSubstr("more than 32"));
}

TEST(NpyTest, EveryTruncationIsRefused) {
  const std::string file = NpyPrefix(FileDType::kF16, std::vector<int64_t>{3}) + "abcdef";
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(ParseNpy(AsBytes(std::string_view(file).substr(0, size))).ok()) << size;
  }
}

}  // namespace
}  // namespace attn::cli
