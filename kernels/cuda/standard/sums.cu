#include <algorithm>

#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/standard/rows.cuh"

namespace attn::cuda::standard {
namespace {

constexpr int kThreads = 256;

unsigned Blocks(int64_t n, int64_t each, int64_t most) {
  return static_cast<unsigned>(std::min((n + each - 1) / each, most));
}

// Threads that share a row: eight take 64 elements of 16 bits at a time, 128 bytes.
constexpr int kRowThreads = 8;
constexpr int kRowsPerBlock = kThreads / kRowThreads;

// Eight threads per row. Grid: (rows, heads, sequences). Rows start at multiples of 16 bytes.
__global__ void __launch_bounds__(kThreads) Delta(const __grid_constant__ DeltaParams p) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kRowThreads;
  const int lane = threadIdx.x % kRowThreads;
  const int i = min(row, p.rows - 1);  // surplus threads repeat the last row: shuffles need them
  for (int b = blockIdx.z; b < p.batch; b += gridDim.z) {
    for (int h = blockIdx.y; h < p.num_heads; h += gridDim.y) {
      const int64_t out = p.out0 + b * p.out_step + i * p.out_token + h * p.out_head;
      const int64_t dout = p.dout0 + b * p.dout_step + i * p.dout_token + h * p.dout_head;
      float sum = 0.0f;
      for (int d = lane * kUnit; d < p.head_dim_v; d += kRowThreads * kUnit) {
        float x[kUnit], y[kUnit];
        LoadRow8(p.out, p.out_dtype, out + d, p.head_dim_v - d, x);
        LoadRow8(p.dout, p.dout_dtype, dout + d, p.head_dim_v - d, y);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) sum = fmaf(x[e], y[e], sum);
      }
      sum = WarpReduce<kRowThreads>(sum, SumOp());
      const int64_t at = p.lse0 + b * p.lse_step + h * p.lse_head + i;
      if (lane == 0 && row < p.rows) p.delta[at] = (p.dlse != nullptr ? p.dlse[at] : 0.0f) - sum;
    }
  }
}

// Sum over the threads of a block, in an order that is always the same.
__device__ double BlockSum(double x) {
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = x;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
  }
  return shared[0];
}

// A block per (sequence, head).
__global__ void __launch_bounds__(kThreads) SinkParts(const __grid_constant__ DeltaParams p) {
  const int64_t b = blockIdx.x / p.num_heads, h = blockIdx.x % p.num_heads;
  const int64_t at = p.lse0 + b * p.lse_step + h * p.lse_head;
  const float sink = p.sinks[h];
  double sum = 0.0;
  for (int i = threadIdx.x; i < p.rows; i += kThreads) {
    const float lse = p.lse[at + i];
    if (sink != -CUDART_INF_F && lse != -CUDART_INF_F) sum += expf(sink - lse) * p.delta[at + i];
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

__global__ void SinkSum(const double* parts, int64_t batch, int64_t num_heads, float* dsink) {
  const int64_t h = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (h >= num_heads) return;
  double sum = 0.0;
  for (int64_t b = 0; b < batch; ++b) sum += parts[b * num_heads + h];
  dsink[h] = static_cast<float>(sum);
}

// A thread per entry of dbias: grid (keys, rows, sequences and heads that have entries of their
// own).
__global__ void __launch_bounds__(kThreads)
    BiasGradient(const __grid_constant__ BiasGradientParams p) {
  const RowsParams& r = p.rows;
  const int heads = r.kv_heads * r.group_heads;
  const int own_heads = p.sum_heads ? 1 : heads;
  const int b0 = blockIdx.z / own_heads, h0 = blockIdx.z % own_heads;
  const int b_end = p.sum_batch ? r.batch : b0 + 1, h_end = p.sum_heads ? heads : h0 + 1;
  const int j = blockIdx.x * kThreads + threadIdx.x;
  if (j >= r.keys) return;
  for (int i = blockIdx.y; i < r.rows; i += gridDim.y) {
    const int head = (r.kv0 + h0 / r.group_heads) * r.group + r.group0 + h0 % r.group_heads;
    const int64_t row = r.q_token0 + b0 * r.q_token_step + i;
    float* entry = p.dbias + (r.batch0 + b0) * r.score.bias_batch + head * r.score.bias_head +
                   row * r.score.bias_cols + j;
    // With compensation: one entry can be a sum over thousands of heads.
    float total = *entry, lost = 0.0f;
    for (int b = b0; b < b_end; ++b) {
      for (int h = h0; h < h_end; ++h) {
        const int64_t matrix = static_cast<int64_t>(b) * heads + h;
        const float ds = LoadFloat(p.ds, p.dtype, (matrix * r.rows + i) * p.ld + j);
        const float x = __fsub_rn(ds, lost);
        const float sum = __fadd_rn(total, x);
        lost = __fsub_rn(__fsub_rn(sum, total), x);
        total = sum;
      }
    }
    *entry = total;
  }
}

// Eight threads per row. Grid: (rows, heads, batch).
__global__ void __launch_bounds__(kThreads) Round(const __grid_constant__ RoundParams p) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kRowThreads;
  const int lane = threadIdx.x % kRowThreads;
  if (row >= p.rows) return;
  const bool whole = p.dim % kUnit == 0;  // then rows start at multiples of 16 bytes
  for (int b = blockIdx.z; b < p.batch; b += gridDim.z) {
    for (int h = blockIdx.y; h < p.heads; h += gridDim.y) {
      const float* from = p.from + b * p.from_batch + h * p.from_head + row * p.from_row;
      const int64_t to = b * p.to_batch + h * p.to_head + row * p.to_row;
      const float factor = p.factors == nullptr
                               ? 1.0f
                               : p.factors[(static_cast<int64_t>(b) * p.heads + h) * p.rows + row];
      if (whole) {
        for (int d = lane * kUnit; d < p.dim; d += kRowThreads * kUnit) {
          float x[kUnit];
          Load8(from + d, x);
#pragma unroll
          for (int e = 0; e < kUnit; ++e) x[e] *= factor;
          StoreRow8(p.to, p.dtype, to + d, x);
        }
      } else {
        for (int d = lane; d < p.dim; d += kRowThreads) {
          StoreFloat(p.to, p.dtype, to + d, from[d] * factor);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) Fill(float* to, int64_t n, float value) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < n; at += step) {
    to[at] = value;
  }
}

constexpr int64_t kMaxGridYz = 65535;
constexpr int64_t kManyBlocks = 16384;

}  // namespace

cudaError_t LaunchDelta(const DeltaParams& p, cudaStream_t stream) {
  const dim3 grid(Blocks(p.rows, kRowsPerBlock, INT32_MAX), Blocks(p.num_heads, 1, kMaxGridYz),
                  Blocks(p.batch, 1, kMaxGridYz));
  Delta<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchSinkParts(const DeltaParams& p, cudaStream_t stream) {
  SinkParts<<<static_cast<unsigned>(p.batch) * p.num_heads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchSinkSum(const double* parts, int64_t batch, int64_t num_heads, float* dsink,
                          cudaStream_t stream) {
  SinkSum<<<Blocks(num_heads, kThreads, INT32_MAX), kThreads, 0, stream>>>(parts, batch, num_heads,
                                                                           dsink);
  return cudaGetLastError();
}

cudaError_t LaunchBiasGradient(const BiasGradientParams& p, cudaStream_t stream) {
  const RowsParams& r = p.rows;
  const int heads = r.kv_heads * r.group_heads;
  const dim3 grid(Blocks(r.keys, kThreads, INT32_MAX), Blocks(r.rows, 1, kMaxGridYz),
                  (p.sum_batch ? 1 : r.batch) * (p.sum_heads ? 1 : heads));
  BiasGradient<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchRound(const RoundParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.heads == 0 || p.rows == 0) return cudaSuccess;
  const dim3 grid(Blocks(p.rows, kRowsPerBlock, INT32_MAX), Blocks(p.heads, 1, kMaxGridYz),
                  Blocks(p.batch, 1, kMaxGridYz));
  Round<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchFill(float* to, int64_t n, float value, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  Fill<<<Blocks(n, kThreads, kManyBlocks), kThreads, 0, stream>>>(to, n, value);
  return cudaGetLastError();
}

}  // namespace attn::cuda::standard
