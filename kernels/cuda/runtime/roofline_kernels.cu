// The kernels of MeasureRoofline().
#include <cuda_runtime.h>

#include "kernels/cuda/runtime/roofline_kernels.h"

namespace attn::cuda {
namespace {

constexpr int kThreads = kRooflineThreads;

// Sums what it reads, so that the reads cannot be left out.
__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint4* data, int64_t count, uint32_t* sink) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t sum = 0;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x9E3779B9u) *sink = sum;  // as good as never
}

// Independent products on registers: eight m16n8k16 chains per warp keep the tensor cores' pipeline
// full.
__global__ void __launch_bounds__(kThreads) MatrixKernel(int rounds, float* sink) {
  constexpr int kChains = kRooflineChains;
  float c[kChains][4] = {};
  uint32_t a[4], b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = 0x3F803F80u + threadIdx.x * (i + 1);
  b[0] = 0x3F803F80u ^ threadIdx.x;
  b[1] = 0x3F813F80u ^ threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};\n"
          : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  if (sum == 12345.678f) *sink = sum;
}

// bf16 values of both signs between 2^-8 and 1, from a hash of their index.
__global__ void __launch_bounds__(kThreads) RandomKernel(uint32_t* data, int64_t words) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += step) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x ^= x >> 13;
    // Sign and the lower ten bits stay; the exponent is 119 to 126.
    data[i] = (x & 0x83FF83FFu) | 0x3B803B80u;
  }
}

}  // namespace

void LaunchRandom(void* data, int64_t words, cudaStream_t stream) {
  RandomKernel<<<1024, kThreads, 0, stream>>>(static_cast<uint32_t*>(data), words);
}

void LaunchRead(const void* data, int64_t words, int blocks, void* sink, cudaStream_t stream) {
  ReadKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data), words,
                                              static_cast<uint32_t*>(sink));
}

void LaunchMatrix(int rounds, int blocks, void* sink, cudaStream_t stream) {
  MatrixKernel<<<blocks, kThreads, 0, stream>>>(rounds, static_cast<float*>(sink));
}

}  // namespace attn::cuda
