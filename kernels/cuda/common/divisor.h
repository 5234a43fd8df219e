// Division by a number that is known before a kernel starts, as a multiplication: the device has no
// instruction for it, and the sequence that stands in for one takes more than 100 cycles.
#ifndef ATTN_KERNELS_CUDA_COMMON_DIVISOR_H_
#define ATTN_KERNELS_CUDA_COMMON_DIVISOR_H_

#include <cstdint>

#ifdef __CUDACC__
#define ATTN_HOST_DEVICE __host__ __device__
#else
#define ATTN_HOST_DEVICE
#endif

namespace attn::cuda {

// With l = ceil(log2 d) and m = ceil(2^(31 + l) / d), which fits 32 bits: m d < 2^(31 + l) + 2^l,
// so that n m / 2^(31 + l) is n / d and less than 1 / d more where n < 2^31. Source: Granlund,
// Montgomery: Division by Invariant Integers using Multiplication (1994).
struct Divisor {
  uint32_t multiplier;  // m
  uint32_t shift;       // l
};

// d: in [1, 2^31].
inline Divisor MakeDivisor(uint32_t d) {
  uint32_t shift = 0;
  while (uint64_t{1} << shift < d) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  return {.multiplier = static_cast<uint32_t>((power + d - 1) / d), .shift = shift};
}

// n / d. n: below 2^31.
ATTN_HOST_DEVICE inline uint32_t Quotient(uint32_t n, const Divisor& d) {
  return static_cast<uint32_t>(uint64_t{n << 1} * d.multiplier >> 32) >> d.shift;
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_DIVISOR_H_
