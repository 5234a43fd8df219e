// The dropout mask: Philox4x32-10 on (block of keys, query, head, offset), the same on every path.
#ifndef ATTN_KERNELS_API_PHILOX_H_
#define ATTN_KERNELS_API_PHILOX_H_

#include <array>
#include <cmath>
#include <cstdint>

namespace attn {

// Philox4x32 with 10 rounds. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC'11).
constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

// The four words whose eight 16-bit lanes decide keys 8 * j_block … 8 * j_block + 7 of query i.
// Lane l is the low (l even) or high (l odd) half of word l / 2. `head` is b * num_heads + h within
// the request.
constexpr std::array<uint32_t, 4> DropoutWords(uint64_t seed, uint32_t offset, uint32_t head,
                                               uint32_t i, uint32_t j_block) {
  return Philox4x32({j_block, i, head, offset},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

constexpr bool DropoutKeeps(const std::array<uint32_t, 4>& words, uint32_t lane,
                            uint32_t threshold) {
  return ((words[lane / 2] >> (16 * (lane % 2))) & 0xFFFFu) < threshold;
}

// T = round(65536 * (1 - p)), halves away from zero, in double.
inline uint32_t DropoutThreshold(float p) {
  return static_cast<uint32_t>(std::lround(65536.0 * (1.0 - static_cast<double>(p))));
}

}  // namespace attn

#endif  // ATTN_KERNELS_API_PHILOX_H_
