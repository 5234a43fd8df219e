// A small FP32 call for the reference's own tests. Entries are multiples of 2^-12, so that steps by
// powers of two are exact.
#ifndef ATTN_TESTS_REFERENCE_SMALL_CALL_H_
#define ATTN_TESTS_REFERENCE_SMALL_CALL_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/api/spec.h"
#include "tests/reference/reference.h"

namespace attn::reference {

struct SmallCall {
  AttentionSpec spec;
  std::vector<float> q, k, v, dout, dlse, slopes, bias, sinks;
  std::vector<uint8_t> block_mask;

  // BSHD, contiguous, random entries in (-1, 1).
  SmallCall(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t kv_heads,
            int64_t dim, int64_t dim_v, uint32_t seed = 1)
      : random_(seed) {
    spec.num_heads = heads;
    spec.num_kv_heads = kv_heads;
    spec.q.shape = {batch, seqlen_q, heads, dim};
    spec.k.shape = {batch, seqlen_k, kv_heads, dim};
    spec.v.shape = {batch, seqlen_k, kv_heads, dim_v};
    spec.dout = TensorSpec{.shape = {batch, seqlen_q, heads, dim_v}, .strides = {}};
    q = Random(spec.q.NumElements());
    k = Random(spec.k.NumElements());
    v = Random(spec.v.NumElements());
    dout = Random(spec.dout->NumElements());
  }

  std::vector<float> Random(int64_t n) {
    std::uniform_int_distribution<int> steps(-4095, 4095);
    std::vector<float> x(n);
    for (float& e : x) e = std::ldexp(static_cast<float>(steps(random_)), -12);
    return x;
  }

  void AddDlse() { dlse = Random(spec.q.shape[0] * spec.q.shape[1] * spec.num_heads); }
  void AddSinks() {
    spec.sinks = TensorSpec{.shape = {spec.num_heads}, .strides = {}};
    sinks = Random(spec.num_heads);
  }
  void AddAlibi(int64_t batch) {
    spec.alibi_slopes = TensorSpec{};
    if (batch > 1) spec.alibi_slopes->shape.push_back(batch);
    spec.alibi_slopes->shape.push_back(spec.num_heads);
    slopes = Random(batch * spec.num_heads);
  }
  void AddBias(int64_t batch, int64_t heads) {
    spec.bias =
        TensorSpec{.shape = {batch, heads, spec.q.shape[1], spec.k.shape[1]}, .strides = {}};
    bias = Random(spec.bias->NumElements());
  }

  Data data() const {
    return {.q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .alibi_slopes = slopes.data(),
            .bias = bias.data(),
            .sinks = sinks.data(),
            .block_mask = block_mask.data(),
            .dout = dout.data(),
            .dlse = dlse.empty() ? nullptr : dlse.data()};
  }
  Result Forward() const { return Compute(spec, data()); }
  Result Backward() const { return Compute(spec, data(), {.backward = true}); }

 private:
  std::mt19937 random_;
};

}  // namespace attn::reference

#endif  // ATTN_TESTS_REFERENCE_SMALL_CALL_H_
