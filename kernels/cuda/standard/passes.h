// The two passes of the standard CUDA path over a planned call.
#ifndef ATTN_KERNELS_CUDA_STANDARD_PASSES_H_
#define ATTN_KERNELS_CUDA_STANDARD_PASSES_H_

#include "absl/status/status.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/cublas.h"
#include "kernels/cuda/standard/plan.h"
#include "kernels/cuda/standard/product.h"
#include "kernels/cuda/standard/rows.h"

namespace attn::cuda::standard {

// What a pass works with. blas: null where there is no cuBLAS.
struct Call {
  const AttentionProblem& p;
  const Plan& plan;
  const Launch& launch;
  const CublasHandle* blas;
};

// Enqueue the pass. Errors: INTERNAL (names the CUDA or cuBLAS error).
absl::Status Forward(const Call& call, const ForwardTensors& tensors);
absl::Status Backward(const Call& call, const BackwardTensors& tensors);

// Where the sequences of a run lie in a tensor, in elements: row 0 of head 0 of its first sequence,
// and from each sequence to the next.
struct RunOffsets {
  int64_t first = 0, step = 0;
};
RunOffsets QueryOffsets(const AttentionProblem& p, const SequenceRun& run,
                        const TensorStrides& strides);
RunOffsets KeyOffsets(const AttentionProblem& p, const SequenceRun& run,
                      const TensorStrides& strides);
RunOffsets LseOffsets(const AttentionProblem& p, const SequenceRun& run);

// A chunk of a tensor as an operand: rows are tokens, or columns where `transposed`.
Operand QueryOperand(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                     const void* data, DType dtype, const TensorStrides& strides, bool transposed);
Operand KeyOperand(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                   const void* data, DType dtype, const TensorStrides& strides, bool transposed);
// A score buffer of a chunk, [len_q, len_k] each; P and dS in 16 bits lie in the first halves of
// the rows of fp32 scores.
Operand ScoreOperand(const AttentionProblem& p, const Chunk& chunk, const float* scores,
                     DType dtype, bool transposed);

// c of a product becomes `to`.
void SetTarget(const Operand& to, Product* product);
// A product over the heads of a chunk, without its operands.
Product ChunkProduct(const Chunk& chunk, int64_t m, int64_t n, int64_t k);

// scores = q k^T (or dout v^T): fp32.
absl::Status ScoreProduct(const Call& call, const Chunk& chunk, const Operand& rows,
                          const Operand& keys, int64_t dim, float* scores);

// Everything but the pointers of a pass.
RowsParams MakeRowsParams(const AttentionProblem& p, const SequenceRun& run, const Chunk& chunk,
                          float* scores);

}  // namespace attn::cuda::standard

#endif  // ATTN_KERNELS_CUDA_STANDARD_PASSES_H_
