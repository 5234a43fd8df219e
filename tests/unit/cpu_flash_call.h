// Random flash_cpu calls with their tensors, for the tests of flash_cpu.
#ifndef ATTN_TESTS_UNIT_CPU_FLASH_CALL_H_
#define ATTN_TESTS_UNIT_CPU_FLASH_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/api/spec.h"
#include "tests/unit/api_test_util.h"

namespace attn {

class FlashRandom {
 public:
  explicit FlashRandom(uint32_t seed) : rng_(seed) {}
  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }
  bool OneIn(int64_t n) { return Uniform(1, n) == 1; }
  float Gauss() { return std::normal_distribution<float>()(rng_); }

 private:
  std::mt19937 rng_;
};

// Any of the options on top of a shape.
inline AttentionSpec WithRandomOptions(AttentionSpec spec, FlashRandom& random) {
  const bool thd = spec.layout == Layout::kThd;
  const AttentionProblem shape = *Validate(spec, Pass::kForward);
  const int64_t heads = spec.num_heads;
  spec.causal = random.OneIn(2);
  if (random.OneIn(2)) spec.alignment = Alignment::kTopLeft;
  if (random.OneIn(3)) spec.window_left = random.Uniform(0, 200);
  if (random.OneIn(3) && !spec.causal) spec.window_right = random.Uniform(0, 200);
  if (random.OneIn(3)) spec.softcap = 5.0f;
  if (random.OneIn(3)) {
    spec.alibi_slopes =
        random.OneIn(2) && shape.batch > 0 ? Shape({shape.batch, heads}) : Shape({heads});
  }
  if (random.OneIn(3)) spec.sinks = Shape({heads});
  if (random.OneIn(3)) spec.dropout = DropoutSpec{0.3f, 1, 2};
  if (random.OneIn(2)) spec.out_dtype = DType::kFp32;
  if (random.OneIn(3)) {
    std::vector<int64_t> bias = {random.OneIn(2) ? 1 : heads, thd ? shape.total_q : shape.seqlen_q,
                                 shape.seqlen_k};
    if (!thd) bias.insert(bias.begin(), random.OneIn(2) ? 1 : shape.batch);
    spec.bias = Shape(bias, random.OneIn(2) ? DType::kFp32 : DType::kBf16);
  }
  if (random.OneIn(3)) {
    BlockMaskSpec mask;
    mask.block_q = 64 * random.Uniform(1, 3);
    mask.block_k = 64 * random.Uniform(1, 3);
    mask.mask = Shape({random.OneIn(2) ? 1 : shape.batch, random.OneIn(2) ? 1 : heads,
                       (shape.seqlen_q + mask.block_q - 1) / mask.block_q,
                       (shape.seqlen_k + mask.block_k - 1) / mask.block_k},
                      DType::kUint8);
    spec.block_mask = mask;
  }
  if (random.OneIn(2)) {
    spec.dlse = thd ? Shape({heads, shape.total_q}) : Shape({shape.batch, heads, shape.seqlen_q});
  }
  return spec;
}

// A spec that flash_cpu takes, with any of its options.
inline AttentionSpec RandomFlashSpec(FlashRandom& random) {
  const DType dtype = std::vector{DType::kFp32, DType::kFp16, DType::kBf16}[random.Uniform(0, 2)];
  const int64_t batch = random.OneIn(8) ? 0 : random.Uniform(1, 3);
  const int64_t kv_heads = random.Uniform(1, 3);
  const int64_t heads = kv_heads * (random.OneIn(6) ? 40 : random.Uniform(1, 4));
  const int64_t dim = random.Uniform(1, 70), dim_v = random.OneIn(2) ? dim : random.Uniform(1, 70);
  // Few queries with many keys are split; many queries make tall tiles.
  const bool decode = random.OneIn(6);
  const int64_t max_q = decode ? 3 : 300, max_k = decode ? 5000 : 700;
  AttentionSpec spec;
  if (random.OneIn(2)) {
    spec = BshdSpec(
        {batch, random.Uniform(0, max_q), random.Uniform(0, max_k), heads, kv_heads, dim, dim_v},
        dtype);
    spec.seqlens_q.resize(random.OneIn(2) ? batch : 0);
    for (auto& n : spec.seqlens_q) n = random.Uniform(0, spec.q.shape[1]);
    spec.seqlens_k.resize(random.OneIn(2) ? batch : 0);
    for (auto& n : spec.seqlens_k) n = random.Uniform(0, spec.k.shape[1]);
  } else {
    std::vector<int64_t> lengths_q(batch), lengths_k(batch);
    for (auto& n : lengths_q) n = random.Uniform(0, max_q);
    for (auto& n : lengths_k) n = random.OneIn(3) ? random.Uniform(0, 9) : random.Uniform(0, max_k);
    spec = ThdSpec(lengths_q, lengths_k, heads, kv_heads, dim);
    spec.q.dtype = spec.k.dtype = spec.v.dtype = dtype;
  }
  return WithRandomOptions(std::move(spec), random);
}

// Many short sequences: what flash_cpu reads in windows (InputWindows).
inline AttentionSpec RandomShortSpec(FlashRandom& random) {
  const DType dtype = std::vector{DType::kFp32, DType::kFp16, DType::kBf16}[random.Uniform(0, 2)];
  const int64_t kv_heads = random.Uniform(1, 3), heads = kv_heads * random.Uniform(1, 30);
  const int64_t seqlen_q = random.Uniform(1, 12), seqlen_k = random.Uniform(0, 12);
  const int64_t dim = random.Uniform(1, 70), dim_v = random.Uniform(1, 70);
  const int64_t sequence_bytes =
      (seqlen_q * heads * dim + seqlen_k * kv_heads * (dim + dim_v)) * SizeOf(dtype);
  // A few more than 32 windows of 256 KiB.
  const int64_t batch = (int64_t{9} << 20) / sequence_bytes + random.Uniform(0, 9);
  AttentionSpec spec = BshdSpec({batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v}, dtype);
  spec.seqlens_q.resize(random.OneIn(2) ? batch : 0);
  for (auto& n : spec.seqlens_q) n = random.Uniform(0, seqlen_q);
  spec.seqlens_k.resize(random.OneIn(2) ? batch : 0);
  for (auto& n : spec.seqlens_k) n = random.Uniform(0, seqlen_k);
  return WithRandomOptions(std::move(spec), random);
}

// A call's tensors, filled at random (keys and values included beyond their lengths).
class FlashCall {
 public:
  FlashCall(const AttentionSpec& spec, FlashRandom& random) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      absl::StatusOr<AttentionProblem> problem = Validate(spec, pass);
      EXPECT_TRUE(problem.ok()) << Text(problem.status());
      problem_[pass == Pass::kBackward] = *std::move(problem);
    }
    const AttentionProblem& p = problem_[0];
    Fill(q_, DqElements(p), p.dtype, random);
    Fill(k_, DkElements(p), p.dtype, random);
    Fill(v_, DvElements(p), p.dtype, random);
    Fill(dout_, OutElements(p), problem_[1].bwd_dout_dtype, random);
    out_.resize(OutElements(p) * 4 + 8);
    dq_.resize(DqElements(p) * 4 + 8);
    dk_.resize(DkElements(p) * 4 + 8);
    dv_.resize(DvElements(p) * 4 + 8);
    lse_.resize(LseElements(p) + 1);
    dbias_.resize(DbiasElements(p) + 1);
    dsink_.resize(p.num_heads);
    for (auto* floats : {&dlse_, &slopes_, &sinks_}) {
      floats->resize(floats == &dlse_ ? LseElements(p) + 1 : (p.batch + 1) * p.num_heads);
      for (float& x : *floats) x = random.Gauss();
    }
    if (p.bias) Fill(bias_, DbiasElements(p), p.bias->dtype, random);
    if (p.block_mask) {
      mask_.resize(spec.block_mask->mask.NumElements() + 1);
      for (auto& m : mask_) m = random.OneIn(2) ? 1 : 0;
    }
    for (AttentionProblem& problem : problem_) {
      if (problem.alibi) problem.alibi->slopes = slopes_.data();
      if (problem.has_sinks) problem.sinks = sinks_.data();
      if (problem.bias) problem.bias->data = bias_.data();
      if (problem.block_mask) problem.block_mask->data = mask_.data();
    }
  }

  const AttentionProblem& problem(Pass pass) const { return problem_[pass == Pass::kBackward]; }

  // q, k and v for RunContext::reader.
  class Reader : public InputReader {
   public:
    explicit Reader(const FlashCall& call) : tensors_{&call.q_, &call.k_, &call.v_} {}
    void Read(Tensor tensor, uint64_t offset, uint64_t count, std::byte* to) const override {
      const std::vector<std::byte>& bytes = *tensors_[static_cast<size_t>(tensor)];
      ASSERT_LE(offset + count, bytes.size() - kGuardBytes);
      std::memcpy(to, bytes.data() + offset, count);
    }

   private:
    const std::vector<std::byte>* tensors_[3];
  };

  absl::Status Run(const Backend& backend, Pass pass, TrafficCounters* counters = nullptr,
                   const CancelToken* cancel = nullptr, const InputReader* reader = nullptr,
                   uint64_t* reading_ns = nullptr) {
    const AttentionProblem& p = problem(pass);
    workspace_.resize(backend.WorkspaceBytes(p, pass) + 64);
    RunContext context;
    context.workspace = {reinterpret_cast<std::byte*>(
                             (reinterpret_cast<uintptr_t>(workspace_.data()) + 63) / 64 * 64),
                         workspace_.size() - 64};
    context.counters = counters;
    context.cancel = cancel;
    context.reader = reader;
    context.reading_ns = reading_ns;
    if (reader != nullptr) {
      return backend.Forward(p, {nullptr, nullptr, nullptr, out_.data(), lse_.data()}, context);
    }
    if (pass == Pass::kForward) {
      return backend.Forward(p, {q_.data(), k_.data(), v_.data(), out_.data(), lse_.data()},
                             context);
    }
    BackwardTensors t;
    t.q = q_.data();
    t.k = k_.data();
    t.v = v_.data();
    t.out = out_.data();
    t.lse = lse_.data();
    t.dout = dout_.data();
    t.dlse = p.has_dlse ? dlse_.data() : nullptr;
    t.dq = dq_.data();
    t.dk = dk_.data();
    t.dv = dv_.data();
    t.dbias = dbias_.data();
    t.dsink = dsink_.data();
    return backend.Backward(p, t, context);
  }

  // All outputs as bytes, to compare runs.
  std::vector<std::byte> Outputs() const {
    std::vector<std::byte> all;
    for (const auto* bytes : {&out_, &dq_, &dk_, &dv_}) {
      all.insert(all.end(), bytes->begin(), bytes->end());
    }
    for (const auto* floats : {&lse_, &dbias_, &dsink_}) {
      const auto* begin = reinterpret_cast<const std::byte*>(floats->data());
      all.insert(all.end(), begin, begin + floats->size() * sizeof(float));
    }
    return all;
  }

  void ClearOutputs() {
    for (auto* bytes : {&out_, &dq_, &dk_, &dv_})
      std::fill(bytes->begin(), bytes->end(), std::byte{0x5A});
    for (auto* floats : {&lse_, &dbias_, &dsink_}) std::fill(floats->begin(), floats->end(), 0.5f);
  }

 private:
  static constexpr size_t kGuardBytes = 8;  // after each tensor

  static void Fill(std::vector<std::byte>& bytes, int64_t elements, DType dtype,
                   FlashRandom& random) {
    bytes.resize(elements * SizeOf(dtype) + kGuardBytes);
    constexpr int64_t kPeriod = 65'521;  // a prime, so that rows differ
    for (int64_t i = 0; i < std::min(elements, kPeriod); ++i) {
      StoreElement(bytes.data(), dtype, i, random.Gauss());
    }
    for (int64_t i = kPeriod; i < elements; i += kPeriod) {
      std::memcpy(bytes.data() + i * SizeOf(dtype), bytes.data(),
                  static_cast<size_t>(std::min(kPeriod, elements - i) * SizeOf(dtype)));
    }
  }

  AttentionProblem problem_[2];
  std::vector<std::byte> q_, k_, v_, dout_, out_, dq_, dk_, dv_, bias_, workspace_;
  std::vector<float> lse_, dlse_, slopes_, sinks_, dbias_, dsink_;
  std::vector<uint8_t> mask_;
};

}  // namespace attn

#endif  // ATTN_TESTS_UNIT_CPU_FLASH_CALL_H_
