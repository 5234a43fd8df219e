// The tensors of one generated call, and running a backend on them under watch: outputs are
// poisoned beforehand, guard bytes stand before and after every output and the workspace, gaps and
// padding of inputs hold NaN.
#ifndef ATTN_TESTS_EXACTNESS_CALL_H_
#define ATTN_TESTS_EXACTNESS_CALL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "tests/exactness/case.h"
#include "tests/reference/reference.h"

namespace attn::exactness {

// Zero-byte buffers are allowed. Every byte starts as 0xFF, which reads as NaN in every float type.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(int64_t bytes);

  std::byte* data() { return storage_.empty() ? nullptr : storage_.data() + offset_; }
  const std::byte* data() const { return storage_.empty() ? nullptr : storage_.data() + offset_; }
  std::span<std::byte> span() { return {data(), static_cast<size_t>(bytes_)}; }
  int64_t bytes() const { return bytes_; }
  bool GuardsIntact() const;
  friend bool operator==(const GuardedBuffer& a, const GuardedBuffer& b);  // contents, bitwise

 private:
  int64_t bytes_ = 0;
  size_t offset_ = 0;  // of the 64-byte aligned body
  std::vector<std::byte> storage_;
};

// What the entries of the inputs are. Unset: seeded random numbers as Case::numbers says. THD: i
// counts within the sequence b.
struct Values {
  using Entry = std::function<float(int64_t b, int64_t i, int64_t head, int64_t d)>;
  Entry q, k, v, dout;
  std::function<float(int64_t b, int64_t head, int64_t i)> dlse;
  std::function<float(int64_t b, int64_t head, int64_t i, int64_t j)> bias;
  std::function<bool(int64_t b, int64_t head, int64_t block_i, int64_t block_j)> block_mask;
};

// A dense input: bytes, and how they are laid out.
struct Input {
  TensorSpec spec;
  std::vector<std::byte> bytes;
  int64_t start_bytes = 0;

  const std::byte* data() const { return bytes.data() + start_bytes; }
};

class Call {
 public:
  explicit Call(const Case& c, const Values& values = {});

  const Case& params() const { return case_; }
  const AttentionSpec& spec() const { return spec_; }  // backward tensors included
  reference::Data data() const;
  int64_t lens_q(int64_t b) const { return lens_q_[b]; }
  int64_t lens_k(int64_t b) const { return lens_k_[b]; }

  // Validated, with the option data in place.
  absl::StatusOr<AttentionProblem> Problem(Pass pass) const;

 private:
  friend absl::StatusOr<struct BackwardOutputs> RunBackward(const Backend&, const Call&,
                                                            const struct ForwardOutputs&,
                                                            const CancelToken*);
  friend absl::StatusOr<struct ForwardOutputs> RunForward(const Backend&, const Call&,
                                                          const CancelToken*);
  Input MakeInput(DType dtype, bool query, int64_t heads, int64_t dim,
                  const Values::Entry& entry) const;
  void MakeLengths();
  void MakeOptions(const Values& values);
  void MakeBias(const Values& values);
  void MakeBlockMask(const Values& values);

  Case case_;
  AttentionSpec spec_;
  int64_t batch_ = 0, rows_q_ = 0, rows_k_ = 0;  // of one sequence; THD: the longest
  std::vector<int64_t> lens_q_, lens_k_;
  Input q_, k_, v_, dout_;
  std::vector<float> dlse_, alibi_, sinks_;
  std::vector<std::byte> bias_;
  std::vector<uint8_t> block_mask_;
};

struct ForwardOutputs {
  DType dtype = DType::kFp32;
  GuardedBuffer out, lse;
};
struct BackwardOutputs {
  DType dtype = DType::kFp32;
  GuardedBuffer dq, dk, dv, dbias, dsink;
};

// Run the backend once. Errors: the backend's, Validate()'s, and INTERNAL where a guard was
// overwritten.
absl::StatusOr<ForwardOutputs> RunForward(const Backend& backend, const Call& call,
                                          const CancelToken* cancel = nullptr);
absl::StatusOr<BackwardOutputs> RunBackward(const Backend& backend, const Call& call,
                                            const ForwardOutputs& forward,
                                            const CancelToken* cancel = nullptr);

// Uniform 64-bit numbers from a counter: the same on every machine.
uint64_t Mix(uint64_t x);
float Gauss(uint64_t seed, uint64_t stream, uint64_t index);

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_CALL_H_
