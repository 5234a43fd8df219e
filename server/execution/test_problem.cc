#include "server/execution/test_problem.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "kernels/api/traffic.h"

namespace attn::server {
namespace {

std::vector<std::byte> Zeros(int64_t elements, DType dtype) {
  return std::vector<std::byte>(static_cast<size_t>(elements * SizeOf(dtype)));
}

void Poison(std::vector<std::byte>* bytes) {
  std::fill(bytes->begin(), bytes->end(), std::byte{0xFF});  // NaN in every dtype
}

int64_t At(int64_t token, int64_t head, int64_t heads, int64_t d, int64_t dims) {
  return (token * heads + head) * dims + d;
}

struct FreeAligned {
  void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }
};

}  // namespace

absl::StatusOr<AttentionProblem> MakeProblem(int64_t seqlen_q, int64_t seqlen_k, int64_t num_heads,
                                             int64_t num_kv_heads, int64_t head_dim, DType dtype,
                                             bool causal, Pass pass) {
  AttentionSpec spec;
  spec.layout = Layout::kBshd;
  spec.num_heads = num_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.q = {dtype, {1, seqlen_q, num_heads, head_dim}, {}};
  spec.k = {dtype, {1, seqlen_k, num_kv_heads, head_dim}, {}};
  spec.v = spec.k;
  spec.causal = causal;
  spec.softmax_scale = 1.0f;
  if (pass == Pass::kBackward) {
    spec.out = spec.q;
    spec.dout = spec.q;
    spec.lse = TensorSpec{DType::kFp32, {1, num_heads, seqlen_q}, {}};
  }
  return Validate(spec, pass);
}

CallTensors::CallTensors(const AttentionProblem& problem)
    : problem_(problem),
      q_(Zeros(DqElements(problem), problem.dtype)),
      k_(Zeros(DkElements(problem), problem.dtype)),
      v_(Zeros(DvElements(problem), problem.dtype)),
      dout_(Zeros(OutElements(problem), problem.dtype)),
      out_(Zeros(OutElements(problem), problem.dtype)),
      dq_(q_),
      dk_(k_),
      dv_(v_),
      lse_(static_cast<size_t>(LseElements(problem))) {}

void CallTensors::SetQ(int64_t token, int64_t head, int64_t d, float value) {
  StoreElement(q_.data(), problem_.dtype, At(token, head, problem_.num_heads, d, problem_.head_dim),
               value);
}
void CallTensors::SetK(int64_t token, int64_t head, int64_t d, float value) {
  StoreElement(k_.data(), problem_.dtype,
               At(token, head, problem_.num_kv_heads, d, problem_.head_dim), value);
}
void CallTensors::SetV(int64_t token, int64_t head, int64_t d, float value) {
  StoreElement(v_.data(), problem_.dtype,
               At(token, head, problem_.num_kv_heads, d, problem_.head_dim_v), value);
}
void CallTensors::SetDout(int64_t token, int64_t head, int64_t d, float value) {
  StoreElement(dout_.data(), problem_.dtype,
               At(token, head, problem_.num_heads, d, problem_.head_dim_v), value);
}

void CallTensors::FillRandom() {
  // A period of random numbers, repeated: its length is odd, so that rows differ.
  constexpr int64_t kPeriod = 4099;
  uint32_t state = 1;  // a short linear congruence: any values do
  const auto fill = [this, &state](std::vector<std::byte>* bytes, float scale) {
    const auto size = static_cast<size_t>(SizeOf(problem_.dtype));
    const size_t period = std::min(bytes->size(), kPeriod * size);
    for (size_t i = 0; i < period / size; ++i) {
      state = state * 1664525u + 1013904223u;
      StoreElement(bytes->data(), problem_.dtype, static_cast<int64_t>(i),
                   static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f * scale);
    }
    for (size_t at = period; at < bytes->size(); at += period) {
      std::memcpy(bytes->data() + at, bytes->data(), std::min(period, bytes->size() - at));
    }
  };
  fill(&q_, 0.125f);
  fill(&k_, 1.0f);
  fill(&v_, 1.0f);
  fill(&dout_, 1.0f);
}

absl::StatusOr<std::chrono::nanoseconds> CallTensors::Run(const Backend& backend, Pass pass,
                                                          int device) {
  const auto bytes = backend.WorkspaceOnDevice()
                         ? size_t{0}
                         : static_cast<size_t>(backend.WorkspaceBytes(problem_, pass));
  const std::unique_ptr<std::byte, FreeAligned> workspace(
      static_cast<std::byte*>(::operator new (bytes + 1, std::align_val_t{64}, std::nothrow)));
  if (workspace == nullptr) return absl::ResourceExhaustedError("no memory for the workspace");
  DeviceTimes times;
  const RunContext context{.workspace = {workspace.get(), bytes},
                           .device_times = &times,
                           .device_index = device,
                           .poison = true};
  const auto start = std::chrono::steady_clock::now();
  absl::Status status;
  if (pass == Pass::kForward) {
    Poison(&out_);
    std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());
    status = backend.Forward(
        problem_,
        {.q = q_.data(), .k = k_.data(), .v = v_.data(), .out = out_.data(), .lse = lse_.data()},
        context);
  } else {
    Poison(&dq_);
    Poison(&dk_);
    Poison(&dv_);
    status = backend.Backward(problem_,
                              {.q = q_.data(),
                               .k = k_.data(),
                               .v = v_.data(),
                               .out = out_.data(),
                               .lse = lse_.data(),
                               .dout = dout_.data(),
                               .dq = dq_.data(),
                               .dk = dk_.data(),
                               .dv = dv_.data()},
                              context);
  }
  if (!status.ok()) return status;
  if (times.device_index >= 0) return std::chrono::nanoseconds(times.kernel_ns);
  return std::chrono::steady_clock::now() - start;
}

float CallTensors::Out(int64_t token, int64_t head, int64_t d) const {
  return LoadElement(out_.data(), problem_.out_dtype,
                     At(token, head, problem_.num_heads, d, problem_.head_dim_v));
}
float CallTensors::Lse(int64_t token, int64_t head) const {
  return lse_[problem_.LseOffset(0, head) + token];
}
float CallTensors::Dq(int64_t token, int64_t head, int64_t d) const {
  return LoadElement(dq_.data(), problem_.out_dtype,
                     At(token, head, problem_.num_heads, d, problem_.head_dim));
}
float CallTensors::Dk(int64_t token, int64_t head, int64_t d) const {
  return LoadElement(dk_.data(), problem_.out_dtype,
                     At(token, head, problem_.num_kv_heads, d, problem_.head_dim));
}
float CallTensors::Dv(int64_t token, int64_t head, int64_t d) const {
  return LoadElement(dv_.data(), problem_.out_dtype,
                     At(token, head, problem_.num_kv_heads, d, problem_.head_dim_v));
}

SyntheticCall::SyntheticCall(int64_t seqlen, int64_t num_heads, int64_t head_dim, DType dtype)
    : seqlen_(seqlen), num_heads_(num_heads), head_dim_(head_dim), dtype_(dtype) {}

absl::StatusOr<std::chrono::nanoseconds> SyntheticCall::Run(const Backend& backend,
                                                            Pass pass) const {
  absl::StatusOr<AttentionProblem> problem =
      MakeProblem(seqlen_, seqlen_, num_heads_, num_heads_, head_dim_, dtype_, false, pass);
  if (!problem.ok()) return problem.status();
  std::vector<Rejection> rejections;
  backend.AppendRejections(*problem, pass, &rejections);
  if (!rejections.empty()) return absl::UnimplementedError("the path does not take this call");
  CallTensors tensors(*problem);
  tensors.FillRandom();
  if (pass == Pass::kBackward) {
    if (auto forward = tensors.Run(backend, Pass::kForward); !forward.ok()) return forward;
  }
  return tensors.Run(backend, pass);
}

uint64_t SyntheticCall::flops(Pass pass) const {
  const auto pairs = static_cast<uint64_t>(seqlen_ * seqlen_ * num_heads_);
  const auto d = static_cast<uint64_t>(head_dim_);
  return 2 * pairs * d * (pass == Pass::kForward ? 2 : 5);
}

}  // namespace attn::server
