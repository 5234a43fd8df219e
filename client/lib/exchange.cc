#include "client/lib/exchange.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/lib/tensor.h"

namespace attn::client {
namespace {

// Collects the payloads of a call while its header is filled in.
class Packer {
 public:
  // Writes dtype, shape and source of `tensor` into `field` and adds its bytes. An empty tensor
  // adds nothing.
  void Add(const char* name, const HostTensor& tensor, v1::Tensor* field) {
    if (!status_.ok()) return;
    if (status_ = CheckTensor(name, tensor); !status_.ok()) return;
    field->Clear();
    field->set_dtype(tensor.dtype);
    field->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    field->set_payload(PayloadOf(tensor));
  }

  void AddRequired(const char* name, const HostTensor& tensor, v1::Tensor* field) {
    if (status_.ok() && tensor.empty()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(name, " is required"));
    }
    Add(name, tensor, field);
  }

  const absl::Status& status() const { return status_; }
  uint64_t bytes() const { return bytes_; }
  std::vector<wire::OutgoingPayload> Release() { return std::move(payloads_); }

 private:
  uint32_t PayloadOf(const HostTensor& tensor) {
    for (size_t i = 0; i < payloads_.size(); ++i) {
      if (payloads_[i].bytes.data() == tensor.bytes.data() &&
          payloads_[i].bytes.size() == tensor.bytes.size()) {
        return static_cast<uint32_t>(i);
      }
    }
    payloads_.push_back({tensor.bytes, tensor.owner});
    bytes_ += tensor.bytes.size();
    return static_cast<uint32_t>(payloads_.size() - 1);
  }

  absl::Status status_;
  std::vector<wire::OutgoingPayload> payloads_;
  uint64_t bytes_ = 0;
};

// The tensors that both passes have. Tensor fields of the header that have no tensor here are
// cleared: what they say could only be stale.
template <typename Header>
void PackInputs(const AttentionInputs& inputs, Packer& packer, Header* header) {
  packer.AddRequired("q", inputs.q, header->mutable_q());
  packer.AddRequired("k", inputs.k, header->mutable_k());
  packer.AddRequired("v", inputs.v, header->mutable_v());
  if (header->has_options()) {
    v1::AttentionOptions* options = header->mutable_options();
    options->clear_alibi_slopes();
    options->clear_bias();
    options->clear_sinks();
    if (options->has_block_mask()) options->mutable_block_mask()->clear_mask();
  }
  if (!inputs.alibi_slopes.empty()) {
    packer.Add("options.alibi_slopes", inputs.alibi_slopes,
               header->mutable_options()->mutable_alibi_slopes());
  }
  if (!inputs.bias.empty()) {
    packer.Add("options.bias", inputs.bias, header->mutable_options()->mutable_bias());
  }
  if (!inputs.sinks.empty()) {
    packer.Add("options.sinks", inputs.sinks, header->mutable_options()->mutable_sinks());
  }
  if (!inputs.block_mask.empty()) {
    packer.Add("options.block_mask.mask", inputs.block_mask,
               header->mutable_options()->mutable_block_mask()->mutable_mask());
  }
}

void Expect(const char* name, v1::DType dtype, std::vector<int64_t> shape, ReplySpec* reply) {
  const int64_t bytes = DenseBytes(dtype, shape);
  if (bytes < 0) {
    reply->answerable.Update(absl::InternalError(
        absl::StrCat("no valid ", name, " exists for this request: ", Describe(dtype, shape))));
    return;
  }
  reply->bytes += bytes;
  reply->tensors.push_back({name, dtype, std::move(shape), static_cast<uint64_t>(bytes)});
}

template <typename Header>
v1::DType OutDtype(const Header& header) {
  const v1::DType dtype = header.options().out_dtype();
  return dtype == v1::DTYPE_UNSPECIFIED ? header.q().dtype() : dtype;
}

template <typename Header>
bool HasRanks(const Header& header, ReplySpec* reply) {
  const v1::Layout layout = header.shape().layout();
  const int rank = layout == v1::LAYOUT_BSHD ? 4 : layout == v1::LAYOUT_THD ? 3 : 0;
  if (rank != 0 && header.q().shape_size() == rank && header.k().shape_size() == rank &&
      header.v().shape_size() == rank) {
    return true;
  }
  reply->answerable = absl::InternalError(absl::StrCat(
      "q, k and v of rank ", header.q().shape_size(), ", ", header.k().shape_size(), " and ",
      header.v().shape_size(), " have no result in ", v1::Layout_Name(layout)));
  return false;
}

}  // namespace

absl::StatusOr<Exchange<v1::ForwardRequestHeader>> PrepareForward(const ForwardCall& call) {
  Exchange<v1::ForwardRequestHeader> out;
  out.header = call.header;
  Packer packer;
  PackInputs(call.inputs, packer, &out.header);
  if (!packer.status().ok()) return packer.status();
  out.payload_bytes = packer.bytes();
  out.payloads = packer.Release();

  out.reply.pass = v1::PASS_FORWARD;
  if (!HasRanks(out.header, &out.reply)) return out;
  const std::vector<int64_t>& q = call.inputs.q.shape;
  std::vector<int64_t> shape = q;
  shape.back() = call.inputs.v.shape.back();
  Expect("out", OutDtype(out.header), std::move(shape), &out.reply);
  if (q.size() == 4) {
    Expect("lse", v1::DTYPE_FP32, {q[0], q[2], q[1]}, &out.reply);
  } else {
    Expect("lse", v1::DTYPE_FP32, {q[1], q[0]}, &out.reply);
  }
  return out;
}

absl::StatusOr<Exchange<v1::BackwardRequestHeader>> PrepareBackward(const BackwardCall& call) {
  Exchange<v1::BackwardRequestHeader> out;
  out.header = call.header;
  Packer packer;
  PackInputs(call.inputs, packer, &out.header);
  packer.AddRequired("out", call.out, out.header.mutable_out());
  packer.AddRequired("lse", call.lse, out.header.mutable_lse());
  packer.AddRequired("dout", call.dout, out.header.mutable_dout());
  out.header.clear_dlse();
  if (!call.dlse.empty()) packer.Add("dlse", call.dlse, out.header.mutable_dlse());
  if (!packer.status().ok()) return packer.status();
  out.payload_bytes = packer.bytes();
  out.payloads = packer.Release();

  out.reply.pass = v1::PASS_BACKWARD;
  if (!HasRanks(out.header, &out.reply)) return out;
  const AttentionInputs& in = call.inputs;
  const v1::DType dtype = OutDtype(out.header);
  Expect("dq", dtype, in.q.shape, &out.reply);
  Expect("dk", dtype, in.k.shape, &out.reply);
  Expect("dv", dtype, in.v.shape, &out.reply);
  if (!in.bias.empty()) Expect("dbias", v1::DTYPE_FP32, in.bias.shape, &out.reply);
  if (!in.sinks.empty()) Expect("dsink", v1::DTYPE_FP32, in.sinks.shape, &out.reply);
  return out;
}

}  // namespace attn::client
