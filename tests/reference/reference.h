// Attention forward and backward in float64, written from the definition in attention.proto as
// plain loops and from nothing else: it does not share the kernels' notion of lengths, visibility
// or offsets. With every value comes its bound by the exactness rule of tests/reference/README.md.
#ifndef ATTN_TESTS_REFERENCE_REFERENCE_H_
#define ATTN_TESTS_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "kernels/api/spec.h"

namespace attn::reference {

// The bytes of what an AttentionSpec describes, each with the dtype, shape and strides stated
// there. Options that the spec does not have may be null.
struct Data {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const float* alibi_slopes = nullptr;
  const void* bias = nullptr;
  const float* sinks = nullptr;
  const uint8_t* block_mask = nullptr;
  const void* dout = nullptr;   // backward only
  const float* dlse = nullptr;  // backward only; null: 0
};

// One output tensor, in the element order of the contiguous output buffer.
struct Tensor {
  std::vector<double> value;
  // How far an implementation may be off. 0 where the value is exact by definition: rows without a
  // visible key, keys that no query sees, padding.
  std::vector<double> bound;

  bool empty() const { return value.empty(); }
};

struct Result {
  Tensor out, lse;
  Tensor dq, dk, dv;          // backward only
  Tensor dbias, dsink;        // backward only, where the spec has bias, sinks
  int64_t visible_pairs = 0;  // over sequences and query heads; bias -inf counts as not visible
};

struct Options {
  bool backward = false;  // spec.dout and Data::dout are then required
  int threads = 1;        // 0: one per core
};

// Computes everything. The spec must be valid (see Validate()) and have at least the tensors that
// the pass needs; inputs are taken as stored, that is already rounded. Backward uses its own
// float64 out and lse. Thread-safe.
Result Compute(const AttentionSpec& spec, const Data& data, const Options& options = {});

}  // namespace attn::reference

#endif  // ATTN_TESTS_REFERENCE_REFERENCE_H_
