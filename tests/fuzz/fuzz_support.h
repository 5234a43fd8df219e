// What the fuzzers share.
#ifndef ATTN_TESTS_FUZZ_FUZZ_SUPPORT_H_
#define ATTN_TESTS_FUZZ_FUZZ_SUPPORT_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace attn::fuzz {

// Ends the run where `difference` is not empty.
inline void Require(const std::string& difference) {
  if (difference.empty()) return;
  std::fprintf(stderr, "FAILED: %s\n", difference.c_str());
  std::abort();
}

// Numbers in [0, n], made from one byte of the input, for choices that need no search.
class Dice {
 public:
  explicit Dice(uint8_t seed) : state_(seed * 2654435761u + 1) {}
  size_t operator()(size_t n) {
    state_ = state_ * 1664525u + 1013904223u;
    return (state_ >> 8) % (n + 1);
  }

 private:
  uint32_t state_;
};

}  // namespace attn::fuzz

#endif  // ATTN_TESTS_FUZZ_FUZZ_SUPPORT_H_
