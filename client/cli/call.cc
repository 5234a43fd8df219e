// Problem -> calls, and how a problem is described to people.
#include <algorithm>
#include <utility>

#include "client/cli/problem.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

using client::HostTensor;
namespace v1 = client::v1;

void Describe(const HostTensor& tensor, v1::Tensor* stated) {
  stated->set_dtype(tensor.dtype);
  stated->mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
}

}  // namespace

std::vector<NamedTensor> Problem::Tensors() const {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] :
       {std::pair("q", &inputs.q), std::pair("k", &inputs.k), std::pair("v", &inputs.v),
        std::pair("out", &out), std::pair("lse", &lse), std::pair("dout", &dout),
        std::pair("dlse", &dlse), std::pair("bias", &inputs.bias),
        std::pair("alibi_slopes", &inputs.alibi_slopes), std::pair("sinks", &inputs.sinks),
        std::pair("block_mask", &inputs.block_mask)}) {
    if (!tensor->empty()) tensors.push_back({name, *tensor});
  }
  return tensors;
}

client::ForwardCall ToForward(const Problem& problem) {
  client::ForwardCall call;
  *call.header.mutable_shape() = problem.header.shape();
  *call.header.mutable_options() = problem.header.options();
  *call.header.mutable_path_policy() = problem.header.path_policy();
  call.header.set_report_level(problem.header.report_level());
  call.inputs = problem.inputs;
  return call;
}

client::BackwardCall ToBackward(const Problem& problem) {
  client::BackwardCall call;
  call.header = problem.header;
  call.inputs = problem.inputs;
  call.out = problem.out;
  call.lse = problem.lse;
  call.dout = problem.dout;
  call.dlse = problem.dlse;
  return call;
}

v1::PlanRequest ToPlan(const Problem& problem, v1::Pass pass) {
  v1::PlanRequest request;
  request.set_pass(pass);
  v1::BackwardRequestHeader* header = request.mutable_header();
  *header = problem.header;
  const client::AttentionInputs& in = problem.inputs;
  Describe(in.q, header->mutable_q());
  Describe(in.k, header->mutable_k());
  Describe(in.v, header->mutable_v());
  v1::AttentionOptions* options = header->mutable_options();
  if (!in.alibi_slopes.empty()) Describe(in.alibi_slopes, options->mutable_alibi_slopes());
  if (!in.bias.empty()) Describe(in.bias, options->mutable_bias());
  if (!in.sinks.empty()) Describe(in.sinks, options->mutable_sinks());
  if (!in.block_mask.empty()) {
    v1::Tensor* mask = options->mutable_block_mask()->mutable_mask();
    Describe(in.block_mask, mask);
    mask->set_payload(0);
    request.add_payload(reinterpret_cast<const char*>(in.block_mask.bytes.data()),
                        in.block_mask.bytes.size());
  }
  if (!problem.out.empty()) Describe(problem.out, header->mutable_out());
  if (!problem.lse.empty()) Describe(problem.lse, header->mutable_lse());
  if (!problem.dout.empty()) Describe(problem.dout, header->mutable_dout());
  if (!problem.dlse.empty()) Describe(problem.dlse, header->mutable_dlse());
  return request;
}

Extent LargestSequence(const Problem& problem) {
  const v1::AttentionShape& shape = problem.header.shape();
  const std::vector<int64_t>& q = problem.inputs.q.shape;
  const std::vector<int64_t>& k = problem.inputs.k.shape;
  if (shape.layout() == v1::LAYOUT_BSHD) {
    return {q.size() > 1 ? q[1] : 0, k.size() > 1 ? k[1] : 0, 0};
  }
  Extent largest;
  double most = -1;
  const int sequences = std::min(shape.cu_seqlens_q_size(), shape.cu_seqlens_k_size()) - 1;
  for (int b = 0; b < sequences; ++b) {
    const Extent extent = {shape.cu_seqlens_q(b + 1) - shape.cu_seqlens_q(b),
                           shape.cu_seqlens_k(b + 1) - shape.cu_seqlens_k(b),
                           static_cast<size_t>(b)};
    const double area = static_cast<double>(extent.queries) * static_cast<double>(extent.keys);
    if (area > most) {
      most = area;
      largest = extent;
    }
  }
  return largest;
}

std::string Summary(const Problem& problem, const Style& style) {
  const v1::AttentionShape& shape = problem.header.shape();
  const v1::AttentionOptions& options = problem.header.options();
  const client::AttentionInputs& in = problem.inputs;
  const bool thd = shape.layout() == v1::LAYOUT_THD;
  const Extent extent = LargestSequence(problem);
  std::string text =
      Cat(thd ? "THD " : "BSHD ", LowerName(in.q.dtype), ", batch ",
          thd ? shape.cu_seqlens_q_size() - 1 : in.q.shape[0], ", ", thd ? "up to " : "",
          FormatCount(extent.queries), " queries ", style.Times(), " ", FormatCount(extent.keys),
          " keys, ", shape.num_heads(), shape.num_heads() == 1 ? " head" : " heads");
  if (shape.num_kv_heads() != shape.num_heads()) {
    text += Cat(" (", shape.num_kv_heads(), " kv)");
  }
  text += Cat(", head_dim ", in.q.shape.back());
  if (in.v.shape.empty() || in.v.shape.back() != in.q.shape.back()) {
    text += Cat(" (v ", in.v.shape.empty() ? 0 : in.v.shape.back(), ")");
  }
  if (options.causal()) text += Cat(", causal");
  if (options.has_window_left() || options.has_window_right()) {
    const auto side = [](bool set, int64_t value) { return set ? Cat(value) : std::string("any"); };
    text += Cat(", window ", side(options.has_window_left(), options.window_left()), ":",
                side(options.causal() || options.has_window_right(), options.window_right()));
  }
  if (options.alignment() == v1::ALIGNMENT_TOP_LEFT) text += Cat(", top-left");
  if (options.seqlens_q_size() + options.seqlens_k_size() > 0) text += Cat(", padded");
  if (options.has_softcap()) text += Cat(", softcap ", options.softcap());
  if (!in.alibi_slopes.empty()) text += Cat(", ALiBi");
  if (!in.bias.empty()) text += Cat(", bias");
  if (!in.sinks.empty()) text += Cat(", sinks");
  if (!in.block_mask.empty()) text += Cat(", block mask");
  if (options.has_dropout()) text += Cat(", dropout ", options.dropout().p());
  if (options.deterministic()) text += Cat(", deterministic");
  return text;
}

}  // namespace attn::cli
