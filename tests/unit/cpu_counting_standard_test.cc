// standard_cpu in the counting build: what the loads and stores counted is what Model() says.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/traffic.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/unit/api_test_util.h"

namespace attn {
namespace {

// A problem with its tensors. Values do not matter to what is moved; zeros do.
struct Workload {
  AttentionProblem problem;
  std::vector<uint8_t> mask;
  std::vector<float> slopes, sinks, bias;
};

class Random {
 public:
  explicit Random(uint32_t seed) : rng_(seed) {}
  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }
  bool Coin() { return Uniform(0, 1) == 1; }

 private:
  std::mt19937 rng_;
};

AttentionSpec RandomShape(Random& random, DType dtype) {
  const int64_t batch = random.Uniform(0, 3);
  const int64_t kv_heads = random.Uniform(1, 2);
  const int64_t heads = kv_heads * random.Uniform(1, 3);
  const int64_t dim = random.Uniform(1, 40);
  AttentionSpec spec;
  if (random.Coin()) {
    spec = BshdSpec({batch, random.Uniform(0, 150), random.Uniform(0, 600), heads, kv_heads, dim,
                     random.Uniform(1, 40)},
                    dtype);
    spec.seqlens_q.resize(random.Coin() ? batch : 0);
    for (auto& n : spec.seqlens_q) n = random.Uniform(0, spec.q.shape[1]);
    spec.seqlens_k.resize(random.Coin() ? batch : 0);
    for (auto& n : spec.seqlens_k) n = random.Uniform(0, spec.k.shape[1]);
  } else {
    std::vector<int64_t> lengths_q(batch), lengths_k(batch);
    for (auto& n : lengths_q) n = random.Uniform(0, 150);
    for (auto& n : lengths_k) n = random.Uniform(0, 300);
    spec = ThdSpec(lengths_q, lengths_k, heads, kv_heads, dim);
    spec.q.dtype = spec.k.dtype = spec.v.dtype = dtype;
  }
  return spec;
}

Workload RandomWorkload(Random& random, Pass pass) {
  const DType dtype = random.Coin() ? DType::kFp32 : DType::kBf16;
  AttentionSpec spec = RandomShape(random, dtype);
  const bool thd = spec.layout == Layout::kThd;
  const int64_t heads = spec.num_heads;
  const AttentionProblem shape = *Validate(spec, Pass::kForward);
  spec.causal = random.Coin();
  if (random.Coin()) spec.window_left = random.Uniform(0, 50);
  if (random.Coin()) spec.softcap = 5.0f;
  if (random.Coin()) spec.alibi_slopes = Shape({heads});
  if (random.Coin()) spec.sinks = Shape({heads});
  if (random.Coin()) spec.dropout = DropoutSpec{0.3f, 1, 2};
  if (random.Coin()) spec.out_dtype = DType::kFp32;
  if (random.Coin()) {
    std::vector<int64_t> bias = {random.Coin() ? 1 : heads, thd ? shape.total_q : shape.seqlen_q,
                                 shape.seqlen_k};
    if (!thd) bias.insert(bias.begin(), random.Coin() ? 1 : shape.batch);
    spec.bias = Shape(bias);
  }
  if (random.Coin()) {
    BlockMaskSpec mask;
    mask.block_q = random.Uniform(1, 70);
    mask.block_k = random.Uniform(1, 70);
    mask.mask = Shape({random.Coin() ? 1 : shape.batch, random.Coin() ? 1 : heads,
                       (shape.seqlen_q + mask.block_q - 1) / mask.block_q,
                       (shape.seqlen_k + mask.block_k - 1) / mask.block_k},
                      DType::kUint8);
    spec.block_mask = mask;
  }
  if (pass == Pass::kBackward && random.Coin()) {
    spec.dlse = thd ? Shape({heads, shape.total_q}) : Shape({shape.batch, heads, shape.seqlen_q});
  }
  Workload w{*Validate(spec, pass), {}, {}, {}, {}};
  w.slopes.resize(heads);
  w.sinks.resize(heads);
  w.bias.resize(DbiasElements(w.problem) + 1);
  if (spec.alibi_slopes) w.problem.alibi->slopes = w.slopes.data();
  if (spec.sinks) w.problem.sinks = w.sinks.data();
  if (spec.bias) w.problem.bias->data = w.bias.data();
  if (spec.block_mask) {
    w.mask.resize(spec.block_mask->mask.NumElements() + 1);
    for (auto& m : w.mask) m = random.Coin() ? 1 : 0;
    w.problem.block_mask->data = w.mask.data();
  }
  return w;
}

struct Counted {
  uint64_t loaded, stored;
};
Counted CountedRun(const Backend& backend, const AttentionProblem& p, Pass pass) {
  auto floats = [](int64_t n) { return std::vector<float>(n + 1); };
  std::vector<float> q = floats(DqElements(p)), k = floats(DkElements(p)),
                     v = floats(DvElements(p));
  std::vector<float> out = floats(OutElements(p)), lse = floats(LseElements(p));
  std::vector<std::byte> memory(backend.WorkspaceBytes(p, pass) + 64);
  auto* begin =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  TrafficCounters counters;
  RunContext context;
  context.workspace = {begin, memory.size() - 64};
  context.counters = &counters;
  absl::Status status;
  if (pass == Pass::kForward) {
    status = backend.Forward(p, {q.data(), k.data(), v.data(), out.data(), lse.data()}, context);
  } else {
    std::vector<float> dout = out, dlse = lse, dq = q, dk = k, dv = v;
    std::vector<float> dbias = floats(DbiasElements(p)), dsink = floats(p.num_heads);
    BackwardTensors t{q.data(), k.data(), v.data(), out.data(), lse.data(), dout.data()};
    t.dlse = p.has_dlse ? dlse.data() : nullptr;
    t.dq = dq.data();
    t.dk = dk.data();
    t.dv = dv.data();
    t.dbias = dbias.data();
    t.dsink = dsink.data();
    status = backend.Backward(p, t, context);
  }
  EXPECT_TRUE(status.ok()) << Text(status);
  return {counters.loaded_bytes, counters.stored_bytes};
}

TEST(StandardTrafficTest, CountersEqualTheModelOnRandomProblems) {
  ThreadPool pool(3);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  Random random(11);
  uint64_t total = 0;
  for (int trial = 0; trial < 300; ++trial) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      const Workload w = RandomWorkload(random, pass);
      const Counted counted = CountedRun(*backend, w.problem, pass);
      const TileModel model = backend->Model(w.problem, pass);
      ASSERT_EQ(counted.loaded, model.loaded_bytes) << trial << " " << Name(pass);
      ASSERT_EQ(counted.stored, model.stored_bytes) << trial << " " << Name(pass);
      total += counted.loaded;
    }
  }
  EXPECT_GT(total, uint64_t{100} << 20);  // the problems were not all empty
}

// The scores alone: 4 N M elements forward (Algorithm 0), 9 N M backward, that is 7 and the two
// passes that computing S again takes. Every other term is below the tile terms given here.
TEST(StandardTrafficTest, ScoresMoveAsOftenAsTheAlgorithmSays) {
  ThreadPool pool(2);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  const int64_t n = 512;
  const AttentionProblem p = *Validate(BshdSpec({1, n, n, 2, 2, 1, 1}), Pass::kBackward);
  const double scores = 2.0 * n * n * 4;
  EXPECT_NEAR(static_cast<double>(backend->Model(p, Pass::kForward).bytes()) / scores, 4.0, 0.05);
  EXPECT_NEAR(static_cast<double>(backend->Model(p, Pass::kBackward).bytes()) / scores, 9.0, 0.1);
}

TEST(StandardTrafficTest, ModelOfAHugeProblemTakesNoTime) {
  ThreadPool pool(1);
  const std::unique_ptr<Backend> backend = MakeStandardCpuBackend(&pool);
  const AttentionProblem p =
      *Validate(BshdSpec({1, kMaxTokens, kMaxTokens, 1, 1, 1, 1}), Pass::kBackward);
  EXPECT_EQ(backend->Model(p, Pass::kBackward).loaded_bytes, ~uint64_t{0});
  EXPECT_EQ(backend->WorkspaceBytes(p, Pass::kBackward), std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace attn
