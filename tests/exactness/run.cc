#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/exactness/call.h"

namespace attn::exactness {
namespace {

absl::Status CheckGuards(const Backend& backend,
                         std::initializer_list<std::pair<const char*, const GuardedBuffer*>> all) {
  for (const auto& [name, buffer] : all) {
    if (!buffer->GuardsIntact()) {
      return absl::InternalError(absl::StrCat(std::string(Name(backend.path())), " wrote outside ",
                                              name, " (", buffer->bytes(), " B)"));
    }
  }
  return absl::OkStatus();
}

// A contiguous output laid out as `like` is, NaN in the gaps.
std::vector<std::byte> Relaid(const GuardedBuffer& out, DType dtype, const Input& like) {
  const int64_t size = SizeOf(dtype);
  const std::vector<int64_t>& shape = like.spec.shape;
  std::vector<int64_t> strides = like.spec.strides;
  if (strides.empty()) return {out.data(), out.data() + out.bytes()};
  std::vector<std::byte> bytes(std::max<int64_t>(0, like.spec.SpanElements()) * size,
                               std::byte{0xFF});
  const bool thd = shape.size() == 3;
  const int64_t batch = thd ? 1 : shape[0], tokens = shape[shape.size() - 3],
                heads = shape[shape.size() - 2], dim = shape.back();
  if (thd) strides.insert(strides.begin(), 0);
  for (int64_t row = 0; row < batch * tokens * heads; ++row) {
    const int64_t at = row / (tokens * heads) * strides[0] + row / heads % tokens * strides[1] +
                       row % heads * strides[2];
    std::memcpy(bytes.data() + at * size, out.data() + row * dim * size, dim * size);
  }
  return bytes;
}

}  // namespace

absl::StatusOr<ForwardOutputs> RunForward(const Backend& backend, const Call& call,
                                          const CancelToken* cancel) {
  absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kForward);
  if (!problem.ok()) return problem.status();
  const AttentionProblem& p = *problem;
  ForwardOutputs outputs{.dtype = p.out_dtype,
                         .out = GuardedBuffer(OutElements(p) * SizeOf(p.out_dtype)),
                         .lse = GuardedBuffer(LseElements(p) * 4)};
  GuardedBuffer workspace(backend.WorkspaceOnDevice() ? 0
                                                      : backend.WorkspaceBytes(p, Pass::kForward));
  const absl::Status status = backend.Forward(p,
                                              {.q = call.q_.data(),
                                               .k = call.k_.data(),
                                               .v = call.v_.data(),
                                               .out = outputs.out.data(),
                                               .lse = reinterpret_cast<float*>(outputs.lse.data())},
                                              {.workspace = workspace.span(), .cancel = cancel});
  if (!status.ok()) return status;
  const absl::Status guards = CheckGuards(
      backend, {{"out", &outputs.out}, {"lse", &outputs.lse}, {"workspace", &workspace}});
  if (!guards.ok()) return guards;
  return outputs;
}

absl::StatusOr<BackwardOutputs> RunBackward(const Backend& backend, const Call& call,
                                            const ForwardOutputs& forward,
                                            const CancelToken* cancel) {
  absl::StatusOr<AttentionProblem> problem = call.Problem(Pass::kBackward);
  if (!problem.ok()) return problem.status();
  const AttentionProblem& p = *problem;
  const int64_t size = SizeOf(p.out_dtype);
  BackwardOutputs outputs{.dtype = p.out_dtype,
                          .dq = GuardedBuffer(DqElements(p) * size),
                          .dk = GuardedBuffer(DkElements(p) * size),
                          .dv = GuardedBuffer(DvElements(p) * size),
                          .dbias = GuardedBuffer(DbiasElements(p) * 4),
                          .dsink = GuardedBuffer(p.has_sinks ? p.num_heads * 4 : 0)};
  GuardedBuffer workspace(backend.WorkspaceOnDevice() ? 0
                                                      : backend.WorkspaceBytes(p, Pass::kBackward));
  const std::vector<std::byte> out = Relaid(forward.out, forward.dtype, call.dout_);
  const auto floats = [](GuardedBuffer& b) { return reinterpret_cast<float*>(b.data()); };
  const absl::Status status =
      backend.Backward(p,
                       {.q = call.q_.data(),
                        .k = call.k_.data(),
                        .v = call.v_.data(),
                        .out = out.data(),
                        .lse = reinterpret_cast<const float*>(forward.lse.data()),
                        .dout = call.dout_.data(),
                        .dlse = call.case_.dlse ? call.dlse_.data() : nullptr,
                        .dq = outputs.dq.data(),
                        .dk = outputs.dk.data(),
                        .dv = outputs.dv.data(),
                        .dbias = p.bias ? floats(outputs.dbias) : nullptr,
                        .dsink = p.has_sinks ? floats(outputs.dsink) : nullptr},
                       {.workspace = workspace.span(), .cancel = cancel});
  if (!status.ok()) return status;
  const absl::Status guards = CheckGuards(backend, {{"dq", &outputs.dq},
                                                    {"dk", &outputs.dk},
                                                    {"dv", &outputs.dv},
                                                    {"dbias", &outputs.dbias},
                                                    {"dsink", &outputs.dsink},
                                                    {"workspace", &workspace}});
  if (!guards.ok()) return guards;
  return outputs;
}

}  // namespace attn::exactness
