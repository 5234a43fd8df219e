// Calls whose size or strides are the point. Some heads of a large call stand for all: the
// reference computes those alone, on the same memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>

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

// Head h of batch b of a plain BSHD call, where every query head has its own kv head.
reference::Result ReferenceOfHead(const Call& call, int64_t b, int64_t h) {
  const Case& c = call.params();
  AttentionSpec spec = call.spec();
  reference::Data data = call.data();
  spec.num_heads = spec.num_kv_heads = 1;
  const auto cut = [&](TensorSpec& t, const void*& bytes) {
    const int64_t seqlen = t.shape[1], heads = t.shape[2], dim = t.shape[3];
    t.strides = {seqlen * heads * dim, heads * dim, dim, 1};
    t.shape = {1, seqlen, 1, dim};
    bytes = static_cast<const std::byte*>(bytes) + (b * t.strides[0] + h * dim) * SizeOf(c.dtype);
  };
  cut(spec.q, data.q);
  cut(spec.k, data.k);
  cut(spec.v, data.v);
  cut(*spec.dout, data.dout);
  return reference::Compute(spec, data, {.backward = true});
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
    const reference::Result want = ReferenceOfHead(call, b, h);
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

INSTANTIATE_TEST_SUITE_P(Path, LargeTest, ::testing::ValuesIn(Paths()),
                         [](const auto& info) { return std::string(Name(info.param->path())); });

}  // namespace
}  // namespace attn::exactness
