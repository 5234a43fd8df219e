// Calls that a kernel of large tiles, several warpgroups and persistent thread blocks can get
// wrong: whatever the tile, some rows of it see keys that others do not, end early, or see none.
#include <array>
#include <iterator>
#include <utility>

#include "tests/exactness/case.h"

namespace attn::exactness {
namespace {

// Head dims on either side of a tile's: 64, 96, 128, 192, 256. Values are narrow, so that the
// float64 reference takes little time; AddHeadDims() has wide ones.
constexpr std::array<int64_t, 5> kDims = {8, 72, 104, 136, 200};

// Collects cases. The element type alternates, by twos so that cases made in pairs have either, and
// every third output is FP32.
class Cases {
 public:
  Case& Add(int64_t q, int64_t k, int64_t dim, int64_t dim_v) {
    Case c;
    const size_t n = cases_.size();
    c.dtype = (n + 1) / 2 % 2 == 0 ? DType::kBf16 : DType::kFp16;
    c.out_fp32 = n % 3 == 2;
    c.heads = c.kv_heads = 1;
    c.seqlen_q = q;
    c.seqlen_k = k;
    c.dim = dim;
    c.dim_v = dim_v;
    c.seed = 40000 + n;
    return cases_.emplace_back(c);
  }
  Case& Add(int64_t q, int64_t k) { return Add(q, k, kDims[cases_.size() % kDims.size()], 8); }

  std::vector<Case> Take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

// Lengths one less, equal and one more than multiples of 64 and 128, each as queries and as keys:
// against itself, and against one far from it.
void AddLengths(Cases& cases) {
  constexpr std::array<int64_t, 15> kLengths = {63,  64,  65,  127, 128, 129, 191, 192,
                                                193, 255, 256, 257, 383, 384, 385};
  for (size_t n = 0; n < kLengths.size(); ++n) {
    cases.Add(kLengths[n], kLengths[n]).causal = n % 3 != 0;
    Case& far = cases.Add(kLengths[n], kLengths[(n * 4 + 7) % kLengths.size()]);
    far.causal = n % 4 != 3;
    if (n % 2 == 0) far.alignment = Alignment::kTopLeft;
  }
}

// Windows narrower than 64 rows: neighbours of 64 rows share few keys or none, and the first or
// last rows may have none at all.
void AddWindows(Cases& cases) {
  struct Window {
    int64_t q, k, left, right;
    Alignment alignment;
  };
  constexpr Window kWindows[] = {
      {400, 400, 32, 32, Alignment::kBottomRight}, {400, 400, 0, 0, Alignment::kBottomRight},
      {400, 400, 0, 0, Alignment::kTopLeft},       {400, 260, 0, 0, Alignment::kBottomRight},
      {400, 260, 32, 32, Alignment::kTopLeft},     {260, 520, 63, 0, Alignment::kBottomRight},
      {260, 520, 0, 64, Alignment::kTopLeft},      {400, 100, 20, 5, Alignment::kBottomRight},
      {400, 100, 20, 5, Alignment::kTopLeft},      {385, 385, 130, 0, Alignment::kBottomRight},
  };
  for (const Window& w : kWindows) {
    Case& c = cases.Add(w.q, w.k);
    c.window_left = w.left;
    c.window_right = w.right;
    c.alignment = w.alignment;
  }
  // A tile of queries whose left edge is limited and whose right one is not, and the reverse.
  cases.Add(400, 400).window_left = 1;
  cases.Add(400, 400).window_right = 1;
}

// Sequences of very different lengths, some empty on one side or on both, and many more tiles of
// queries and heads than a device has multiprocessors.
void AddUnevenBatches(Cases& cases) {
  constexpr int64_t kBatch = 20;
  for (int variant = 0; variant < 6; ++variant) {
    Case& c = cases.Add(385, 300, variant < 4 ? 8 : 72, 8);
    c.batch = kBatch;
    c.heads = variant % 2 == 0 ? 16 : 12;
    c.kv_heads = variant % 2 == 0 ? 2 : 1;
    if (variant >= 3) c.layout = Layout::kThd;
    for (int64_t b = 0; b < kBatch; ++b) {
      c.lens_q.push_back(b % 5 == 3 ? 0 : 1 + (b * 37 + variant * 11) % 90);
      c.lens_k.push_back(b % 7 == 2 || b % 10 == 3 ? 0 : 1 + (b * 53 + variant * 29) % 110);
    }
    c.lens_q[11] = c.seqlen_q;
    c.lens_k[11] = c.seqlen_k - variant;
    c.causal = variant % 3 == 0;
    if (variant % 3 == 1) c.window_left = 40, c.window_right = 7;
    c.sinks = variant % 2 == 1;
  }
  // Alike, so that nothing but the number of works is in the way.
  for (int64_t q : {17, 65}) {
    Case& c = cases.Add(q, 33, 8, 8);
    c.batch = 40;
    c.heads = 8;
    c.kv_heads = 4;
    c.causal = q == 65;
  }
}

// Many heads whose tiles differ in length, so that a thread block goes from one to another that is
// shorter or longer, at every number of left-over rows, packed and not.
void AddManyTiles(Cases& cases) {
  constexpr int64_t kLengths[] = {200, 257, 321, 449, 512};
  for (size_t n = 0; n < 2 * std::size(kLengths); ++n) {
    const int64_t length = kLengths[n / 2];
    Case& c = cases.Add(length, length, kDims[n / 2], 8);
    c.batch = 2;
    c.heads = c.kv_heads = 6400 / (c.dim + 56);  // more tiles than multiprocessors
    c.causal = true;
    if (n % 2 == 1) {
      c.layout = Layout::kThd;
      c.lens_q = {length, length - 130};
      c.lens_k = {length, length - 100};
    }
  }
  Case& window = cases.Add(449, 449, 104, 8);
  window.heads = window.kv_heads = 60;
  window.window_left = 100;
  window.window_right = 40;
}

// One key: a thread block's tiles of queries follow each other as fast as can be, so that the rows
// of one are still on their way when those of the next are.
void AddShortWorks(Cases& cases) {
  for (int64_t dim : {64, 128, 192, 256}) {
    Case& c = cases.Add(384, 1, 8, dim);
    c.heads = 256;
    c.kv_heads = dim == 128 ? 4 : 256;
    c.out_fp32 = false;
  }
}

// dbias where it would show what the rounding of out did to row_dot: by up to twice its bound with
// these numbers.
void AddRowDots(Cases& cases) {
  for (int64_t queries : {201, 207, 212, 216}) {
    Case& c = cases.Add(queries, 400, 200, 8);
    c.dtype = DType::kFp16;
    c.out_fp32 = false;
    c.numbers = Numbers::kRising;
    c.dropout = 0.999f;
    c.bias = BiasShape::kFull;
    c.seed = 39928 + queries;
  }
}

// Head dims that a tile holds with room to spare, with values narrower and wider than keys.
void AddHeadDims(Cases& cases) {
  constexpr int64_t kDimsV[][3] = {{72, 40, 120},   {88, 96, 160},   {104, 72, 136},
                                   {136, 104, 184}, {160, 128, 200}, {184, 136, 248},
                                   {200, 64, 256},  {248, 56, 256}};
  for (const auto& [dim, narrow, wide] : kDimsV) {
    for (int64_t dim_v : {narrow, wide}) {
      Case& c = cases.Add(140, 90, dim, dim_v);
      c.heads = 2;
      c.kv_heads = dim_v == wide ? 1 : 2;
      c.causal = dim % 16 == 8;
      if (dim_v == wide) c.lens_k = {77};  // NaN beyond, in the last tile
    }
  }
}

// Block masks: of every three rows of blocks one is hidden entirely, at another place in each head.
void AddBlockMasks(Cases& cases) {
  constexpr int64_t kBlocks[][2] = {{64, 64}, {64, 192}, {128, 64}, {192, 128}};
  for (const auto& [block_q, block_k] : kBlocks) {
    for (int variant = 0; variant < 3; ++variant) {
      Case& c = cases.Add(400, 390);
      c.heads = 3;
      c.kv_heads = 1;
      c.block_mask = true;
      c.block_q = block_q;
      c.block_k = block_k;
      c.causal = variant == 1;
      c.sinks = variant == 1;
      if (variant == 2) c.window_left = 70, c.window_right = 10, c.softcap = 2.0f;
    }
  }
  // More steps for a tile of keys, of all heads of the group, than a kernel looks up at a time.
  Case& many = cases.Add(4300, 130, 8, 8);
  many.heads = 32;
  many.kv_heads = 1;
  many.block_mask = true;
  many.block_q = many.block_k = 64;
}

// Few queries and many keys, whose keys a kernel may split: parts that see nothing, sinks that
// belong to the whole, sequences shorter than one part.
void AddSplits(Cases& cases) {
  for (int variant = 0; variant < 8; ++variant) {
    Case& c = cases.Add(40, 3000, variant % 2 == 0 ? 8 : 72, 8);
    c.heads = 2;
    c.kv_heads = variant % 3 == 0 ? 1 : 2;
    c.sinks = variant != 1;
    c.causal = variant % 2 == 1;
    if (variant == 2) c.window_left = 500, c.window_right = 3;
    if (variant == 3) c.alignment = Alignment::kTopLeft;
    if (variant == 4) c.batch = 2, c.lens_q = {40, 21}, c.lens_k = {3000, 10};
    if (variant == 5) c.layout = Layout::kThd, c.lens_q = {40, 0, 33}, c.lens_k = {3000, 70, 0};
    if (variant == 6) c.block_mask = true;
    if (variant == 7) c.dropout = 0.25f;
  }
}

// Groups of heads whose queries do not fill a tile each, so that a kernel may put several heads
// into one: more tiles than multiprocessors, or many keys.
void AddPackedHeads(Cases& cases) {
  constexpr int64_t kGroups[] = {2, 4, 8, 12, 16, 32};
  for (size_t n = 0; n < 3 * std::size(kGroups); ++n) {
    const int64_t group = kGroups[n / 3];
    Case& c = cases.Add(17 + static_cast<int64_t>(n * 7) % 40, 150, kDims[(n + n / 3) % 5], 8);
    c.kv_heads = 2;
    c.heads = 2 * group;
    c.batch = 320 / group;
    c.sinks = n % 2 == 0;
    if (n % 3 == 1)
      c.causal = true, c.alignment = group % 8 == 0 ? Alignment::kTopLeft : c.alignment;
    if (n % 3 == 2) c.window_left = 30, c.window_right = 5;
    if (n % 4 == 3) c.layout = Layout::kThd;
    for (int64_t b = 0; n % 4 >= 2 && b < c.batch; ++b) {
      c.lens_q.push_back(b % 7 == 3 ? 0 : c.seqlen_q - b % 4);
      c.lens_k.push_back(b % 9 == 4 ? 0 : c.seqlen_k - b * 13 % 100);
    }
  }
  for (int variant = 0; variant < 4; ++variant) {
    Case& c = cases.Add(30, 3000, variant % 2 == 0 ? 8 : 128, 8);
    c.kv_heads = 1;
    c.heads = 4 << variant;
    c.causal = variant % 2 == 1;
    c.sinks = variant == 2;
    if (variant == 3) c.layout = Layout::kThd, c.lens_q = {30, 0, 19}, c.lens_k = {3000, 70, 900};
  }
}

// Maxima that rise, or do not, from tile to tile, and differently in neighbouring rows.
void AddMagnitudes(Cases& cases) {
  for (Numbers numbers : {Numbers::kRising, Numbers::kFalling, Numbers::kCrossing}) {
    for (int variant = 0; variant < 6; ++variant) {
      Case& c = cases.Add(200, variant < 2 ? 900 : 400);
      c.numbers = numbers;
      c.causal = variant == 1;
      if (variant == 2) c.window_left = 150, c.window_right = 90;
      if (variant == 3) c.alibi = 1, c.sinks = true;
      if (variant == 4) c.dropout = 0.5f;
      if (variant == 5) c.dropout = 0.999f, c.bias = BiasShape::kFull;
    }
    cases.Add(40, 2000, 8, 8).numbers = numbers;
  }
}

// What is rare at the ends: no key in the whole call, and dropout that keeps one entry in 65536.
// Its factor is beyond FP16.
void AddExtremes(Cases& cases) {
  Case& padded = cases.Add(70, 0);
  padded.batch = 2;
  padded.sinks = true;
  Case& packed = cases.Add(70, 0);
  packed.layout = Layout::kThd;
  packed.lens_q = {70, 20};
  packed.lens_k = {0, 0};
  Case& rare = cases.Add(400, 400, 8, 8);
  rare.heads = rare.kv_heads = 2;
  rare.dropout = 0.99998f;
  rare.numbers = Numbers::kFlat;
  rare.dtype = DType::kBf16;
}

}  // namespace

std::vector<Case> TileCases() {
  Cases cases;
  AddLengths(cases);
  AddWindows(cases);
  AddUnevenBatches(cases);
  AddManyTiles(cases);
  AddHeadDims(cases);
  AddBlockMasks(cases);
  AddSplits(cases);
  AddPackedHeads(cases);
  AddMagnitudes(cases);
  AddExtremes(cases);
  AddShortWorks(cases);
  AddRowDots(cases);
  return cases.Take();
}

}  // namespace attn::exactness
