#include "tests/exactness/case.h"

#include <array>
#include <random>

#include "absl/strings/str_cat.h"

namespace attn::exactness {
namespace {

constexpr std::array kDTypes = {DType::kFp32, DType::kFp16, DType::kBf16};

std::string Number(float x) {
  std::string s = absl::StrCat(x);
  for (char& c : s) {
    if (c == '.') c = 'p';
    if (c == '-') c = 'm';
    if (c == '+') c = '_';
  }
  return s;
}

std::string OptionNames(const Case& c) {
  std::string s;
  if (c.causal) absl::StrAppend(&s, "_causal");
  if (c.alignment == Alignment::kTopLeft) absl::StrAppend(&s, "_tl");
  if (c.window_left) absl::StrAppend(&s, "_wl", *c.window_left);
  if (c.window_right) absl::StrAppend(&s, "_wr", *c.window_right);
  if (c.scale) absl::StrAppend(&s, "_scale", Number(*c.scale));
  if (c.softcap) absl::StrAppend(&s, "_cap", Number(*c.softcap));
  if (c.alibi) absl::StrAppend(&s, "_alibi", c.alibi);
  constexpr std::array kBias = {"", "_bias", "_bias1h", "_biasb1", "_bias11"};
  absl::StrAppend(&s, kBias[static_cast<size_t>(c.bias)]);
  if (c.bias != BiasShape::kNone) absl::StrAppend(&s, std::string(LowerName(c.bias_dtype)));
  if (c.bias_hides) absl::StrAppend(&s, "inf");
  if (c.sinks) absl::StrAppend(&s, "_sinks");
  if (c.dropout > 0) absl::StrAppend(&s, "_drop", Number(c.dropout));
  if (c.block_mask) absl::StrAppend(&s, "_blocks", c.block_q, "x", c.block_k);
  if (c.block_mask_broadcast) absl::StrAppend(&s, "shared");
  if (c.deterministic) absl::StrAppend(&s, "_det");
  if (c.out_fp32) absl::StrAppend(&s, "_outfp32");
  if (c.dout_fp32) absl::StrAppend(&s, "_doutfp32");
  if (c.dlse) absl::StrAppend(&s, "_dlse");
  constexpr std::array kStorage = {"", "_gaps", "_bhsd", "_onehead"};
  absl::StrAppend(&s, kStorage[static_cast<size_t>(c.storage)]);
  constexpr std::array kNumbers = {"",      "_x8",    "_x64",    "_shared",  "_samesign",
                                   "_flat", "_spike", "_rising", "_falling", "_crossing"};
  absl::StrAppend(&s, kNumbers[static_cast<size_t>(c.numbers)]);
  return s;
}

// What exclude each other among options.
enum : uint32_t {
  kMasks = 1,
  kLengths = 2,
  kBiases = 4,
  kAlibis = 8,
  kHeads = 16,
  kDims = 32,
  kBlocks = 64,
  kStorages = 128,
};

// Shapes that cases rotate through: around tile edges, more queries than keys and fewer.
struct Shape {
  int64_t q, k, dim;
};
constexpr std::array kShapes = {Shape{65, 129, 32}, Shape{130, 66, 64},  Shape{1, 100, 40},
                                Shape{97, 97, 16},  Shape{33, 200, 128}, Shape{128, 64, 72},
                                Shape{70, 17, 88}};

Case Base(size_t n, DType dtype) {
  const Shape& shape = kShapes[n % kShapes.size()];
  Case c;
  c.dtype = dtype;
  c.batch = 2;
  c.seqlen_q = shape.q;
  c.seqlen_k = shape.k;
  c.dim = c.dim_v = shape.dim;
  c.seed = 1000 + n;
  return c;
}

}  // namespace

std::string Name(const Case& c) {
  std::string s = absl::StrCat(std::string(LowerName(c.dtype)), "_b", c.batch, "_h", c.heads);
  if (c.kv_heads != c.heads) absl::StrAppend(&s, "_kv", c.kv_heads);
  absl::StrAppend(&s, "_q", c.seqlen_q, "_k", c.seqlen_k, "_d", c.dim);
  if (c.dim_v != c.dim) absl::StrAppend(&s, "_dv", c.dim_v);
  if (c.layout == Layout::kThd) absl::StrAppend(&s, "_thd");
  if (!c.lens_q.empty() || !c.lens_k.empty()) {
    absl::StrAppend(&s, "_lens");
    for (int64_t n : c.lens_q) absl::StrAppend(&s, "q", n);
    for (int64_t n : c.lens_k) absl::StrAppend(&s, "k", n);
  }
  return absl::StrCat(s, OptionNames(c));
}

std::ostream& operator<<(std::ostream& os, const Case& c) {
  return os << Name(c) << " (seed " << c.seed << ")";
}

const std::vector<CaseOption>& AllOptions() {
  static const auto* const kOptions = new std::vector<CaseOption>{
      {"causal", [](Case& c) { c.causal = true; }, kMasks},
      {"causal_tl",
       [](Case& c) {
         c.causal = true;
         c.alignment = Alignment::kTopLeft;
       },
       kMasks},
      {"window_left", [](Case& c) { c.window_left = 19; }, kMasks},
      {"window_right", [](Case& c) { c.window_right = 5; }, kMasks},
      {"window_both",
       [](Case& c) {
         c.window_left = 0;
         c.window_right = 33;
       },
       kMasks},
      {"window_causal_tl",
       [](Case& c) {
         c.causal = true;
         c.window_left = 40;
         c.alignment = Alignment::kTopLeft;
       },
       kMasks},
      {"seqlens_k",
       [](Case& c) {
         c.lens_k = {c.seqlen_k / 2, c.seqlen_k - 1};
       },
       kLengths},
      {"seqlens_both",
       [](Case& c) {
         c.lens_q = {c.seqlen_q - 1, c.seqlen_q / 3 + 1};
         c.lens_k = {c.seqlen_k / 3, c.seqlen_k};
       },
       kLengths},
      {"seqlens_zero",
       [](Case& c) {
         c.lens_q = {0, c.seqlen_q};
         c.lens_k = {c.seqlen_k, 0};
       },
       kLengths},
      {"thd", [](Case& c) { c.layout = Layout::kThd; }, kLengths},
      {"scale", [](Case& c) { c.scale = -0.07f; }},
      {"softcap", [](Case& c) { c.softcap = 1.5f; }},
      {"alibi", [](Case& c) { c.alibi = 1; }, kAlibis},
      {"alibi_batch", [](Case& c) { c.alibi = 2; }, kAlibis},
      {"bias", [](Case& c) { c.bias = BiasShape::kFull; }, kBiases},
      {"bias_broadcast",
       [](Case& c) {
         c.bias = BiasShape::kSharedBoth;
         c.bias_dtype = c.dtype;
       },
       kBiases},
      {"bias_heads_hides",
       [](Case& c) {
         c.bias = BiasShape::kSharedHeads;
         c.bias_dtype = DType::kBf16;
         c.bias_hides = true;
       },
       kBiases},
      {"bias_batch",
       [](Case& c) {
         c.bias = BiasShape::kSharedBatch;
         c.bias_dtype = DType::kFp16;
       },
       kBiases},
      {"sinks", [](Case& c) { c.sinks = true; }},
      {"dropout", [](Case& c) { c.dropout = 0.25f; }},
      {"block_mask", [](Case& c) { c.block_mask = true; }, kBlocks},
      {"block_mask_shared",
       [](Case& c) {
         c.block_mask = c.block_mask_broadcast = true;
         c.block_q = 64;
         c.block_k = 128;
       },
       kBlocks},
      {"block_mask_odd",
       [](Case& c) {
         c.block_mask = true;
         c.block_q = 7;
         c.block_k = 13;
       },
       kBlocks},
      {"deterministic", [](Case& c) { c.deterministic = true; }},
      {"out_fp32", [](Case& c) { c.out_fp32 = true; }},
      {"dout_fp32", [](Case& c) { c.dout_fp32 = true; }},
      {"dlse", [](Case& c) { c.dlse = true; }},
      {"gqa",
       [](Case& c) {
         c.heads = 4;
         c.kv_heads = 2;
       },
       kHeads},
      {"mqa",
       [](Case& c) {
         c.heads = 3;
         c.kv_heads = 1;
       },
       kHeads},
      {"wide_v", [](Case& c) { c.dim_v = c.dim + 24; }, kDims},
      {"narrow_v", [](Case& c) { c.dim_v = c.dim - 8; }, kDims},
      {"odd_dim", [](Case& c) { c.dim = 33, c.dim_v = 20; }, kDims},
      {"gaps", [](Case& c) { c.storage = Storage::kGaps; }, kStorages},
      {"heads_first", [](Case& c) { c.storage = Storage::kHeadsFirst; }, kStorages},
      {"one_head", [](Case& c) { c.storage = Storage::kOneHead; }, kStorages},
      {"shared", [](Case& c) { c.numbers = Numbers::kShared; }},
  };
  return *kOptions;
}

std::vector<Case> SingleOptionCases() {
  std::vector<Case> cases;
  size_t n = 0;
  for (const CaseOption& option : AllOptions()) {
    for (DType dtype : kDTypes) {
      for (int variant = 0; variant < 2; ++variant) {
        cases.push_back(Base(n++, dtype));
        option.apply(cases.back());
      }
      ++n;
    }
  }
  return cases;
}

std::vector<Case> OptionPairCases() {
  std::vector<Case> cases;
  const std::vector<CaseOption>& options = AllOptions();
  size_t n = 0;
  for (size_t a = 0; a < options.size(); ++a) {
    for (size_t b = a + 1; b < options.size(); ++b) {
      if ((options[a].excludes & options[b].excludes) != 0) continue;
      for (DType dtype : kDTypes) {
        Case c = Base(++n, dtype);
        options[a].apply(c);
        options[b].apply(c);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> LengthCases() {
  constexpr std::array<int64_t, 12> kLengthsAroundTiles = {1,  2,  3,   8,   17,  63,
                                                           64, 65, 127, 128, 129, 257};
  constexpr std::array<int64_t, 4> kDimsUsed = {64, 32, 128, 24};
  std::vector<Case> cases;
  size_t n = 0;
  for (int64_t q : kLengthsAroundTiles) {
    for (int64_t k : kLengthsAroundTiles) {
      for (DType dtype : kDTypes) {
        Case c;
        c.dtype = dtype;
        c.seqlen_q = q;
        c.seqlen_k = k;
        c.dim = c.dim_v = kDimsUsed[(n / 3) % kDimsUsed.size()];
        c.causal = n % 4 != 0;
        if (n % 4 == 2) c.alignment = Alignment::kTopLeft;
        if (n % 4 == 3) c.window_left = 60;
        c.seed = 5000 + n++;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> HeadDimCases() {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 8; d <= 256; d += 8) dims.emplace_back(d, d);
  for (int64_t d : {1, 7, 20, 33, 100, 257, 264, 512}) dims.emplace_back(d, d);
  for (auto [d, dv] : {std::pair{192, 128},
                       {128, 96},
                       {64, 128},
                       {8, 256},
                       {256, 8},
                       {72, 40},
                       {33, 40},
                       {40, 33},
                       {64, 264},
                       {264, 64},
                       {16, 1}}) {
    dims.emplace_back(d, dv);
  }
  std::vector<Case> cases;
  size_t n = 0;
  for (auto [d, dv] : dims) {
    for (DType dtype : kDTypes) {
      Case c;
      c.dtype = dtype;
      c.heads = 4;
      c.seqlen_q = 67 - n % 5;
      c.seqlen_k = 131 - n % 7;
      c.dim = d;
      c.dim_v = dv;
      c.causal = n % 2 == 1;
      c.seed = 9000 + n++;
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<Case> NumbersCases() {
  std::vector<Case> cases;
  size_t n = 0;
  for (Numbers numbers :
       {Numbers::kGauss, Numbers::kTimes8, Numbers::kTimes64, Numbers::kShared, Numbers::kSpike}) {
    for (DType dtype : kDTypes) {
      for (bool causal : {false, true}) {
        for (auto [q, k, d] : {Shape{256, 256, 64}, Shape{127, 127, 128}, Shape{100, 300, 128}}) {
          Case c;
          c.dtype = dtype;
          c.seqlen_q = q;
          c.seqlen_k = k;
          c.dim = c.dim_v = d;
          c.causal = causal;
          c.numbers = numbers;
          c.seed = 12000 + n++;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

std::vector<Case> RandomCases(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t n) { return static_cast<int64_t>(random() % n); };
  constexpr std::array<int64_t, 8> kDims = {8, 16, 32, 40, 64, 80, 128, 200};
  std::vector<Case> cases;
  while (cases.size() < count) {
    Case c;
    c.dtype = kDTypes[below(3)];
    c.batch = 2;
    c.seqlen_q = 1 + below(150);
    c.seqlen_k = 1 + below(200);
    c.dim = c.dim_v = kDims[below(kDims.size())];
    c.seed = random() % 1000000;
    uint32_t used = 0;
    for (const CaseOption& option : AllOptions()) {
      if (below(5) != 0 || (used & option.excludes) != 0) continue;
      option.apply(c);
      used |= option.excludes;
    }
    // Lengths and narrow_v can ask for less than nothing on the smallest shapes.
    if (c.dim_v > 0) cases.push_back(c);
  }
  return cases;
}

std::vector<Case> SameSignCases() {
  std::vector<Case> cases;
  for (Numbers numbers : {Numbers::kSameSign, Numbers::kFlat}) {
    for (DType dtype : kDTypes) {
      for (int64_t n : {129, 257, 511, 1025, 2047}) {
        Case c;
        c.dtype = dtype;
        c.heads = c.kv_heads = 1;
        c.seqlen_q = n > 1000 ? 70 : 300;
        c.seqlen_k = n;
        c.numbers = numbers;
        c.seed = 30000 + n;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> LargeCases() {
  struct Large {
    int64_t batch, heads, kv_heads, q, k, dim;
    bool causal;
    Numbers numbers;
  };
  constexpr std::array kLarge = {
      Large{2, 8, 2, 129, 257, 128, true, Numbers::kGauss},
      Large{1, 2, 1, 1024, 1024, 64, true, Numbers::kGauss},
      Large{1, 2, 1, 1024, 1024, 64, false, Numbers::kShared},
      Large{1, 1, 1, 40, 8191, 64, true, Numbers::kGauss},   // few queries, many keys
      Large{1, 1, 1, 4097, 33, 32, false, Numbers::kGauss},  // dk and dv sum over many queries
      Large{1, 4, 1, 511, 700, 40, true, Numbers::kTimes8},
  };
  std::vector<Case> cases;
  for (const Large& large : kLarge) {
    for (DType dtype : kDTypes) {
      Case c;
      c.dtype = dtype;
      c.batch = large.batch;
      c.heads = large.heads;
      c.kv_heads = large.kv_heads;
      c.seqlen_q = large.q;
      c.seqlen_k = large.k;
      c.dim = c.dim_v = large.dim;
      c.causal = large.causal;
      c.numbers = large.numbers;
      c.seed = 20001;
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace attn::exactness
