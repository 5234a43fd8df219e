// Tiles in shared memory: rows of 16-byte chunks, swizzled so that ldmatrix has no bank conflicts.
#ifndef ATTN_KERNELS_CUDA_COMMON_TILE_CUH_
#define ATTN_KERNELS_CUDA_COMMON_TILE_CUH_

#include <cstdint>

#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/matrix.cuh"

namespace attn::cuda {

// Byte offset of `chunk` of `row` in a tile of kChunks chunks per row. Eight rows of one chunk
// column, which one ldmatrix matrix reads, lie in eight different groups of four banks: where a row
// is a multiple of 128 bytes the row's low three bits are mixed into the chunk; where it is an odd
// multiple of 64 bytes two bits suffice.
template <int kChunks>
__device__ __forceinline__ uint32_t TileOffset(int row, int chunk) {
  static_assert(kChunks % 4 == 0);
  if constexpr (kChunks % 8 == 0)
    return static_cast<uint32_t>(row * kChunks + (chunk ^ (row & 7))) * 16;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ ((row >> 1) & 3))) * 16;
}

// Address of chunk (own chunk + 2 * step), given the address `base` of a lane's own chunk (0 or 1)
// of its row. One xor where the swizzle allows: keeping every step's address in a register made the
// loops spill.
template <int kChunks>
__device__ __forceinline__ uint32_t StepAddress(uint32_t base, int step) {
  constexpr int kMask = kChunks % 8 == 0 ? 127 : 63;
  return (base ^ ((step * 32) & kMask)) + ((step * 32) & ~kMask);
}

// Loads kRows rows with cp.async. Rows from valid_rows on and chunks from valid_chunks on become
// zeros. `source` is row 0; rows lie row_bytes apart. kCheckRows = false: all rows are valid.
template <int kRows, int kChunks, int kThreads, bool kCheckRows>
__device__ __forceinline__ void LoadTile(uint32_t tile, const char* source, int64_t row_bytes,
                                         int valid_rows, int valid_chunks) {
  if constexpr (kThreads % kChunks == 0) {
    constexpr int kStep = kThreads / kChunks;  // rows apart
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    const char* from = source + first * row_bytes + chunk * 16;
    const bool chunk_valid = chunk < valid_chunks;
    const int64_t step_bytes = kStep * row_bytes;
    const uint32_t to = tile + TileOffset<kChunks>(first, chunk);
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool valid = chunk_valid && (!kCheckRows || first + i * kStep < valid_rows);
      if constexpr (kStep % 8 == 0) {
        ptx::CopyAsync16(to + i * kStep * kChunks * 16, from, valid);
      } else {
        ptx::CopyAsync16(tile + TileOffset<kChunks>(first + i * kStep, chunk), from, valid);
      }
      from += step_bytes;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int row = index / kChunks, chunk = index % kChunks;
      const bool valid = (!kCheckRows || row < valid_rows) && chunk < valid_chunks;
      ptx::CopyAsync16(tile + TileOffset<kChunks>(row, chunk),
                       source + row * row_bytes + chunk * 16, valid);
    }
  }
}

// Two neighbouring elements, of type T or FP32.
template <class T>
__device__ __forceinline__ void StorePair(void* data, bool fp32, int64_t index, float x, float y) {
  if (fp32) {
    *reinterpret_cast<float2*>(static_cast<float*>(data) + index) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(data) + index) = ptx::Element<T>::Pack(x, y);
  }
}

// Eight neighbouring elements; index is a multiple of 8.
template <class T>
__device__ __forceinline__ void StoreChunk(void* data, bool fp32, int64_t index,
                                           const float2 (&x)[4]) {
  if (fp32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(data) + index);
    to[0] = make_float4(x[0].x, x[0].y, x[1].x, x[1].y);
    to[1] = make_float4(x[2].x, x[2].y, x[3].x, x[3].y);
  } else {
    using E = ptx::Element<T>;
    *reinterpret_cast<uint4*>(static_cast<T*>(data) + index) =
        make_uint4(E::Pack(x[0].x, x[0].y), E::Pack(x[1].x, x[1].y), E::Pack(x[2].x, x[2].y),
                   E::Pack(x[3].x, x[3].y));
  }
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_TILE_CUH_
