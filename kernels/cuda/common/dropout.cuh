// The dropout mask: Philox draws, and how the lanes of a warp share them. A draw decides eight
// neighbouring keys of one query; in the accumulators of mma.sync these lie in several lanes, so
// each lane makes a part of the draws and they exchange bits.
#ifndef ATTN_KERNELS_CUDA_COMMON_DROPOUT_CUH_
#define ATTN_KERNELS_CUDA_COMMON_DROPOUT_CUH_

#include <cstdint>

#include "kernels/cuda/common/params.h"
#include "kernels/cuda/ptx/bits.cuh"

namespace attn::cuda {

// Philox4x32-10. Source: Salmon et al., SC'11; kernels/api/philox.h is the host's twin and has the
// golden vectors.
__device__ __forceinline__ uint4 Philox(uint4 c, const uint32_t (&keys)[20]) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c.x, b = uint64_t{0xCD9E8D57u} * c.z;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ keys[2 * round], static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ c.w ^ keys[2 * round + 1],
                   static_cast<uint32_t>(a));
  }
  return c;
}

// The draw of keys 8 * j_block … + 7 of query i: key 2 n in the low half of word n, 2 n + 1 in the
// high half.
__device__ __forceinline__ uint4 DrawKeys(const ScoreParams& p, uint32_t head, uint32_t i,
                                          uint32_t j_block) {
  return Philox(make_uint4(j_block, i, head, p.dropout_offset), p.philox_keys);
}

// Bits 15 and 31: whether the halves of `word` are below the threshold. Other bits: anything. With
// T the threshold and x a half: x mod 2^15 + 2^15 - T mod 2^15 has bit 15 set iff x mod 2^15 >= T
// mod 2^15; x < T is the majority of "x < 2^15", "not that bit" and "T >= 2^15".
__device__ __forceinline__ uint32_t KeepFlags(const ScoreParams& p, uint32_t word) {
  const uint32_t sum = (word & 0x7FFF7FFFu) + p.keep_add;
  return (~word & ~sum) | (p.keep_high & ~(word & sum));
}

// Which of keys 8 * j_block … + 7 of query i are kept, bit per key.
__device__ __forceinline__ uint32_t KeepBits(const ScoreParams& p, uint32_t head, uint32_t i,
                                             uint32_t j_block) {
  const uint4 w = DrawKeys(p, head, i, j_block);
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t flags = KeepFlags(p, words[n]);
    bits |= (flags >> 15 & 1u) << (2 * n) | (flags >> 31) << (2 * n + 1);
  }
  return bits;
}

// A lane's draws, at most eight: `flags[n]` has the flags of word n of each. Draw c of kDraws is at
// bits 16 - kDraws + c and 32 - kDraws + c when all are in.
struct KeepDraws {
  uint32_t flags[4] = {};

  __device__ __forceinline__ void Add(const ScoreParams& p, const uint4& w) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      flags[n] = flags[n] >> 1 | (KeepFlags(p, words[n]) & 0x80008000u);
    }
  }
};

// What a lane knows after an exchange: 8 bytes in which draw c of kDraws is bit 8 - kDraws + c.
// All masks are made by bringing that bit to the top of its byte and spreading it.
struct Keeps {
  uint32_t bytes[2];

  // Draw c of byte e (0 … 3) of word w: all ones if kept.
  template <int kDraws>
  __device__ __forceinline__ uint32_t Mask(int w, int e, int c) const {
    return ptx::SpreadSigns(bytes[w] << (kDraws - 1 - c), 0x8888u + 0x1111u * e);
  }
  // Draw c of bytes 2 pair and 2 pair + 1 of word w, for a pair of 16-bit values.
  template <int kDraws>
  __device__ __forceinline__ uint32_t PairMask(int w, int pair, int c) const {
    return ptx::SpreadSigns(bytes[w] << (kDraws - 1 - c), pair == 0 ? 0x9988u : 0xBBAAu);
  }
};

// Accumulators with a query per row: lane q of the four that share a row holds keys 2 q and 2 q + 1
// of each eight. Byte 2 (s % 2) + n of bytes[s / 2]: lane s's draws, key 2 q + n.
__device__ __forceinline__ Keeps ExchangeInQuad(const KeepDraws& draws, int lane) {
  const bool upper = (lane & 2) != 0, odd = (lane & 1) != 0;
  const uint32_t low = ptx::Permute(draws.flags[0], draws.flags[1], 0x7531);
  const uint32_t high = ptx::Permute(draws.flags[2], draws.flags[3], 0x7531);
  const uint32_t mine = upper ? high : low;
  const uint32_t theirs = __shfl_xor_sync(~0u, upper ? low : high, 2);
  const uint32_t own = ptx::Permute(mine, theirs, odd ? 0x7632 : 0x5410);  // of lanes q, q ^ 2
  const uint32_t other =                                                   // of q ^ 1, q ^ 3
      __shfl_xor_sync(~0u, ptx::Permute(mine, theirs, odd ? 0x5410 : 0x7632), 1);
  const uint32_t even_lanes = odd ? other : own, odd_lanes = odd ? own : other;
  return {{ptx::Permute(even_lanes, odd_lanes, upper ? 0x7632 : 0x5410),
           ptx::Permute(even_lanes, odd_lanes, upper ? 0x5410 : 0x7632)}};
}

// Accumulators with a query per column: the eight lanes m = lane / 4 of a column hold one key each.
// Byte d % 4 of bytes[d / 4]: lane m = d's draws, key m of each eight.
__device__ __forceinline__ Keeps ExchangeInColumn(const KeepDraws& draws, int lane) {
  const int m = lane / 4;
  const bool fours = (m & 4) != 0, twos = (m & 2) != 0, ones = (m & 1) != 0;
  const uint32_t low = ptx::Permute(draws.flags[0], draws.flags[1], 0x7531);
  const uint32_t high = ptx::Permute(draws.flags[2], draws.flags[3], 0x7531);
  const uint32_t mine = fours ? high : low;
  const uint32_t theirs = __shfl_xor_sync(~0u, fours ? low : high, 16);
  const uint32_t pair = ptx::Permute(mine, theirs, twos ? 0x7632 : 0x5410);
  const uint32_t far = __shfl_xor_sync(~0u, ptx::Permute(mine, theirs, twos ? 0x5410 : 0x7632), 8);
  const uint32_t own = ptx::Permute(pair, far, ones ? 0x7531 : 0x6420);  // of m ^ 0, 4, 2, 6
  const uint32_t other =                                                 // of m ^ 1, 5, 3, 7
      __shfl_xor_sync(~0u, ptx::Permute(pair, far, ones ? 0x6420 : 0x7531), 4);
  const uint32_t order =
      0x6240u ^ (ones ? 0x4444u : 0u) ^ (twos ? 0x2222u : 0u) ^ (fours ? 0x1111u : 0u);
  return {{ptx::Permute(own, other, order), ptx::Permute(own, other, order ^ 0x1111u)}};
}

// The draws of a warp's 16-row tiles of queries: kRows of this lane's rows, row r at first_row +
// r / 2 * 16 + r % 2 * 8, and kGroups times 32 keys from 8 * j_block on. Draw r * kGroups + g of
// byte pair s % 2 of word s / 2 is that of row r and of n8 tile 4 g + s. A loop, for the sake of
// the instruction cache.
template <int kRows, int kGroups>
__device__ __forceinline__ Keeps DrawRows(const ScoreParams& p, uint32_t head, int first_row,
                                          int j_block, int lane) {
  static_assert(kRows * kGroups <= 8);
  KeepDraws draws;
#pragma unroll 4
  for (int c = 0; c < kRows * kGroups; ++c) {
    const int r = c / kGroups, g = c % kGroups;
    draws.Add(p,
              DrawKeys(p, head, first_row + r / 2 * 16 + r % 2 * 8, j_block + g * 4 + (lane & 3)));
  }
  return ExchangeInQuad(draws, lane);
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_COMMON_DROPOUT_CUH_
