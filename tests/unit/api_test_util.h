// Specs for tests of kernels/api.
#ifndef ATTN_TESTS_UNIT_API_TEST_UTIL_H_
#define ATTN_TESTS_UNIT_API_TEST_UTIL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/problem.h"
#include "kernels/api/spec.h"

namespace attn {

inline TensorSpec Shape(std::vector<int64_t> shape, DType dtype = DType::kFp32) {
  return {dtype, std::move(shape), {}};
}

struct BshdExtents {
  int64_t batch = 2;
  int64_t seqlen_q = 5;
  int64_t seqlen_k = 7;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 16;
  int64_t head_dim_v = 16;
};

inline AttentionSpec BshdSpec(const BshdExtents& e = {}, DType dtype = DType::kFp32) {
  AttentionSpec spec;
  spec.layout = Layout::kBshd;
  spec.num_heads = e.num_heads;
  spec.num_kv_heads = e.num_kv_heads;
  spec.q = Shape({e.batch, e.seqlen_q, e.num_heads, e.head_dim}, dtype);
  spec.k = Shape({e.batch, e.seqlen_k, e.num_kv_heads, e.head_dim}, dtype);
  spec.v = Shape({e.batch, e.seqlen_k, e.num_kv_heads, e.head_dim_v}, dtype);
  return spec;
}

inline AttentionSpec ThdSpec(const std::vector<int64_t>& lengths_q,
                             const std::vector<int64_t>& lengths_k, int64_t num_heads = 4,
                             int64_t num_kv_heads = 2, int64_t head_dim = 16) {
  auto cumulative = [](const std::vector<int64_t>& lengths) {
    std::vector<int64_t> cu = {0};
    for (int64_t length : lengths) cu.push_back(cu.back() + length);
    return cu;
  };
  AttentionSpec spec;
  spec.layout = Layout::kThd;
  spec.num_heads = num_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.cu_seqlens_q = cumulative(lengths_q);
  spec.cu_seqlens_k = cumulative(lengths_k);
  spec.q = Shape({spec.cu_seqlens_q.back(), num_heads, head_dim});
  spec.k = Shape({spec.cu_seqlens_k.back(), num_kv_heads, head_dim});
  spec.v = spec.k;
  return spec;
}

// "OK", or "INVALID_ARGUMENT: message".
inline std::string Text(const absl::Status& status) { return std::string(status.ToString()); }

inline std::string ValidateText(const AttentionSpec& spec, Pass pass = Pass::kForward) {
  return Text(Validate(spec, pass).status());
}

}  // namespace attn

#endif  // ATTN_TESTS_UNIT_API_TEST_UTIL_H_
