// Calls whose size or strides are the point. Some heads of a large call stand for all: the
// reference computes those alone, on the same memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

namespace attn::exactness {
namespace {

// Head h of a contiguous [batch, seqlen, heads, dim] buffer, batch b, as [1, seqlen, 1, dim].
GuardedBuffer Slice(const GuardedBuffer& buffer, DType dtype, int64_t b, int64_t h, int64_t seqlen,
                    int64_t heads, int64_t dim) {
  const int64_t row = dim * SizeOf(dtype);
  GuardedBuffer slice(seqlen * row);
  for (int64_t i = 0; i < seqlen; ++i) {
    std::memcpy(slice.data() + i * row, buffer.data() + ((b * seqlen + i) * heads + h) * row, row);
  }
  return slice;
}

// Query head h of batch b of a BSHD call without options of its own heads. Gradients: only where
// every query head has its own kv head.
reference::Result ReferenceOfHead(const Call& call, int64_t b, int64_t h, bool backward) {
  const Case& c = call.params();
  AttentionSpec spec = call.spec();
  reference::Data data = call.data();
  spec.num_heads = spec.num_kv_heads = 1;
  if (!spec.seqlens_q.empty()) spec.seqlens_q = {spec.seqlens_q[b]};
  if (!spec.seqlens_k.empty()) spec.seqlens_k = {spec.seqlens_k[b]};
  if (spec.sinks) {
    spec.sinks->shape = {1};
    data.sinks += h;
  }
  const auto cut = [&](TensorSpec& t, const void*& bytes) {
    const int64_t seqlen = t.shape[1], heads = t.shape[2], dim = t.shape[3];
    t.strides = {seqlen * heads * dim, heads * dim, dim, 1};
    t.shape = {1, seqlen, 1, dim};
    const int64_t head = h / (c.heads / heads);
    bytes =
        static_cast<const std::byte*>(bytes) + (b * t.strides[0] + head * dim) * SizeOf(c.dtype);
  };
  cut(spec.q, data.q);
  cut(spec.k, data.k);
  cut(spec.v, data.v);
  cut(*spec.dout, data.dout);
  return reference::Compute(spec, data, {.backward = backward});
}

class LargeTest : public ::testing::TestWithParam<const Backend*> {};

TEST_P(LargeTest, Case18SoftcapCausalLongBackward) {
  Case c;
  c.dtype = DType::kBf16;
  c.batch = 2;
  c.heads = c.kv_heads = 32;
  c.seqlen_q = c.seqlen_k = 1024;
  c.dim = c.dim_v = 128;
  c.causal = true;
  c.softcap = 10.0f;
  const Call call(c);
  const absl::StatusOr<ForwardOutputs> f = RunForward(*GetParam(), call);
  ASSERT_TRUE(f.ok()) << f.status();
  const Backend* backward = BackwardOf(*GetParam(), *call.Problem(Pass::kBackward), Paths());
  ASSERT_NE(backward, nullptr);
  const absl::StatusOr<BackwardOutputs> g = RunBackward(*backward, call, *f);
  ASSERT_TRUE(g.ok()) << g.status();
  for (auto [b, h] : {std::pair{0, 0}, {1, 31}}) {
    const reference::Result want = ReferenceOfHead(call, b, h, true);
    const auto slice = [&, b = b, h = h](const GuardedBuffer& x) {
      return Slice(x, c.dtype, b, h, 1024, 32, 128);
    };
    ForwardOutputs out{c.dtype, slice(f->out), GuardedBuffer(1024 * 4)};
    std::memcpy(out.lse.data(), f->lse.data() + (b * 32 + h) * 1024 * 4, 1024 * 4);
    const BackwardOutputs grads{c.dtype,      slice(g->dq),     slice(g->dk),
                                slice(g->dv), GuardedBuffer(0), GuardedBuffer(0)};
    const std::string who(Name(GetParam()->path()));
    for (const Fault& x : CheckForward(want, out, who + " forward")) {
      ADD_FAILURE() << x.what << ": " << x.details;
    }
    for (const Fault& x : CheckBackward(want, grads, BackwardName(*backward, *GetParam()))) {
      ADD_FAILURE() << x.what << ": " << x.details;
    }
  }
}

struct LongShape {
  const char* name;
  int64_t batch, heads, kv_heads, q, k, dim, dim_v;
  void (*apply)(Case& c);
};

const LongShape kLongShapes[] = {
    {"D256Causal", 1, 66, 66, 700, 4160, 200, 8, [](Case& c) { c.causal = true; }},
    {"D256Gqa", 1, 64, 16, 512, 4097, 256, 16, [](Case& c) { c.numbers = Numbers::kTimes64; }},
    {"D256WindowPadded", 2, 20, 20, 720, 6000, 8, 200,
     [](Case& c) {
       c.lens_q = {700, 100}, c.lens_k = {5990, 4100};  // NaN beyond
       c.window_left = 4500, c.window_right = 40;
     }},
    {"D192", 1, 54, 54, 500, 4200, 136, 136, [](Case& c) { c.dtype = DType::kFp16; }},
    {"D192TopLeftSinks", 1, 40, 40, 4300, 4200, 8, 136,
     [](Case& c) { c.causal = true, c.alignment = Alignment::kTopLeft, c.sinks = true; }},
    {"D128Causal", 1, 63, 21, 700, 16400, 104, 8,
     [](Case& c) { c.causal = true, c.numbers = Numbers::kRising; }},
    {"D128Fp32Out", 1, 33, 33, 768, 16390, 128, 8, [](Case& c) { c.out_fp32 = true; }},
};

class LongKeysTest : public ::testing::TestWithParam<std::tuple<const Backend*, const LongShape*>> {
};

// Queries that see thousands of keys: flash_sm90 gives those tiles to clusters of thread blocks,
// which copy keys for each other. Forward alone; most shapes are narrow, for the reference's sake.
TEST_P(LongKeysTest, SomeHeads) {
  const auto [backend, shape] = GetParam();
  Case c;
  c.dtype = DType::kBf16;
  c.batch = shape->batch;
  c.heads = shape->heads;
  c.kv_heads = shape->kv_heads;
  c.seqlen_q = shape->q;
  c.seqlen_k = shape->k;
  c.dim = shape->dim;
  c.dim_v = shape->dim_v;
  shape->apply(c);
  const Call call(c);
  const absl::StatusOr<ForwardOutputs> f = RunForward(*backend, call);
  ASSERT_TRUE(f.ok()) << f.status();
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t h = b == 0 ? c.heads - 1 : c.heads / 2;
    const reference::Result want = ReferenceOfHead(call, b, h, false);
    ForwardOutputs got{f->dtype, Slice(f->out, f->dtype, b, h, c.seqlen_q, c.heads, c.dim_v),
                       GuardedBuffer(c.seqlen_q * 4)};
    std::memcpy(got.lse.data(), f->lse.data() + (b * c.heads + h) * c.seqlen_q * 4, c.seqlen_q * 4);
    for (const Fault& x : CheckForward(want, got, std::string(Name(backend->path())))) {
      ADD_FAILURE() << Name(c) << " head " << h << ", " << x.what << ": " << x.details;
    }
  }
}

// Address space without memory: only touched pages exist.
class Sparse {
 public:
  explicit Sparse(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  const size_t bytes_;
  void* const data_;
};

// The second batch entry lies more than 2^31 elements (and 2^32 bytes) behind the first.
TEST_P(LargeTest, OffsetsBeyond32Bits) {
  constexpr int64_t kStride = (int64_t{1} << 31) + 4096, kSeqlen = 70, kDim = 16;
  const Sparse memory((kStride + kSeqlen * kDim) * 2);
  if (!memory.ok()) GTEST_SKIP() << "no address space for 4 GiB";
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t n = 0; n < kSeqlen * kDim; ++n) {
      StoreElement(memory.data(), DType::kBf16, b * kStride + n, Gauss(3, b, n));
    }
  }
  AttentionSpec spec;
  spec.num_heads = spec.num_kv_heads = 1;
  const TensorSpec far{DType::kBf16, {2, kSeqlen, 1, kDim}, {kStride, kDim, kDim, 1}};
  spec.q = spec.k = spec.v = far;
  spec.dout = far;
  const void* x = memory.data();
  const reference::Result want =
      reference::Compute(spec, {.q = x, .k = x, .v = x, .dout = x}, {.backward = true});
  const int64_t n = 2 * kSeqlen * kDim;
  ForwardOutputs f{DType::kBf16, GuardedBuffer(n * 2), GuardedBuffer(2 * kSeqlen * 4)};
  BackwardOutputs g{DType::kBf16,         GuardedBuffer(n * 2), GuardedBuffer(n * 2),
                    GuardedBuffer(n * 2), GuardedBuffer(0),     GuardedBuffer(0)};
  float* lse = reinterpret_cast<float*>(f.lse.data());

  spec.dout.reset();
  const absl::StatusOr<AttentionProblem> forward = Validate(spec, Pass::kForward);
  ASSERT_TRUE(forward.ok()) << forward.status();
  GuardedBuffer workspace(GetParam()->WorkspaceBytes(*forward, Pass::kForward));
  ASSERT_TRUE(GetParam()
                  ->Forward(*forward, {.q = x, .k = x, .v = x, .out = f.out.data(), .lse = lse},
                            {.workspace = workspace.span()})
                  .ok());
  spec.dout = far;
  spec.out = TensorSpec{DType::kBf16, far.shape, {}};
  spec.lse = TensorSpec{DType::kFp32, {2, 1, kSeqlen}, {}};
  const absl::StatusOr<AttentionProblem> backward = Validate(spec, Pass::kBackward);
  ASSERT_TRUE(backward.ok()) << backward.status();
  const Backend* gradients = BackwardOf(*GetParam(), *backward, Paths());
  ASSERT_NE(gradients, nullptr);
  GuardedBuffer scratch(gradients->WorkspaceBytes(*backward, Pass::kBackward));
  ASSERT_TRUE(gradients
                  ->Backward(*backward,
                             {.q = x,
                              .k = x,
                              .v = x,
                              .out = f.out.data(),
                              .lse = lse,
                              .dout = x,
                              .dlse = nullptr,
                              .dq = g.dq.data(),
                              .dk = g.dk.data(),
                              .dv = g.dv.data()},
                             {.workspace = scratch.span()})
                  .ok());
  const std::string who(Name(GetParam()->path()));
  for (const Fault& fault : CheckForward(want, f, who + " forward")) {
    ADD_FAILURE() << fault.what << ": " << fault.details;
  }
  for (const Fault& fault : CheckBackward(want, g, BackwardName(*gradients, *GetParam()))) {
    ADD_FAILURE() << fault.what << ": " << fault.details;
  }
}

std::vector<const LongShape*> LongShapes() {
  std::vector<const LongShape*> shapes;
  for (const LongShape& shape : kLongShapes) shapes.push_back(&shape);
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Path, LongKeysTest,
                         ::testing::Combine(::testing::ValuesIn(Paths()),
                                            ::testing::ValuesIn(LongShapes())),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param)->path())) + "_" +
                                  std::get<1>(info.param)->name;
                         });
INSTANTIATE_TEST_SUITE_P(Path, LargeTest, ::testing::ValuesIn(Paths()),
                         [](const auto& info) { return std::string(Name(info.param->path())); });

}  // namespace
}  // namespace attn::exactness
