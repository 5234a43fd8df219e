// A checked attention problem: what every path computes, and nothing of how. Made by Validate()
// (spec.h).
#ifndef ATTN_KERNELS_API_PROBLEM_H_
#define ATTN_KERNELS_API_PROBLEM_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/dtype.h"
#include "kernels/api/spec.h"

namespace attn {

// Strides in elements of [batch, token, head]; the head_dim axis is contiguous. THD: batch is 0.
struct Strides {
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;
};

// One sequence of the batch. Token indices count along the token axis of the storage.
struct Sequence {
  int64_t q_token = 0;  // first query row; 0 for BSHD
  int64_t k_token = 0;  // first key row; 0 for BSHD
  int64_t rows_q = 0;   // query rows stored: seqlen_q, or the length for THD
  int64_t rows_k = 0;   // key rows stored
  int64_t len_q = 0;    // Lq: valid queries, <= rows_q
  int64_t len_k = 0;    // Lk: valid keys, <= rows_k
  int64_t off = 0;      // query i stands at key position i + off
};

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;  // one past the last; begin >= end: none
};

inline constexpr int64_t kUnlimited = int64_t{1} << 60;

// Data pointers of options may be null where the problem is only planned.
struct AlibiOption {
  int64_t batch = 1;              // 1: slopes shared by the batch
  const float* slopes = nullptr;  // [batch, num_heads]
};

struct BiasOption {
  DType dtype = DType::kFp32;
  int64_t batch = 1;           // 1: broadcast. THD: 1
  int64_t heads = 1;           // 1: broadcast
  int64_t rows = 0;            // seqlen_q, or total_q for THD
  int64_t cols = 0;            // seqlen_k, or max_seqlen_k for THD
  const void* data = nullptr;  // [batch, heads, rows, cols], contiguous
};

struct BlockMaskOption {
  int64_t batch = 1;  // 1: broadcast
  int64_t heads = 1;  // 1: broadcast
  int64_t rows = 0;   // ceil(seqlen_q / block_q)
  int64_t cols = 0;   // ceil(seqlen_k / block_k)
  int64_t block_q = 128;
  int64_t block_k = 128;
  const uint8_t* data = nullptr;  // [batch, heads, rows, cols]; null: all visible
};

// Dropout with its integer threshold: keep iff lane < threshold; kept values scale by 65536 /
// threshold.
struct DropoutOption {
  uint64_t seed = 0;
  uint32_t offset = 0;
  uint32_t threshold = 65536;
};

struct AttentionProblem {
  Layout layout = Layout::kBshd;
  DType dtype = DType::kFp32;      // of q, k, v
  DType out_dtype = DType::kFp32;  // of out; in backward of dq, dk, dv
  int64_t batch = 0;
  int64_t seqlen_q = 0;  // THD: the longest
  int64_t seqlen_k = 0;  // THD: the longest
  int64_t total_q = 0;   // THD: tokens of q. BSHD: batch * seqlen_q
  int64_t total_k = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  Strides q, k, v;
  std::vector<Sequence> sequences;  // [batch]

  float softmax_scale = 1.0f;
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;  // causal: 0
  Alignment alignment = Alignment::kBottomRight;
  float softcap = 0.0f;  // 0: none
  std::optional<AlibiOption> alibi;
  std::optional<BiasOption> bias;
  bool has_sinks = false;
  const float* sinks = nullptr;  // [num_heads]
  std::optional<DropoutOption> dropout;
  std::optional<BlockMaskOption> block_mask;
  bool deterministic = false;

  // Backward inputs. out and dout: layout of q with head_dim_v.
  DType bwd_out_dtype = DType::kFp32;
  DType bwd_dout_dtype = DType::kFp32;
  Strides bwd_out, bwd_dout;
  bool has_dlse = false;

  int64_t group() const { return num_heads / num_kv_heads; }  // query heads per kv head

  // Keys that query row i of a sequence may see by lengths, causal and window (not block mask or
  // bias).
  KeyRange VisibleKeys(const Sequence& s, int64_t i) const {
    if (i >= s.len_q) return {0, 0};
    const int64_t position = i + s.off;
    return {std::max<int64_t>(0, position - window_left),
            std::min<int64_t>(s.len_k, position + window_right + 1)};
  }

  // Where row 0 of (sequence b, head h) starts in an lse-shaped buffer: BSHD [batch, num_heads,
  // seqlen_q], THD [num_heads, total_q]. Rows of one head are contiguous.
  int64_t LseOffset(int64_t b, int64_t h) const {
    return layout == Layout::kBshd ? (b * num_heads + h) * seqlen_q
                                   : h * total_q + sequences[b].q_token;
  }

  // Row (b, h, i) of the bias, as an element offset into BiasOption::data.
  int64_t BiasRowOffset(int64_t b, int64_t h, int64_t i) const {
    const int64_t hb = bias->heads == 1 ? 0 : h;
    const int64_t bb = bias->batch == 1 ? 0 : b;
    const int64_t row = layout == Layout::kThd ? sequences[b].q_token + i : i;
    return ((bb * bias->heads + hb) * bias->rows + row) * bias->cols;
  }

  // Whether the block mask shows (i, j) of (b, h). True where there is no mask.
  bool BlockVisible(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!block_mask || block_mask->data == nullptr) return true;
    const BlockMaskOption& m = *block_mask;
    const int64_t bb = m.batch == 1 ? 0 : b;
    const int64_t hb = m.heads == 1 ? 0 : h;
    return m.data[((bb * m.heads + hb) * m.rows + i / m.block_q) * m.cols + j / m.block_k] != 0;
  }
};

// Output extents, in elements; outputs are contiguous: out and dq in the layout of q, dk as k, dv
// as v.
int64_t OutElements(const AttentionProblem& p);  // total_q * num_heads * head_dim_v
int64_t LseElements(const AttentionProblem& p);  // num_heads * total_q
int64_t DqElements(const AttentionProblem& p);
int64_t DkElements(const AttentionProblem& p);
int64_t DvElements(const AttentionProblem& p);
int64_t DbiasElements(const AttentionProblem& p);  // 0 without bias

// Whether backward sums row_dot_i = sum_j P_ij dP_ij (with dropout: of what is kept) itself, and
// does not make it of out and dout. out has its own rounding in it, on some paths that of P too, of
// which the exactness rule grants gradients nothing. In row_dot it averages out over the dims of
// values; but over a few of them it need not, where few queries see a key, and dbias is ds itself,
// where nothing averages.
bool SumsRowDot(const AttentionProblem& p);

// Checks the contents of option tensors: bias has no NaN or +inf; ALiBi slopes are finite; sinks
// are finite or -inf; block mask entries are 0 or 1. Null data passes. Errors: INVALID_ARGUMENT,
// naming the tensor, the index and the value.
absl::Status ValidateContents(const AttentionProblem& p);

// Tensors of a call. Inputs follow the strides of the problem; outputs are contiguous and are
// written completely, padding rows included.
struct ForwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;  // out_dtype
  float* lse = nullptr;
};

struct BackwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* out = nullptr;  // bwd_out_dtype, strides bwd_out
  const float* lse = nullptr;
  const void* dout = nullptr;   // bwd_dout_dtype, strides bwd_dout
  const float* dlse = nullptr;  // null: 0
  void* dq = nullptr;           // out_dtype
  void* dk = nullptr;
  void* dv = nullptr;
  float* dbias = nullptr;  // where bias is given
  float* dsink = nullptr;  // where sinks are given; [num_heads]
};

}  // namespace attn

#endif  // ATTN_KERNELS_API_PROBLEM_H_
