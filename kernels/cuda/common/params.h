// What a CUDA attention kernel is told, in device terms, and how it follows from an
// AttentionProblem.
#ifndef ATTN_KERNELS_CUDA_COMMON_PARAMS_H_
#define ATTN_KERNELS_CUDA_COMMON_PARAMS_H_

#include <cstdint>
#include <vector>

#include "kernels/api/problem.h"

namespace attn::cuda {

// Strides in elements.
struct TensorStrides {
  int64_t batch, token, head;
};

// Rows of a sequence in scratch memory are padded to a multiple of this, a multiple of every tile's
// queries.
inline constexpr int kRowPadding = 128;

// Lengths of one sequence stay below this, so that positions, windows and their sums fit 32 bits.
inline constexpr int64_t kMaxSeqlen = int64_t{1} << 29;

// One sequence; the device's copy of attn::Sequence.
struct DeviceSequence {
  int64_t batch;             // factor of the batch strides: its number in BSHD, 0 in THD
  int64_t q_token, k_token;  // first row on the token axis
  int64_t lse;               // offset of (this sequence, head 0, row 0) in an lse-shaped buffer
  int64_t padded;            // its first row in a padded row space of one head
  int32_t rows_q, rows_k;    // rows stored
  int32_t len_q, len_k;      // rows valid
  int32_t off;               // query i stands at key position i + off
  int32_t reserved;
};

// The sequences of a call. `array` is null where all are alike: then sequence b is `first`, moved.
struct SequenceParams {
  const DeviceSequence* array;
  DeviceSequence first;
  int64_t lse_batch;     // elements of an lse-shaped buffer from one sequence to the next
  int32_t padded_batch;  // rows of the padded row space from one sequence to the next
  int32_t batch;
};

enum class BiasType : int32_t { kNone, kFp32, kFp16, kBf16 };

// Everything that shapes the scores. Pointers are to device memory.
struct ScoreParams {
  float scale;          // softmax_scale
  float scale_log2;     // softmax_scale * log2(e)
  int32_t window_left;  // clamped to 2^30
  int32_t window_right;
  float softcap;        // 0: none
  const float* alibi;   // null: none
  int32_t alibi_batch;  // elements between batches: 0 or num_heads
  BiasType bias_type;
  const void* bias;
  int64_t bias_batch, bias_head;  // elements between batches and heads; 0: broadcast
  int64_t bias_cols;
  const float* sinks;  // [num_heads]; null: none
  uint32_t dropout_offset;
  uint32_t philox_keys[20];  // two for each round
  uint32_t threshold;        // keep iff 16 bits < threshold; 65536: no dropout
  float keep_scale;          // 65536 / threshold
  // The same for exponents and quotients: log2 and inverse of keep_scale; 0 and 1 where nothing is
  // kept.
  float keep_log2, keep_inverse;
  uint32_t keep_add, keep_high;   // threshold, as KeepFlags() compares with it
  const uint8_t* block_mask;      // null: none
  int64_t mask_batch, mask_head;  // elements between batches and heads; 0: broadcast
  int32_t mask_cols, block_q, block_k;
};

ScoreParams MakeScoreParams(const AttentionProblem& p);

// Whether every sequence has the same lengths and lies where BSHD puts it.
bool UniformSequences(const AttentionProblem& p);
// One entry per sequence.
std::vector<DeviceSequence> MakeSequences(const AttentionProblem& p);
// `array`: MakeSequences(p) in device memory, or null where UniformSequences(p).
SequenceParams MakeSequenceParams(const AttentionProblem& p, const DeviceSequence* array);
// Rows of one head in the padded row space of all sequences.
int64_t PaddedRows(const AttentionProblem& p);
// Elements from one head to the next of an lse-shaped buffer.
int64_t LseHeadStride(const AttentionProblem& p);
TensorStrides ToDevice(const Strides& s);
// Strides of a contiguous output in the layout of q (rows = seqlen_q) or k.
TensorStrides ContiguousStrides(const AttentionProblem& p, int64_t seqlen, int64_t heads,
                                int64_t head_dim);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_PARAMS_H_
