// Products of tiles in shared memory, accumulated in registers.
#ifndef ATTN_KERNELS_CUDA_SM80_MULTIPLY_CUH_
#define ATTN_KERNELS_CUDA_SM80_MULTIPLY_CUH_

#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/ptx/matrix.cuh"

namespace attn::cuda::sm80 {

template <int kRows, int kCols>
__device__ __forceinline__ void Clear(float (&x)[kRows][kCols][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) x[i][j][0] = x[i][j][1] = x[i][j][2] = x[i][j][3] = 0.0f;
  }
}

// c += A B^T: A's rows (kRows m16 tiles from lane address `a`) and B's rows (kCols n8 tiles from
// `b`) both hold kSteps * 16 elements of the summed axis.
template <class T, int kChunks, int kSteps, int kRows, int kCols>
__device__ __forceinline__ void MultiplyRows(uint32_t a, uint32_t b, float (&c)[kRows][kCols][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      ptx::LoadMatrix4(x[i], StepAddress<kChunks>(a, step) + i * 16 * kChunks * 16);
#pragma unroll
    for (int j = 0; j < kCols / 2; ++j) {
      uint32_t y[4];
      ptx::LoadMatrix4(y, StepAddress<kChunks>(b, step) + j * 16 * kChunks * 16);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::Element<T>::Mma(c[i][2 * j], x[i], y[0], y[1]);
        ptx::Element<T>::Mma(c[i][2 * j + 1], x[i], y[2], y[3]);
      }
    }
  }
}

// c += A B with B stored [summed axis][columns]: kCols n8 tiles from column step `first` on.
template <class T, int kAChunks, int kBChunks, int kSteps, int kRows, int kCols>
__device__ __forceinline__ void MultiplyColumns(uint32_t a, uint32_t b, int first,
                                                float (&c)[kRows][kCols][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      ptx::LoadMatrix4(x[i], StepAddress<kAChunks>(a, step) + i * 16 * kAChunks * 16);
#pragma unroll
    for (int j = 0; j < kCols / 2; ++j) {
      uint32_t y[4];
      ptx::LoadMatrix4Transposed(y,
                                 StepAddress<kBChunks>(b, first + j) + step * 16 * kBChunks * 16);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::Element<T>::Mma(c[i][2 * j], x[i], y[0], y[1]);
        ptx::Element<T>::Mma(c[i][2 * j + 1], x[i], y[2], y[3]);
      }
    }
  }
}

}  // namespace attn::cuda::sm80

#endif  // ATTN_KERNELS_CUDA_SM80_MULTIPLY_CUH_
