// A made-up "attention" whose outputs mix the bits of every input that a row may use, exactly and
// in the same way on the host and on a device. What a wrong stride, offset, option pointer or
// sequence would change, it changes.
#ifndef ATTN_TESTS_GPU_ECHO_H_
#define ATTN_TESTS_GPU_ECHO_H_

#include <cstdint>
#include <cstring>

#include "kernels/api/problem.h"
#include "kernels/cuda/common/params.h"

#ifdef __CUDACC__
#define ATTN_BOTH __host__ __device__
#else
#define ATTN_BOTH
#endif

namespace attn::cuda {

// Everything of a call by value or pointer; pointers are of the side that evaluates.
struct EchoCall {
  const void *q, *k, *v, *out, *dout;
  const float *lse, *dlse, *alibi, *sinks;
  const void* bias;
  const uint8_t* mask;
  int32_t size, out_size, dout_size, bias_size;  // of an element; out and dout of a backward pass
  TensorStrides sq, sk, sv, sout, sdout;
  int32_t heads, kv_heads, dim, dim_v;
  int64_t alibi_batch, bias_batch, bias_head, bias_cols, mask_batch, mask_head, mask_cols;
  int32_t block_q, block_k;
  int64_t lse_head;
  uint32_t seed;
  SequenceParams sequences;
};

inline EchoCall MakeEchoCall(const AttentionProblem& p, const ForwardTensors& t,
                             const DeviceSequence* sequences) {
  EchoCall c = {};
  c.q = t.q;
  c.k = t.k;
  c.v = t.v;
  c.size = static_cast<int32_t>(SizeOf(p.dtype));
  c.sq = ToDevice(p.q);
  c.sk = ToDevice(p.k);
  c.sv = ToDevice(p.v);
  c.heads = static_cast<int32_t>(p.num_heads);
  c.kv_heads = static_cast<int32_t>(p.num_kv_heads);
  c.dim = static_cast<int32_t>(p.head_dim);
  c.dim_v = static_cast<int32_t>(p.head_dim_v);
  const ScoreParams s = MakeScoreParams(p);
  c.alibi = s.alibi;
  c.alibi_batch = s.alibi_batch;
  c.bias = s.bias;
  c.bias_size = p.bias ? static_cast<int32_t>(SizeOf(p.bias->dtype)) : 0;
  c.bias_batch = s.bias_batch;
  c.bias_head = s.bias_head;
  c.bias_cols = s.bias_cols;
  c.sinks = s.sinks;
  c.mask = s.block_mask;
  c.mask_batch = s.mask_batch;
  c.mask_head = s.mask_head;
  c.mask_cols = s.mask_cols;
  c.block_q = s.block_q;
  c.block_k = s.block_k;
  c.seed = s.philox_keys[0];
  c.lse_head = LseHeadStride(p);
  c.sequences = MakeSequenceParams(p, sequences);
  return c;
}

inline EchoCall MakeEchoCall(const AttentionProblem& p, const BackwardTensors& t,
                             const DeviceSequence* sequences) {
  EchoCall c = MakeEchoCall(p, ForwardTensors{.q = t.q, .k = t.k, .v = t.v}, sequences);
  c.out = t.out;
  c.out_size = static_cast<int32_t>(SizeOf(p.bwd_out_dtype));
  c.sout = ToDevice(p.bwd_out);
  c.dout = t.dout;
  c.dout_size = static_cast<int32_t>(SizeOf(p.bwd_dout_dtype));
  c.sdout = ToDevice(p.bwd_dout);
  c.lse = t.lse;
  c.dlse = t.dlse;
  return c;
}

ATTN_BOTH inline DeviceSequence EchoSequence(const SequenceParams& p, int b) {
  if (p.array != nullptr) return p.array[b];
  DeviceSequence s = p.first;
  s.batch = b;
  s.lse = b * p.lse_batch;
  return s;
}

ATTN_BOTH inline uint32_t Bits(const void* data, int size, int64_t index) {
  if (size == 4) return static_cast<const uint32_t*>(data)[index];
  return static_cast<const uint16_t*>(data)[index];
}
ATTN_BOTH inline uint32_t Bits(const float* data, int64_t index) {
  return reinterpret_cast<const uint32_t*>(data)[index];
}
ATTN_BOTH inline int64_t At(const TensorStrides& s, const DeviceSequence& q, int64_t token,
                            int head, int d) {
  return q.batch * s.batch + token * s.token + head * s.head + d;
}

// What (sequence b, query head h, row i, component d) sees. Rows beyond the valid ones and keys
// beyond the valid ones hold NaN in tests and are not read.
ATTN_BOTH inline uint32_t EchoQuery(const EchoCall& c, int b, int h, int64_t i, int d) {
  const DeviceSequence s = EchoSequence(c.sequences, b);
  if (i >= s.len_q || s.len_k == 0) return 0x3F000000u;
  const int64_t j = i % s.len_k;
  const int kv = h / (c.heads / c.kv_heads);
  uint32_t x = 19u * s.len_q + 23u * s.len_k + 29u * static_cast<uint32_t>(s.off) + c.seed;
  x += Bits(c.q, c.size, At(c.sq, s, s.q_token + i, h, d % c.dim));
  x += 3u * Bits(c.k, c.size, At(c.sk, s, s.k_token + j, kv, d % c.dim));
  x += 5u * Bits(c.v, c.size, At(c.sv, s, s.k_token + j, kv, d % c.dim_v));
  if (c.alibi != nullptr) x += 7u * Bits(c.alibi, b * c.alibi_batch + h);
  if (c.bias != nullptr) {
    const int64_t row = b * c.bias_batch + h * c.bias_head + (s.q_token + i) * c.bias_cols;
    x += 11u * Bits(c.bias, c.bias_size, row + j);
  }
  if (c.sinks != nullptr) x += 13u * Bits(c.sinks, h);
  if (c.mask != nullptr) {
    x += 17u *
         c.mask[b * c.mask_batch + h * c.mask_head + i / c.block_q * c.mask_cols + j / c.block_k];
  }
  const int64_t lse_row = s.lse + h * c.lse_head + i;
  if (c.out != nullptr)
    x += 31u * Bits(c.out, c.out_size, At(c.sout, s, s.q_token + i, h, d % c.dim_v));
  if (c.dout != nullptr)
    x += 37u * Bits(c.dout, c.dout_size, At(c.sdout, s, s.q_token + i, h, d % c.dim_v));
  if (c.lse != nullptr) x += 41u * Bits(c.lse, lse_row);
  if (c.dlse != nullptr) x += 43u * Bits(c.dlse, lse_row);
  return x;
}

// The same for a key row, over one query row.
ATTN_BOTH inline uint32_t EchoKey(const EchoCall& c, int b, int kv, int64_t j, int d) {
  const DeviceSequence s = EchoSequence(c.sequences, b);
  if (j >= s.len_k || s.len_q == 0) return 0;
  return EchoQuery(c, b, kv * (c.heads / c.kv_heads), j % s.len_q, d) +
         47u * Bits(c.k, c.size, At(c.sk, s, s.k_token + j, kv, d % c.dim));
}

// Writes the low bits as an element of `size` bytes.
ATTN_BOTH inline void Put(void* data, int size, int64_t index, uint32_t bits) {
  if (size == 4) {
    static_cast<uint32_t*>(data)[index] = bits;
  } else {
    static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bits);
  }
}

}  // namespace attn::cuda

#endif  // ATTN_TESTS_GPU_ECHO_H_
