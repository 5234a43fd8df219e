#include "tests/gpu/echo_path.h"

namespace attn::cuda {
namespace {

__global__ void EchoKernel(EchoCall call, EchoKind kind, int heads, int dim, int64_t max_rows,
                           void* out, int size, int64_t token_stride, int64_t batch_stride) {
  const int b = blockIdx.y;
  const DeviceSequence s = EchoSequence(call.sequences, b);
  const bool query = kind != EchoKind::kKey;
  const int64_t rows = query ? s.rows_q : s.rows_k;
  const int64_t first = query ? s.q_token : s.k_token;
  const int64_t count = max_rows * heads * dim;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < count;
       n += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int d = static_cast<int>(n % dim);
    const int h = static_cast<int>(n / dim % heads);
    const int64_t i = n / dim / heads;
    if (i >= rows) continue;
    if (kind == EchoKind::kLse) {
      Put(out, 4, s.lse + h * call.lse_head + i, EchoQuery(call, b, h, i, 0));
      continue;
    }
    const int64_t at = s.batch * batch_stride + (first + i) * token_stride + h * dim + d;
    Put(out, size, at,
        kind == EchoKind::kQuery ? EchoQuery(call, b, h, i, d) : EchoKey(call, b, h, i, d));
  }
}

__global__ void FaultKernel(int* nowhere) { *nowhere = 1; }

__global__ void BusyKernel(int64_t clocks) {
  const int64_t end = clock64() + clocks;
  while (clock64() < end) {
  }
}

}  // namespace

cudaError_t LaunchEcho(const EchoCall& call, EchoKind kind, int heads, int dim, int64_t max_rows,
                       void* out, int size, int64_t token_stride, int64_t batch_stride,
                       cudaStream_t stream) {
  const int64_t blocks = (max_rows * heads * dim + 255) / 256;
  const dim3 grid(static_cast<unsigned>(blocks < 4096 ? blocks : 4096), call.sequences.batch);
  EchoKernel<<<grid, 256, 0, stream>>>(call, kind, heads, dim, max_rows, out, size, token_stride,
                                       batch_stride);
  return cudaGetLastError();
}

cudaError_t LaunchFault(cudaStream_t stream) {
  FaultKernel<<<1, 1, 0, stream>>>(nullptr);
  return cudaGetLastError();
}

cudaError_t LaunchBusy(int64_t clocks, cudaStream_t stream) {
  BusyKernel<<<1, 1, 0, stream>>>(clocks);
  return cudaGetLastError();
}

}  // namespace attn::cuda
