// What Compute() works from: the call with every default filled in. Internal to the reference.
#ifndef ATTN_TESTS_REFERENCE_SETUP_H_
#define ATTN_TESTS_REFERENCE_SETUP_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/api/dtype.h"
#include "kernels/api/spec.h"
#include "tests/reference/reference.h"

namespace attn::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What the rule calls u and eta: of the inputs (what P and dS may be rounded to), and of the
// output (its last rounding).
struct Units {
  double u_in, u_out, eta_in, eta_out;
};
double Underflow(DType dtype);  // eta

// A [batch, token, head, dim] view of any input layout.
struct View {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  double At(int64_t b, int64_t token, int64_t head, int64_t dim) const {
    return LoadElement(data, dtype,
                       b * batch_stride + token * token_stride + head * head_stride + dim);
  }
};

struct Seq {
  int64_t q0 = 0, k0 = 0;  // first token on the token axis
  int64_t lq = 0, lk = 0;
  int64_t off = 0;
};

// The call, with every default filled in.
struct Setup {
  const AttentionSpec& spec;
  const Data& data;
  bool backward = false;
  bool thd = false;
  int64_t batch = 0, heads = 0, kv_heads = 0, dim = 0, dim_v = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // BSHD extents; THD: the longest
  int64_t total_q = 0, total_k = 0;    // THD: rows of the token axis
  View q = {}, k = {}, v = {}, dout = {};
  std::vector<Seq> seqs = {};
  double scale = 1.0, softcap = 0.0;
  int64_t left = -1, right = -1;  // -1: unlimited
  uint32_t dropout_threshold = 65536;
  Units units{};

  // Where (b, token i of the sequence, head) stands in an output of `n` heads and `d` channels.
  int64_t OutIndex(int64_t b, int64_t i, int64_t head, int64_t n, int64_t d, bool query) const {
    const int64_t row =
        thd ? (query ? seqs[b].q0 : seqs[b].k0) + i : b * (query ? seqlen_q : seqlen_k) + i;
    return (row * n + head) * d;
  }
  int64_t LseIndex(int64_t b, int64_t h, int64_t i) const {
    return thd ? h * total_q + seqs[b].q0 + i : (b * heads + h) * seqlen_q + i;
  }
  int64_t BiasIndex(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const std::vector<int64_t>& s = spec.bias->shape;
    if (thd) return ((s[0] == 1 ? 0 : h) * s[1] + seqs[b].q0 + i) * s[2] + j;
    return (((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + i) * s[3] + j;
  }
  bool BlockShown(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!spec.block_mask) return true;
    const std::vector<int64_t>& s = spec.block_mask->mask.shape;
    const int64_t block =
        (((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + i / spec.block_mask->block_q) *
            s[3] +
        j / spec.block_mask->block_k;
    return data.block_mask[block] != 0;
  }
  double Slope(int64_t b, int64_t h) const {
    if (!spec.alibi_slopes) return 0.0;
    return data.alibi_slopes[(spec.alibi_slopes->shape.size() == 2 ? b * heads : 0) + h];
  }
};

Setup MakeSetup(const AttentionSpec& spec, const Data& data, bool backward);

}  // namespace attn::reference

#endif  // ATTN_TESTS_REFERENCE_SETUP_H_
