// One generated attention call: what its shape, options and numbers are, and its name.
#ifndef ATTN_TESTS_EXACTNESS_CASE_H_
#define ATTN_TESTS_EXACTNESS_CASE_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/api/spec.h"

namespace attn::exactness {

enum class Numbers : uint8_t {
  kGauss,
  kTimes8,    // q times 8
  kTimes64,   // q times 64
  kShared,    // a direction common to all rows of q, and its opposite in k
  kSameSign,  // v and dout positive, q small: nothing cancels in long sums
  kFlat,      // as kSameSign with q = 0: every probability is 1 / #visible
  kSpike,     // the middle key's logit is about 1e4 above every other
  kRising,    // logits grow along the keys, by about 2^11 every 64
  kFalling,   // they shrink
  kCrossing,  // they grow for even queries and shrink for odd ones
};

enum class Storage : uint8_t {
  kContiguous,
  kGaps,        // gaps on every axis but the last, filled with NaN; starts off alignment
  kHeadsFirst,  // stored as [batch, num_heads, seqlen, head_dim]
  kOneHead,     // head stride 0 in k and v: one head stored, all share it
};

enum class BiasShape : uint8_t { kNone, kFull, kSharedBatch, kSharedHeads, kSharedBoth };

struct Case {
  DType dtype = DType::kFp32;
  int64_t batch = 1;
  int64_t heads = 2;
  int64_t kv_heads = 2;
  int64_t seqlen_q = 64;
  int64_t seqlen_k = 64;
  int64_t dim = 64;
  int64_t dim_v = 64;
  Layout layout = Layout::kBshd;
  // Lengths of each sequence. BSHD: seqlens_q / seqlens_k (empty: all rows valid). THD: what the
  // packed sequences are; empty: made up from seqlen_q and seqlen_k.
  std::vector<int64_t> lens_q, lens_k;

  bool causal = false;
  Alignment alignment = Alignment::kBottomRight;
  std::optional<int64_t> window_left, window_right;
  std::optional<float> scale, softcap;
  int alibi = 0;  // 1: slopes per head; 2: per batch and head
  BiasShape bias = BiasShape::kNone;
  DType bias_dtype = DType::kFp32;
  bool bias_hides = false;  // some entries are -inf, some rows entirely
  bool sinks = false;       // one of them -inf where there are several heads
  float dropout = 0.0f;
  bool block_mask = false;  // random, some rows of blocks empty
  int64_t block_q = 64, block_k = 64;
  bool block_mask_broadcast = false;
  bool deterministic = false;
  bool out_fp32 = false;
  bool dout_fp32 = false;
  bool dlse = false;
  Storage storage = Storage::kContiguous;
  Numbers numbers = Numbers::kGauss;
  uint64_t seed = 1;
};

// "bf16_b2_h8_kv2_q129_k257_d128_causal": letters, digits and underscores; unique among cases that
// differ in anything but the seed.
std::string Name(const Case& c);
std::ostream& operator<<(std::ostream& os, const Case& c);

// An option that can be put on any base case.
struct CaseOption {
  const char* name;
  void (*apply)(Case& c);
  uint32_t excludes = 0;  // bits that two combined options must not share
};
const std::vector<CaseOption>& AllOptions();

// Every option alone on each dtype, and every pair that can be combined on each dtype, on small
// shapes that vary from case to case.
std::vector<Case> SingleOptionCases();
std::vector<Case> OptionPairCases();
// Lengths around tile edges, against each other.
std::vector<Case> LengthCases();
// head_dim 8 … 256 in steps of 8, odd ones, and head_dim_v different from head_dim.
std::vector<Case> HeadDimCases();
// Large logits and correlated inputs.
std::vector<Case> NumbersCases();
// Random small shapes with a random mix of options.
std::vector<Case> RandomCases(size_t count, uint64_t seed);
// Sums of many terms of one sign.
std::vector<Case> SameSignCases();
// Fewer and larger.
std::vector<Case> LargeCases();
// FP16 and BF16 calls that tiles of 64 to 256 queries and keys divide in many ways.
std::vector<Case> TileCases();

}  // namespace attn::exactness

#endif  // ATTN_TESTS_EXACTNESS_CASE_H_
