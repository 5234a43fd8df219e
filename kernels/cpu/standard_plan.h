// Sizes of the standard CPU path: its tiles, its workspace, and the bytes its loops move.
#ifndef ATTN_KERNELS_CPU_STANDARD_PLAN_H_
#define ATTN_KERNELS_CPU_STANDARD_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/api/backend.h"
#include "kernels/api/problem.h"

namespace attn::standard {

// Tiles of the matrix products. A packed K tile (256 x 128 fp32: 128 KiB) and a block of scores (64
// x 256: 64 KiB) lie in the second-level cache together.
inline constexpr int64_t kRowTile = 64;   // queries per block of S = Q K^T and dP = dO V^T
inline constexpr int64_t kSumTile = 256;  // terms per tile of every long sum, and keys per tile
inline constexpr int64_t kOutTile = 128;  // rows per block of out, dq, dk and dv

// Elements from one row of a score matrix to the next: rows start on a cache line, and never a
// power of two apart, which would put a column of the matrix into a few cache sets.
int64_t ScoreStride(int64_t len_k);

// Whether several (sequence, query head) pairs add into the same entries of dbias.
bool DbiasIsShared(const AttentionProblem& p);

// Score matrices one worker holds: forward S, overwritten by P; backward P and dS, and ds of the
// uncapped scores where dbias is summed from it later and it differs from dS.
int64_t ScoreMatrices(const AttentionProblem& p, Pass pass);

// What one worker uses for one (sequence, query head) at a time.
struct Slot {
  float* scores[3];  // [len_q, ScoreStride(len_k)], ScoreMatrices() of them
  float* bias_row;   // [seqlen_k] each
  float* keep_row;
  float* cap_row;
  float* left;         // [kSumTile, head_dim or head_dim_v], widened rows
  float* right;        // the same
  float* transposed;   // [head_dim or head_dim_v, kSumTile]
  float* accumulator;  // [kOutTile, head_dim or head_dim_v]
};

// The parts of RunContext::workspace. Every part is 64-byte aligned.
class Workspace {
 public:
  Workspace(const AttentionProblem& p, Pass pass, int num_slots);

  // Saturates at the largest int64_t.
  int64_t bytes() const { return bytes_; }
  int num_slots() const { return num_slots_; }

  // `memory` has at least bytes().
  Slot GetSlot(std::span<std::byte> memory, int slot) const;
  // dk, then dv, of each query head, [total_k, num_heads, head_dim or head_dim_v]; only where a kv
  // head has several query heads.
  float* DkParts(std::span<std::byte> memory) const;
  float* DvParts(std::span<std::byte> memory) const;
  // [batch, num_heads]; only with sinks.
  double* DsinkParts(std::span<std::byte> memory) const;

 private:
  int num_slots_;
  int64_t matrices_, matrix_bytes_, row_bytes_, tile_bytes_, accumulator_bytes_;
  int64_t slot_bytes_, dk_parts_at_, dv_parts_at_, dsink_parts_at_, bytes_;
};

// Slots for a problem on `num_workers` workers: no more than there are (sequence, head) pairs.
int NumSlots(const AttentionProblem& p, int num_workers);

// What the loops of standard_forward.cc and standard_backward.cc load and store; saturates.
TileModel Model(const AttentionProblem& p, Pass pass);

}  // namespace attn::standard

#endif  // ATTN_KERNELS_CPU_STANDARD_PLAN_H_
