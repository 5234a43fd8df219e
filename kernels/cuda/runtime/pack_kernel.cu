// LaunchPack(): one thread per 16 bytes of the destination.
#include "kernels/cuda/runtime/pack.h"

namespace attn::cuda {
namespace {

constexpr int kThreads = 256;

struct PackParams {
  const void* source;
  uint4* destination;
  int64_t pieces;  // of 16 bytes, in all
  int64_t tokens, stride_batch, stride_token, stride_head;
  int32_t heads, dim, row_pieces;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads) PackKernel(PackParams p) {
  constexpr int kPerPiece = static_cast<int>(kRowAlignment / sizeof(Word));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.pieces;
       i += step) {
    const int64_t row = i / p.row_pieces;
    const int first = static_cast<int>(i - row * p.row_pieces) * kPerPiece;
    const int64_t batch_token = row / p.heads;
    const int64_t head = row - batch_token * p.heads;
    const int64_t batch = batch_token / p.tokens;
    const int64_t token = batch_token - batch * p.tokens;
    const Word* source = static_cast<const Word*>(p.source) + batch * p.stride_batch +
                         token * p.stride_token + head * p.stride_head + first;
    alignas(16) Word words[kPerPiece];
#pragma unroll
    for (int w = 0; w < kPerPiece; ++w) words[w] = first + w < p.dim ? source[w] : Word{0};
    p.destination[i] = *reinterpret_cast<const uint4*>(words);
  }
}

}  // namespace

cudaError_t LaunchPack(const PackJob& job, cudaStream_t stream) {
  const StridedTensor& from = job.from;
  const int64_t row_pieces = Packed(from).strides.head * from.element_bytes / kRowAlignment;
  const PackParams params = {.source = job.source,
                             .destination = static_cast<uint4*>(job.destination),
                             .pieces = from.batch * from.tokens * from.heads * row_pieces,
                             .tokens = from.tokens,
                             .stride_batch = from.strides.batch,
                             .stride_token = from.strides.token,
                             .stride_head = from.strides.head,
                             .heads = static_cast<int32_t>(from.heads),
                             .dim = static_cast<int32_t>(from.dim),
                             .row_pieces = static_cast<int32_t>(row_pieces)};
  const int64_t blocks = (params.pieces + kThreads - 1) / kThreads;
  // Enough blocks to fill any device; the loop takes the rest.
  const unsigned grid = static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
  if (from.element_bytes == 2) {
    PackKernel<uint16_t><<<grid, kThreads, 0, stream>>>(params);
  } else {
    PackKernel<uint32_t><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace attn::cuda
