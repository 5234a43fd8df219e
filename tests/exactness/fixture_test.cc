// Q, K, V of a real transformer layer on real text, against the float64 result that is committed
// with them (computed by tests/fixtures/make_fixture.py, which shares nothing with this code).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

using Json = nlohmann::json;

// ATTN_FIXTURES names the folder where the program runs on another host than built it.
std::string ReadFile(const std::string& name) {
  const char* folder = std::getenv("ATTN_FIXTURES");
  std::ifstream file(absl::StrCat(folder != nullptr ? folder : ATTN_FIXTURE_DIR, "/", name),
                     std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

struct FileTensor {
  std::string dtype;  // "F16", "F32"
  std::vector<int64_t> shape;
  std::string bytes;

  float operator[](int64_t n) const {
    return LoadElement(bytes.data(), dtype == "F16" ? DType::kFp16 : DType::kFp32, n);
  }
  int64_t size() const { return static_cast<int64_t>(bytes.size()) / (dtype == "F16" ? 2 : 4); }
};

// safetensors: 8 bytes of header length, a JSON header, the data.
std::map<std::string, FileTensor> ReadSafetensors(const std::string& name) {
  const std::string file = ReadFile(name);
  std::map<std::string, FileTensor> tensors;
  uint64_t size = 0;
  if (file.size() < 8) return tensors;
  std::memcpy(&size, file.data(), 8);
  const Json header = Json::parse(file.substr(8, size));
  for (const auto& [key, info] : header.items()) {
    if (key == "__metadata__") continue;
    const uint64_t begin = info["data_offsets"][0], end = info["data_offsets"][1];
    tensors[key] = {info["dtype"], info["shape"], file.substr(8 + size + begin, end - begin)};
  }
  return tensors;
}

class FixtureTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Json options = Json::parse(ReadFile("fixture.json"))["options"];
    inputs_ = ReadSafetensors("minilm_inputs.safetensors");
    expected_ = ReadSafetensors("minilm_expected.safetensors");
    ASSERT_EQ(inputs_.size(), 4);
    ASSERT_EQ(expected_.size(), 5);
    case_.batch = options["batch"];
    case_.heads = options["num_heads"];
    case_.kv_heads = options["num_kv_heads"];
    case_.seqlen_q = case_.seqlen_k = options["seqlen"];
    case_.dim = case_.dim_v = options["head_dim"];
    case_.lens_q = options["seqlens_q"].get<std::vector<int64_t>>();
    case_.lens_k = options["seqlens_k"].get<std::vector<int64_t>>();
    ASSERT_EQ(inputs_["q"].shape, (std::vector<int64_t>{4, 48, 12, 32}));
    values_.q = Entry("q");
    values_.k = Entry("k");
    values_.v = Entry("v");
    values_.dout = Entry("dout");
  }

  Values::Entry Entry(const std::string& name) {
    return [&t = inputs_[name]](int64_t b, int64_t i, int64_t h, int64_t d) {
      return t[((b * t.shape[1] + i) * t.shape[2] + h) * t.shape[3] + d];
    };
  }

  // The reference's bounds around the committed values.
  reference::Tensor Committed(const std::string& name, const reference::Tensor& bounds) {
    reference::Tensor t = bounds;
    const FileTensor& file = expected_[name];
    EXPECT_EQ(file.size(), static_cast<int64_t>(t.value.size())) << name;
    for (int64_t n = 0; n < file.size(); ++n) t.value[n] = file[n];
    return t;
  }
  reference::Result CommittedResult(const reference::Result& bounds) {
    reference::Result r;
    r.out = Committed("out", bounds.out);
    r.lse = Committed("lse", bounds.lse);
    r.dq = Committed("dq", bounds.dq);
    r.dk = Committed("dk", bounds.dk);
    r.dv = Committed("dv", bounds.dv);
    return r;
  }

  Case case_;
  Values values_;
  std::map<std::string, FileTensor> inputs_, expected_;
};

// Two independent float64 computations differ only by the rounding of the file to fp32.
TEST_F(FixtureTest, ReferenceEqualsTheCommittedResult) {
  case_.dtype = DType::kFp16;
  const Call call(case_, values_);
  const reference::Result r = reference::Compute(call.spec(), call.data(), {.backward = true});
  const std::pair<const char*, const reference::Tensor*> all[] = {
      {"out", &r.out}, {"lse", &r.lse}, {"dq", &r.dq}, {"dk", &r.dk}, {"dv", &r.dv}};
  for (const auto& [name, tensor] : all) {
    const FileTensor& file = expected_[name];
    ASSERT_EQ(file.size(), static_cast<int64_t>(tensor->value.size()));
    for (int64_t n = 0; n < file.size(); ++n) {
      const double want = tensor->value[n];
      if (file[n] == want) continue;  // -inf, 0
      ASSERT_NEAR(file[n], want, std::ldexp(1.01 * std::abs(want), -24) + 1e-13)
          << name << "[" << n << "]";
    }
  }
}

// FP16 as stored, and FP32, which holds the same numbers. Padding is NaN here, where the model has
// the activations of its [PAD] tokens.
TEST_F(FixtureTest, EveryPathIsExact) {
  for (DType dtype : {DType::kFp16, DType::kFp32}) {
    case_.dtype = dtype;
    const Call call(case_, values_);
    const reference::Result want =
        CommittedResult(reference::Compute(call.spec(), call.data(), {.backward = true}));
    const absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kBackward);
    ASSERT_TRUE(problem.ok()) << problem.status();
    const std::vector<const Backend*> takers = Takers(*problem, Pass::kForward, Paths());
    ASSERT_FALSE(takers.empty()) << Name(dtype);
    for (const Backend* backend : takers) {
      const std::string who(Name(backend->path()));
      const absl::StatusOr<ForwardOutputs> forward = RunForward(*backend, call);
      ASSERT_TRUE(forward.ok()) << forward.status();
      const Backend* gradients = BackwardOf(*backend, *problem, Paths());
      ASSERT_NE(gradients, nullptr);
      const absl::StatusOr<BackwardOutputs> backward = RunBackward(*gradients, call, *forward);
      ASSERT_TRUE(backward.ok()) << backward.status();
      std::vector<Fault> faults = CheckForward(want, *forward, who + " forward");
      for (const Fault& f : CheckBackward(want, *backward, BackwardName(*gradients, *backend)))
        faults.push_back(f);
      for (const Fault& f : faults) ADD_FAILURE() << f.what << ": " << f.details;
    }
  }
}

}  // namespace
}  // namespace attn::exactness
