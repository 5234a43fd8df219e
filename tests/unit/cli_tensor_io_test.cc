#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "client/cli/npy.h"
#include "client/cli/tensor_io.h"
#include "kernels/api/dtype.h"
#include "tests/unit/cli_test_util.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

FileTensor Of(FileDType dtype, std::vector<int64_t> shape, const std::string& data) {
  return {"t.npy", dtype, std::string(Name(dtype)), std::move(shape), nullptr, AsBytes(data)};
}

uint16_t Bits16(const client::HostTensor& tensor, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, tensor.bytes.data() + 2 * index, 2);
  return bits;
}

TEST(TensorIoTest, F64IsConvertedOnlyOnRequest) {
  const std::string data = Raw<double>({1.0, 1.0 / 3});
  const FileTensor tensor = Of(FileDType::kF64, {2}, data);
  EXPECT_THAT(ToHostTensor(tensor, "q", std::nullopt).status().message(),
              HasSubstr("q is F64, which attention is not computed in"));
  absl::StatusOr<client::HostTensor> host = ToHostTensor(tensor, "q", v1::DTYPE_FP32);
  ASSERT_TRUE(host.ok()) << host.status();
  float values[2];
  std::memcpy(values, host->bytes.data(), sizeof(values));
  EXPECT_EQ(values[1], 1.0f / 3);
}

// 1 + 2^-8 + 2^-40 lies just over the tie between two bfloat16 values; rounding to float first
// would make it a tie and round it down to even.
TEST(TensorIoTest, DoublesAreRoundedOnce) {
  const std::string data = Raw<double>(
      {1 + 0x1p-8 + 0x1p-40, -(1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-11 + 0x1p-40, 1e300, 0x1p-1074});
  const FileTensor tensor = Of(FileDType::kF64, {5}, data);
  absl::StatusOr<client::HostTensor> bf16 = ToHostTensor(tensor, "q", v1::DTYPE_BF16);
  ASSERT_TRUE(bf16.ok());
  EXPECT_EQ(Bf16ToFloat(Bits16(*bf16, 0)), 1 + 0x1p-7f);
  EXPECT_EQ(Bf16ToFloat(Bits16(*bf16, 1)), -(1 + 0x1p-7f));
  EXPECT_TRUE(std::isinf(Bf16ToFloat(Bits16(*bf16, 3))));
  EXPECT_EQ(Bf16ToFloat(Bits16(*bf16, 4)), 0.0f);
  absl::StatusOr<client::HostTensor> fp16 = ToHostTensor(tensor, "q", v1::DTYPE_FP16);
  ASSERT_TRUE(fp16.ok());
  EXPECT_EQ(Fp16ToFloat(Bits16(*fp16, 2)), 1 + 0x1p-10f);
  EXPECT_TRUE(std::isinf(Fp16ToFloat(Bits16(*fp16, 3))));
}

TEST(TensorIoTest, Uint16AndV2AreBfloat16OnlyWhereSaid) {
  const std::string data = Raw<uint16_t>({0x3F80});
  for (const FileDType dtype : {FileDType::kU16, FileDType::kVoid2}) {
    const FileTensor tensor = Of(dtype, {1}, data);
    EXPECT_THAT(ToHostTensor(tensor, "q", std::nullopt).status().message(),
                HasSubstr("--dtype bf16"));
    EXPECT_THAT(ToHostTensor(tensor, "q", v1::DTYPE_FP16).status().message(),
                HasSubstr("--dtype bf16"));
    absl::StatusOr<client::HostTensor> host = ToHostTensor(tensor, "q", v1::DTYPE_BF16);
    ASSERT_TRUE(host.ok());
    EXPECT_EQ(Bits16(*host, 0), 0x3F80);
  }
}

TEST(TensorIoTest, NothingIsCopiedWhereNothingIsConverted) {
  const std::string data = Raw<float>({1, 2});
  const FileTensor tensor = Of(FileDType::kF32, {2}, data);
  absl::StatusOr<client::HostTensor> host = ToHostTensor(tensor, "q", v1::DTYPE_FP32);
  ASSERT_TRUE(host.ok());
  EXPECT_EQ(host->bytes.data(), tensor.data.data());
}

TEST(TensorIoTest, IntegersOfBothWidths) {
  const std::string wide = Raw<int64_t>({0, 5, int64_t{1} << 40}), narrow = Raw<int32_t>({0, -1});
  EXPECT_THAT(*ToIntegers(Of(FileDType::kI64, {3}, wide), "cu_seqlens_q"),
              ElementsAre(0, 5, int64_t{1} << 40));
  EXPECT_THAT(*ToIntegers(Of(FileDType::kI32, {2}, narrow), "cu_seqlens_q"), ElementsAre(0, -1));
  EXPECT_THAT(ToIntegers(Of(FileDType::kU64, {1}, Raw<uint64_t>({~0ull})), "n").status().message(),
              HasSubstr("over 2^63"));
  const std::string two = Raw<float>({1, 2});
  EXPECT_THAT(ToIntegers(Of(FileDType::kF32, {2}, two), "n").status().message(),
              HasSubstr("n is F32; it must be I64 or I32"));
  EXPECT_THAT(ToIntegers(Of(FileDType::kI64, {3, 1}, wide), "n").status().message(),
              HasSubstr("must have one axis"));
}

// Tensors of a file may lie at odd addresses.
TEST(TensorIoTest, ReadsUnalignedData) {
  const std::string data = "x" + Raw<double>({2.5});
  FileTensor tensor = Of(FileDType::kF64, {1}, data);
  tensor.data = AsBytes(data).subspan(1);
  EXPECT_EQ(ElementAsDouble(tensor, 0), 2.5);
}

TEST(TensorIoTest, WritesWhatItReads) {
  TempFolder folder;
  client::HostTensor out = client::HostTensor::Allocate(v1::DTYPE_BF16, {1, 2});
  std::memcpy(out.mutable_bytes().data(), Raw<uint16_t>({0x3F80, 0x4000}).data(), 4);
  client::HostTensor lse = client::HostTensor::Allocate(v1::DTYPE_FP32, {});
  const std::vector<NamedTensor> tensors = {{"out", out}, {"lse", lse}};

  absl::StatusOr<OutputTarget> file = OutputTarget::Create(folder / "r.safetensors", 2);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Write(tensors, {{"attn.path", "flash_cpu"}}).ok());
  absl::StatusOr<FileTensor> read = OpenTensor(folder / "r.safetensors", "out");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dtype, FileDType::kBF16);
  EXPECT_EQ(ElementAsDouble(*read, 1), 2.0);
  EXPECT_TRUE(OpenTensor((folder / "r.safetensors") + ":lse", "ignored").ok());
  EXPECT_THAT(OpenTensor(folder / "r.safetensors", "dq").status().message(),
              HasSubstr("has no tensor 'dq'; it has lse, out"));

  absl::StatusOr<OutputTarget> directory = OutputTarget::Create((folder / "new") + "/", 2);
  ASSERT_TRUE(directory.ok()) << directory.status();
  absl::StatusOr<std::vector<std::string>> paths = directory->Write(tensors, {});
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_THAT(*paths, ElementsAre(folder / "new/out.npy", folder / "new/lse.npy"));
  EXPECT_EQ(OpenTensor(folder / "new/out.npy", "q")->dtype, FileDType::kU16);

  EXPECT_THAT(OutputTarget::Create(folder / "r.npy", 3).status().message(),
              HasSubstr("one tensor"));
  EXPECT_THAT(OutputTarget::Create(folder / "no/where.npy", 1).status().message(),
              HasSubstr("no directory"));
  folder.Write("plain", "x");
  EXPECT_THAT(OutputTarget::Create(folder / "plain", 1).status().message(), HasSubstr("is a file"));
}

TEST(TensorIoTest, NamesTheFileInErrors) {
  TempFolder folder;
  EXPECT_THAT(OpenTensors(folder / "none.npy").status().message(),
              HasSubstr("none.npy: No such file"));
  EXPECT_THAT(OpenTensors(folder.path()).status().message(), HasSubstr("is a directory"));
  EXPECT_THAT(OpenTensors(folder.Write("bad.npy", "hello")).status().message(),
              HasSubstr("bad.npy: not a usable .npy file"));
  EXPECT_THAT(OpenTensors(folder.Write("bad.safetensors", "hello")).status().message(),
              HasSubstr("bad.safetensors: not a usable safetensors file"));
  EXPECT_FALSE(OpenTensors(folder.Write("empty.npy", "")).ok());
}

}  // namespace
}  // namespace attn::cli
