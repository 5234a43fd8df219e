#include "client/load/verify.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/api/problem.h"
#include "kernels/api/text.h"
#include "tests/reference/compare.h"

namespace attn::load {
namespace {

using client::HostTensor;

// What may wait to be compared. Comparing is faster than receiving, so this fills only where the
// machine is busy with something else.
constexpr size_t kMaxQueueBytes = 256 << 20;
constexpr size_t kMaxFaults = 5;

DType ToDType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP16:
      return DType::kFp16;
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_UINT8:
      return DType::kUint8;
    default:
      return DType::kFp32;
  }
}

TensorSpec ToSpec(const HostTensor& tensor) {
  return {.dtype = ToDType(tensor.dtype), .shape = tensor.shape, .strides = {}};
}

std::optional<TensorSpec> ToOptional(const HostTensor& tensor) {
  if (tensor.empty()) return std::nullopt;
  return ToSpec(tensor);
}

template <typename Repeated>
std::vector<int64_t> ToVector(const Repeated& values) {
  return {values.begin(), values.end()};
}

void SetOptions(const v1::AttentionOptions& options, const client::AttentionInputs& in,
                AttentionSpec* spec) {
  if (options.has_softmax_scale()) spec->softmax_scale = options.softmax_scale();
  spec->causal = options.causal();
  spec->alignment =
      options.alignment() == v1::ALIGNMENT_TOP_LEFT ? Alignment::kTopLeft : Alignment::kBottomRight;
  if (options.has_window_left()) spec->window_left = options.window_left();
  if (options.has_window_right()) spec->window_right = options.window_right();
  spec->seqlens_q = ToVector(options.seqlens_q());
  spec->seqlens_k = ToVector(options.seqlens_k());
  if (options.has_softcap()) spec->softcap = options.softcap();
  spec->alibi_slopes = ToOptional(in.alibi_slopes);
  spec->bias = ToOptional(in.bias);
  spec->sinks = ToOptional(in.sinks);
  if (options.has_dropout()) {
    spec->dropout =
        DropoutSpec{options.dropout().p(), options.dropout().seed(), options.dropout().offset()};
  }
  if (!in.block_mask.empty()) {
    BlockMaskSpec mask;
    mask.mask = ToSpec(in.block_mask);
    if (options.block_mask().block_q() > 0) mask.block_q = options.block_mask().block_q();
    if (options.block_mask().block_k() > 0) mask.block_k = options.block_mask().block_k();
    spec->block_mask = std::move(mask);
  }
  spec->deterministic = options.deterministic();
  if (options.out_dtype() != v1::DTYPE_UNSPECIFIED) spec->out_dtype = ToDType(options.out_dtype());
}

const client::AttentionInputs& InputsOf(const MixEntry& entry) {
  return entry.pass == v1::PASS_BACKWARD ? entry.backward.inputs : entry.forward.inputs;
}

reference::Data DataOf(const MixEntry& entry) {
  const client::AttentionInputs& in = InputsOf(entry);
  reference::Data data;
  data.q = in.q.bytes.data();
  data.k = in.k.bytes.data();
  data.v = in.v.bytes.data();
  data.alibi_slopes = reinterpret_cast<const float*>(in.alibi_slopes.bytes.data());
  data.bias = in.bias.bytes.data();
  data.sinks = reinterpret_cast<const float*>(in.sinks.bytes.data());
  data.block_mask = reinterpret_cast<const uint8_t*>(in.block_mask.bytes.data());
  if (entry.pass == v1::PASS_BACKWARD) {
    data.dout = entry.backward.dout.bytes.data();
    if (!entry.backward.dlse.empty()) {
      data.dlse = reinterpret_cast<const float*>(entry.backward.dlse.bytes.data());
    }
  }
  return data;
}

}  // namespace

absl::StatusOr<AttentionSpec> SpecOf(const MixEntry& entry) {
  const bool backward = entry.pass == v1::PASS_BACKWARD;
  const v1::AttentionShape& shape =
      backward ? entry.backward.header.shape() : entry.forward.header.shape();
  const client::AttentionInputs& in = InputsOf(entry);
  AttentionSpec spec;
  spec.layout = shape.layout() == v1::LAYOUT_THD ? Layout::kThd : Layout::kBshd;
  spec.num_heads = shape.num_heads();
  spec.num_kv_heads = shape.num_kv_heads();
  spec.cu_seqlens_q = ToVector(shape.cu_seqlens_q());
  spec.cu_seqlens_k = ToVector(shape.cu_seqlens_k());
  spec.q = ToSpec(in.q);
  spec.k = ToSpec(in.k);
  spec.v = ToSpec(in.v);
  SetOptions(backward ? entry.backward.header.options() : entry.forward.header.options(), in,
             &spec);
  if (backward) {
    spec.out = ToOptional(entry.backward.out);
    spec.lse = ToOptional(entry.backward.lse);
    spec.dout = ToOptional(entry.backward.dout);
    spec.dlse = ToOptional(entry.backward.dlse);
  }
  // The reference takes valid calls only.
  const auto problem = Validate(spec, backward ? Pass::kBackward : Pass::kForward);
  if (!problem.ok()) {
    return absl::Status(problem.status().code(),
                        Cat("entry '", entry.name, "': ", std::string(problem.status().message())));
  }
  return spec;
}

absl::StatusOr<std::unique_ptr<Verifier>> Verifier::Create(const std::vector<MixEntry>& entries) {
  std::unique_ptr<Verifier> verifier(new Verifier());
  for (const MixEntry& entry : entries) {
    const bool backward = entry.pass == v1::PASS_BACKWARD;
    absl::StatusOr<AttentionSpec> spec = SpecOf(entry);
    if (!spec.ok()) return spec.status();
    reference::Result want =
        reference::Compute(*spec, DataOf(entry), {.backward = backward, .threads = 0});
    Expected expected;
    expected.entry = entry.name;
    if (backward) {
      expected.tensors.emplace_back("dq", std::move(want.dq));
      expected.tensors.emplace_back("dk", std::move(want.dk));
      expected.tensors.emplace_back("dv", std::move(want.dv));
      if (spec->bias) expected.tensors.emplace_back("dbias", std::move(want.dbias));
      if (spec->sinks) expected.tensors.emplace_back("dsink", std::move(want.dsink));
    } else {
      expected.tensors.emplace_back("out", std::move(want.out));
      expected.tensors.emplace_back("lse", std::move(want.lse));
    }
    verifier->expected_.push_back(std::move(expected));
  }
  verifier->thread_ = std::thread([raw = verifier.get()] { raw->Run(); });
  return verifier;
}

Verifier::~Verifier() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void Verifier::Offer(uint32_t entry, std::vector<HostTensor> results, const std::string& trace_id) {
  {
    size_t bytes = 0;
    for (const HostTensor& tensor : results) bytes += tensor.bytes.size();
    MutexLock lock(mutex_);
    // One reply may always wait, however large it is.
    if (!queue_.empty() && queue_bytes_ + bytes > kMaxQueueBytes) {
      ++result_.skipped;
      return;
    }
    queue_bytes_ += bytes;
    queue_.push_back({entry, std::move(results), trace_id, bytes});
  }
  changed_.NotifyAll();
}

Verification Verifier::Result() {
  MutexLock lock(mutex_);
  while (busy_ || !queue_.empty()) changed_.Wait(mutex_);
  return result_;
}

void Verifier::Run() {
  Verification result;  // `skipped` is counted by Offer()
  for (;;) {
    Item item;
    {
      MutexLock lock(mutex_);
      while (!stop_ && queue_.empty()) changed_.Wait(mutex_);
      if (stop_) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      queue_bytes_ -= item.bytes;
      busy_ = true;
    }
    Check(item, &result);
    {
      MutexLock lock(mutex_);
      result.skipped = result_.skipped;
      result_ = result;
      busy_ = false;
    }
    changed_.NotifyAll();
  }
}

void Verifier::Check(const Item& item, Verification* result) const {
  const Expected& expected = expected_[item.entry];
  ++result->replies;
  bool right = true;
  const auto fault = [&](const std::string& what) {
    right = false;
    if (result->faults.size() >= kMaxFaults) return;
    result->faults.push_back(Cat(expected.entry, ", trace ", item.trace_id, ": ", what));
  };
  if (item.results.size() != expected.tensors.size()) {
    fault(Cat(item.results.size(), " tensors, want ", expected.tensors.size()));
  }
  for (size_t i = 0; i < std::min(item.results.size(), expected.tensors.size()); ++i) {
    const auto& [name, want] = expected.tensors[i];
    const HostTensor& got = item.results[i];
    if (got.NumElements() != static_cast<int64_t>(want.value.size())) {
      fault(Cat(name, " has ", got.NumElements(), " elements, want ", want.value.size()));
      continue;
    }
    const reference::Verdict verdict =
        reference::Compare(want, got.bytes.data(), ToDType(got.dtype));
    double& worst = result->worst_ratio[name];
    worst = std::max(worst, verdict.ratio);
    if (!verdict.ok()) fault(Cat(name, " ", verdict.ToString()));
  }
  if (!right) ++result->wrong;
}

}  // namespace attn::load
