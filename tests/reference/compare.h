// Holds an implementation's output against the reference, element by element.
#ifndef ATTN_TESTS_REFERENCE_COMPARE_H_
#define ATTN_TESTS_REFERENCE_COMPARE_H_

#include <cstdint>
#include <string>

#include "kernels/api/dtype.h"
#include "tests/reference/reference.h"

namespace attn::reference {

// The worst element of one tensor.
struct Verdict {
  double ratio = 0.0;  // error / bound; infinity for NaN, and for any error where the bound is 0
  int64_t index = -1;  // -1: empty tensor
  double got = 0.0, want = 0.0, bound = 0.0;

  bool ok() const { return ratio <= 1.0; }
  // "index 17: got 0.25, want 0.5, bound 0.001, ratio 250".
  std::string ToString() const;
};

// Compares want.value.size() elements of `got`. An infinite want must be met exactly. Where the
// value within its bound may exceed the dtype's largest finite number, an infinity of the same sign
// is right. Thread-safe.
Verdict Compare(const Tensor& want, const void* got, DType dtype);

}  // namespace attn::reference

#endif  // ATTN_TESTS_REFERENCE_COMPARE_H_
