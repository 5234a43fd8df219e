// What flash_cpu does to one tile of scores between its matrix products, with SIMD.
//
// A tile is transposed: [keys, cols], one column per query row, contiguous. So everything that
// softmax needs per query (maximum, sum, lse, visible range) is a vector across columns, and no
// step reduces within a vector. cols is a multiple of kColumnStep; columns past the last query row
// hold finite numbers that nobody reads. Scores are in units of log 2 ("log2 domain"): p = 2^(s −
// max). Every function runs on the calling thread and is thread-safe.
#ifndef ATTN_KERNELS_CPU_FLASH_TILE_H_
#define ATTN_KERNELS_CPU_FLASH_TILE_H_

#include <cstdint>

#include "kernels/api/problem.h"

namespace attn {

inline constexpr int64_t kColumnStep = 16;  // lanes of the widest target
inline constexpr int64_t kMaxColumns = 64;
inline constexpr double kLog2e = 1.4426950408889634;

// s = cap·tanh(s). Where grad is not null, it gets 1 − tanh².
void SoftcapTile(int64_t keys, int64_t cols, float cap, float* s, float* grad);

// s −= slope[c]·|position[c] − j|, j = 0 … keys − 1 counting from the tile's first key, as is
// position.
void AlibiTile(int64_t keys, int64_t cols, const float* slope, const float* position, float* s);

// s = −inf unless lo[c] ≤ j < hi[c].
void MaskTile(int64_t keys, int64_t cols, const int32_t* lo, const int32_t* hi, float* s);

// One step of the online softmax: with the new running maximum m, s becomes p = 2^(s − m), l
// becomes l·alpha + Σ_j p, and alpha = 2^(m_old − m), by which the accumulated output has to be
// scaled. Start with m = −inf, l = 0. A column that has seen no key keeps m = −inf, l = 0.
void SoftmaxTile(int64_t keys, int64_t cols, float* s, float* m, float* l, float* alpha);

// Ends the online softmax of `cols` columns. sink (natural units; may be null) joins the
// denominator. scale[c]: what the accumulated output is multiplied by; lse[c]: natural log. A
// column without keys: scale 0; lse −inf, or exactly its sink.
void FinishColumns(int64_t cols, const float* m, const float* l, const float* sink, float* scale,
                   float* lse);

// Joins the partial result (o2, m2, l2) over other keys into (o, m, l). o: [head_dim_v, cols].
void MergeColumns(int64_t head_dim_v, int64_t cols, const float* o2, const float* m2,
                  const float* l2, float* o, float* m, float* l);

// keep[j][c] = scale where lane j of the dropout mask keeps the entry, else 0. The tile begins at
// key j0, a multiple of 8. query[c] and head[c] are the Philox words i and b·num_heads + h.
void DropoutTile(const DropoutOption& dropout, int64_t j0, int64_t keys, int64_t cols,
                 const uint32_t* query, const uint32_t* head, float scale, float* keep);

// x *= y, elementwise over the tile.
void MultiplyTile(int64_t keys, int64_t cols, const float* y, float* x);

// s becomes p = 2^(s − lse2[c] − lse2_low[c]). lse2 + lse2_low is log2(e)·lse, in two parts because
// rounding it once more would cost as much as all of fp32's exactness where scores are small.
void ProbabilityTile(int64_t keys, int64_t cols, const float* lse2, const float* lse2_low,
                     float* s);

// row_dot[c] += Σ_j p∘dp; with keep (not null): Σ_j p∘keep∘dp.
void RowDotTile(int64_t keys, int64_t cols, const float* keep, const float* p, const float* dp,
                float* row_dot);

// The gradient of the scores: dp becomes p∘(dp − delta[c]). With keep (not null): p∘(keep∘dp −
// delta[c]), and p becomes keep∘p, which dv needs.
void ScoreGradientTile(int64_t keys, int64_t cols, const float* delta, const float* keep, float* p,
                       float* dp);

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_FLASH_TILE_H_
