#include "tests/bench/soak_calls.h"

#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/api/dtype.h"

namespace attn::bench {
namespace {

namespace v1 = client::v1;
using client::HostTensor;
using std::chrono::microseconds;

int64_t Draw(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

bool Chance(Rng& rng, double p) { return std::uniform_real_distribution<double>()(rng) < p; }

DType ToKernel(v1::DType dtype) {
  return dtype == v1::DTYPE_FP32 ? DType::kFp32
                                 : (dtype == v1::DTYPE_FP16 ? DType::kFp16 : DType::kBf16);
}

// A tensor of a few distinct values: cheap to make, and of every sign.
HostTensor Filled(Rng& rng, v1::DType dtype, std::vector<int64_t> shape) {
  HostTensor tensor = HostTensor::Allocate(dtype, std::move(shape));
  const std::span<std::byte> bytes = tensor.mutable_bytes();
  const int64_t count = tensor.NumElements();
  const int64_t period = std::min<int64_t>(count, 1021);
  for (int64_t i = 0; i < period; ++i) {
    StoreElement(bytes.data(), ToKernel(dtype), i,
                 static_cast<float>(Draw(rng, -128, 128)) / 64.0f);
  }
  const size_t filled = static_cast<size_t>(period * client::SizeOf(dtype));
  for (size_t at = filled; at < bytes.size(); at += filled) {
    std::memcpy(bytes.data() + at, bytes.data(), std::min(filled, bytes.size() - at));
  }
  return tensor;
}

struct Shape {
  int64_t batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v;
  v1::DType dtype;
};

Shape RandomShape(Rng& rng) {
  const int64_t dims[] = {1, 8, 20, 32, 64, 72, 128, 264};
  const v1::DType dtypes[] = {v1::DTYPE_FP32, v1::DTYPE_FP16, v1::DTYPE_BF16};
  Shape s;
  s.batch = Draw(rng, 1, 3);
  s.seqlen_q = Draw(rng, 1, 150);
  s.seqlen_k = Chance(rng, 0.3) ? 1 : Draw(rng, 1, 150);
  s.kv_heads = Draw(rng, 1, 3);
  s.heads = s.kv_heads * Draw(rng, 1, 3);
  s.head_dim = dims[Draw(rng, 0, 7)];
  s.head_dim_v = Chance(rng, 0.7) ? s.head_dim : dims[Draw(rng, 0, 7)];
  s.dtype = dtypes[Draw(rng, 0, 2)];
  return s;
}

template <typename Header>
void FillHeader(const Shape& s, Header* header) {
  header->mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  header->mutable_shape()->set_num_heads(s.heads);
  header->mutable_shape()->set_num_kv_heads(s.kv_heads);
}

void FillInputs(Rng& rng, const Shape& s, client::AttentionInputs* inputs) {
  inputs->q = Filled(rng, s.dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim});
  inputs->k = Filled(rng, s.dtype, {s.batch, s.seqlen_k, s.kv_heads, s.head_dim});
  inputs->v = Filled(rng, s.dtype, {s.batch, s.seqlen_k, s.kv_heads, s.head_dim_v});
}

void RandomOptions(Rng& rng, const Shape& s, v1::AttentionOptions* options,
                   client::AttentionInputs* inputs) {
  options->set_causal(Chance(rng, 0.4));
  options->set_deterministic(Chance(rng, 0.2));
  if (Chance(rng, 0.2)) options->set_window_left(Draw(rng, 0, 100));
  if (Chance(rng, 0.2)) options->set_softcap(4.0f);
  if (Chance(rng, 0.2)) {
    for (int64_t b = 0; b < s.batch; ++b) options->add_seqlens_k(Draw(rng, 0, s.seqlen_k));
  }
  if (Chance(rng, 0.2)) {
    options->mutable_dropout()->set_p(0.25f);
    options->mutable_dropout()->set_seed(rng());
  }
  if (Chance(rng, 0.2)) inputs->sinks = Filled(rng, v1::DTYPE_FP32, {s.heads});
  if (Chance(rng, 0.2)) {
    inputs->bias = Filled(rng, v1::DTYPE_FP32, {1, s.heads, s.seqlen_q, s.seqlen_k});
  }
}

// No element may be NaN or infinite, except lse, which may be -inf.
absl::Status CheckFinite(const char* name, const HostTensor& tensor, bool allow_minus_infinity) {
  for (int64_t i = 0; i < tensor.NumElements(); ++i) {
    const float x = LoadElement(tensor.bytes.data(), ToKernel(tensor.dtype), i);
    if (std::isfinite(x) || (allow_minus_infinity && x == -HUGE_VALF)) continue;
    return absl::DataLossError(absl::StrCat(name, "[", i, "] is ", x));
  }
  return absl::OkStatus();
}

// With one visible key out is v exactly. `call` has no options.
absl::Status CheckOneKey(const Shape& s, const client::ForwardCall& call, const HostTensor& out) {
  const int64_t size = client::SizeOf(s.dtype) * s.head_dim_v;
  const std::byte* v = call.inputs.v.bytes.data();
  const std::byte* o = out.bytes.data();
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t kv = b * s.kv_heads + h / (s.heads / s.kv_heads);
        const int64_t row = (b * s.seqlen_q + i) * s.heads + h;
        if (std::memcmp(o + row * size, v + kv * size, static_cast<size_t>(size)) != 0) {
          return absl::DataLossError(
              absl::StrCat("out differs from v at batch ", b, ", query ", i, ", head ", h));
        }
      }
    }
  }
  return absl::OkStatus();
}

client::CallOptions PlainOptions(Rng& rng) {
  client::CallOptions options;
  options.deadline = std::chrono::minutes(2);
  if (Chance(rng, 0.4)) options.streaming = Chance(rng, 0.5);
  return options;
}

// RESOURCE_EXHAUSTED is what a full server answers; anything else but OK is a fault.
absl::Status Allowed(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? absl::OkStatus() : status;
}

absl::Status Forward(client::Client& client, Rng& rng, absl::StatusCode* code) {
  const Shape s = RandomShape(rng);
  client::ForwardCall call;
  FillHeader(s, &call.header);
  FillInputs(rng, s, &call.inputs);
  const bool plain = s.seqlen_k == 1;
  if (!plain) RandomOptions(rng, s, call.header.mutable_options(), &call.inputs);
  const auto result = client.Forward(call, PlainOptions(rng));
  *code = result.status().code();
  if (!result.ok()) return Allowed(result.status());
  if (absl::Status status = CheckFinite("lse", result->lse, true); !status.ok()) return status;
  return plain ? CheckOneKey(s, call, result->out) : CheckFinite("out", result->out, false);
}

absl::Status Backward(client::Client& client, Rng& rng, absl::StatusCode* code) {
  const Shape s = RandomShape(rng);
  client::ForwardCall forward;
  FillHeader(s, &forward.header);
  FillInputs(rng, s, &forward.inputs);
  RandomOptions(rng, s, forward.header.mutable_options(), &forward.inputs);
  const auto first = client.Forward(forward, PlainOptions(rng));
  *code = first.status().code();
  if (!first.ok()) return Allowed(first.status());
  client::BackwardCall call;
  FillHeader(s, &call.header);
  *call.header.mutable_options() = forward.header.options();
  call.inputs = forward.inputs;
  call.out = first->out;
  call.lse = first->lse;
  call.dout = Filled(rng, s.dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim_v});
  const auto result = client.Backward(call, PlainOptions(rng));
  *code = result.status().code();
  if (!result.ok()) return Allowed(result.status());
  for (const auto& [name, tensor] :
       {std::pair("dq", &result->dq), std::pair("dk", &result->dk), std::pair("dv", &result->dv)}) {
    if (absl::Status status = CheckFinite(name, *tensor, false); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LargeForward(client::Client& client, Rng& rng, absl::StatusCode* code) {
  // One key: the answer is known, the work is moving bytes.
  Shape s{Draw(rng, 1, 64), 1, 1, 64, 1, 128, 128, v1::DTYPE_BF16};
  s.seqlen_q = Draw(rng, 1, 8);
  client::ForwardCall call;
  FillHeader(s, &call.header);
  FillInputs(rng, s, &call.inputs);
  const auto result = client.Forward(call, PlainOptions(rng));
  *code = result.status().code();
  if (!result.ok()) return Allowed(result.status());
  return CheckOneKey(s, call, result->out);
}

// Up to a second or so of work.
client::ForwardCall LongForward(Rng& rng) {
  const Shape s{1, Draw(rng, 500, 4000), Draw(rng, 500, 4000), 8, 1, 16, 16, v1::DTYPE_BF16};
  client::ForwardCall call;
  FillHeader(s, &call.header);
  FillInputs(rng, s, &call.inputs);
  return call;
}

absl::Status AllowStopped(const absl::Status& status) {
  if (absl::IsCancelled(status) || absl::IsDeadlineExceeded(status)) return absl::OkStatus();
  return Allowed(status);
}

absl::Status Cancelled(client::Client& client, Rng& rng, absl::StatusCode* code) {
  const client::ForwardCall call = LongForward(rng);
  client::CallOptions options = PlainOptions(rng);
  std::atomic<bool> cancel{false};
  options.cancel = &cancel;
  std::thread canceller([&cancel, wait = microseconds(Draw(rng, 0, 30'000))] {
    std::this_thread::sleep_for(wait);
    cancel.store(true);
  });
  const absl::Status status = client.Forward(call, options).status();
  canceller.join();
  *code = status.code();
  return AllowStopped(status);
}

absl::Status Deadline(client::Client& client, Rng& rng, absl::StatusCode* code) {
  const client::ForwardCall call = LongForward(rng);
  client::CallOptions options = PlainOptions(rng);
  options.deadline = microseconds(Draw(rng, 50, 30'000));
  const absl::Status status = client.Forward(call, options).status();
  *code = status.code();
  return AllowStopped(status);
}

absl::Status Refused(client::Client& client, Rng& rng, absl::StatusCode expected,
                     absl::StatusCode* code) {
  Shape s = RandomShape(rng);
  client::ForwardCall call;
  if (expected == absl::StatusCode::kFailedPrecondition) {
    s.head_dim = s.head_dim_v = 264;
    call.header.mutable_path_policy()->set_mode(v1::PATH_POLICY_REQUIRE_FLASH);
  } else {
    call.header.mutable_options()->set_window_left(-1);
  }
  FillHeader(s, &call.header);
  FillInputs(rng, s, &call.inputs);
  const absl::Status status = client.Forward(call, PlainOptions(rng)).status();
  *code = status.code();
  if (status.code() == expected || absl::IsResourceExhausted(status)) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("expected ", absl::StatusCodeToString(expected), ", got ", status.ToString()));
}

absl::Status Plan(client::Client& client, Rng& rng, absl::StatusCode* code) {
  const Shape s = RandomShape(rng);
  v1::PlanRequest request;
  request.set_pass(v1::PASS_BACKWARD);
  FillHeader(s, request.mutable_header());
  const auto describe = [&s](v1::Tensor* t, std::vector<int64_t> shape) {
    t->set_dtype(s.dtype);
    t->mutable_shape()->Assign(shape.begin(), shape.end());
  };
  describe(request.mutable_header()->mutable_q(), {s.batch, s.seqlen_q, s.heads, s.head_dim});
  describe(request.mutable_header()->mutable_k(), {s.batch, s.seqlen_k, s.kv_heads, s.head_dim});
  describe(request.mutable_header()->mutable_v(), {s.batch, s.seqlen_k, s.kv_heads, s.head_dim_v});
  client::CallOptions options;
  options.deadline = std::chrono::minutes(1);
  const auto plan = client.Plan(request, options);
  *code = plan.status().code();
  if (!plan.ok()) return plan.status();
  return plan->path().empty() ? absl::InternalError("Plan names no path") : absl::OkStatus();
}

}  // namespace

const char* Name(CallKind kind) {
  constexpr const char* kNames[kNumCallKinds] = {"forward",      "backward", "large forward",
                                                 "cancelled",    "deadline", "invalid",
                                                 "unmet policy", "plan"};
  return kNames[static_cast<int>(kind)];
}

CallKind RandomKind(Rng& rng) {
  // Per cent, in the order of CallKind.
  constexpr int kShares[kNumCallKinds] = {40, 12, 6, 14, 14, 5, 4, 5};
  int64_t draw = Draw(rng, 0, 99);
  for (int kind = 0; kind < kNumCallKinds; ++kind) {
    draw -= kShares[kind];
    if (draw < 0) return static_cast<CallKind>(kind);
  }
  return CallKind::kForward;
}

absl::Status MakeCall(client::Client& client, CallKind kind, Rng& rng, absl::StatusCode* code) {
  switch (kind) {
    case CallKind::kForward:
      return Forward(client, rng, code);
    case CallKind::kBackward:
      return Backward(client, rng, code);
    case CallKind::kLargeForward:
      return LargeForward(client, rng, code);
    case CallKind::kCancelled:
      return Cancelled(client, rng, code);
    case CallKind::kDeadline:
      return Deadline(client, rng, code);
    case CallKind::kInvalid:
      return Refused(client, rng, absl::StatusCode::kInvalidArgument, code);
    case CallKind::kUnmetPolicy:
      return Refused(client, rng, absl::StatusCode::kFailedPrecondition, code);
    case CallKind::kPlan:
      return Plan(client, rng, code);
  }
  return absl::InternalError("no such kind");
}

}  // namespace attn::bench
