// Writes the seeds that the fuzzers start from. Usage: attn_make_corpus DIRECTORY
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "client/cli/npy.h"
#include "client/cli/safetensors.h"
#include "tests/unit/wire_grpc_random_encoding.h"

namespace attn {
namespace {

namespace v1 = ::attention::v1;

bool Write(const std::filesystem::path& directory, const std::string& name,
           const std::string& bytes) {
  std::filesystem::create_directories(directory);
  std::ofstream file(directory / name, std::ios::binary);
  file << bytes;
  return file.good();
}

v1::BackwardRequestHeader Header(bool thd) {
  v1::BackwardRequestHeader header;
  header.mutable_shape()->set_layout(thd ? v1::LAYOUT_THD : v1::LAYOUT_BSHD);
  header.mutable_shape()->set_num_heads(4);
  header.mutable_shape()->set_num_kv_heads(2);
  uint32_t payload = 0;
  const auto fill = [&](v1::Tensor* tensor, std::initializer_list<int64_t> shape, v1::DType dtype) {
    tensor->set_dtype(dtype);
    for (const int64_t extent : shape) tensor->add_shape(extent);
    tensor->set_payload(payload++);
  };
  if (thd) {
    for (const int64_t n : {0, 3, 10}) header.mutable_shape()->add_cu_seqlens_q(n);
    for (const int64_t n : {0, 5, 20}) header.mutable_shape()->add_cu_seqlens_k(n);
    fill(header.mutable_q(), {10, 4, 16}, v1::DTYPE_BF16);
    fill(header.mutable_k(), {20, 2, 16}, v1::DTYPE_BF16);
    fill(header.mutable_v(), {20, 2, 16}, v1::DTYPE_BF16);
  } else {
    fill(header.mutable_q(), {2, 10, 4, 16}, v1::DTYPE_FP32);
    fill(header.mutable_k(), {2, 20, 2, 16}, v1::DTYPE_FP32);
    fill(header.mutable_v(), {2, 20, 2, 16}, v1::DTYPE_FP32);
    fill(header.mutable_options()->mutable_bias(), {1, 4, 10, 20}, v1::DTYPE_FP32);
  }
  header.mutable_options()->set_causal(true);
  header.mutable_options()->set_window_left(7);
  header.mutable_options()->mutable_dropout()->set_p(0.25f);
  header.mutable_options()->mutable_dropout()->set_seed(42);
  return header;
}

bool WriteAll(const std::filesystem::path& root) {
  bool ok = true;
  wire::RandomEncoding random(7);
  for (int i = 0; i < 16; ++i) {
    const std::string first(1, static_cast<char>(i));
    const std::string name = "seed" + std::to_string(i);
    ok &= Write(root / "unary", name, first + random.Unary());
    ok &= Write(root / "stream", name, first + random.Stream());
    ok &= Write(root / "header", "made" + std::to_string(i),
                std::string(1, static_cast<char>(i % 4)) + random.RandomBytes(100));
  }
  for (const bool thd : {false, true}) {
    const std::string bytes = Header(thd).SerializeAsString();
    for (int first = 4; first < 8; ++first) {
      ok &= Write(root / "header", (thd ? "thd" : "bshd") + std::to_string(first),
                  static_cast<char>(first) + bytes);
    }
  }
  using cli::FileDType;
  for (const FileDType dtype : {FileDType::kF32, FileDType::kF16, FileDType::kBF16}) {
    const int64_t shape[] = {2, 3};
    ok &= Write(root / "npy", std::string(cli::Name(dtype)),
                cli::NpyPrefix(dtype, shape) + std::string(6 * cli::SizeOf(dtype), 'x'));
  }
  std::vector<cli::SafetensorsEntry> entries(2);
  const std::string data(24, 'y');
  const auto bytes = std::as_bytes(std::span<const char>(data));
  entries[0] = {"q", FileDType::kF32, "F32", {2, 2}, bytes.first(16)};
  entries[1] = {"k", FileDType::kBF16, "BF16", {4}, bytes.subspan(16)};
  ok &= Write(root / "safetensors", "two",
              cli::SafetensorsPrefix(&entries, {{"format", "pt"}}) + data);
  return ok;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: attn_make_corpus DIRECTORY\n");
    return 2;
  }
  if (!attn::WriteAll(argv[1])) {
    std::fprintf(stderr, "cannot write the corpus to %s\n", argv[1]);
    return 1;
  }
  return 0;
}
