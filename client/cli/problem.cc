#include "client/cli/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "client/cli/random_tensor.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

using client::HostTensor;
namespace v1 = client::v1;

absl::Status Usage(const std::string& what) { return absl::InvalidArgumentError(what); }

// A tensor whose bytes nobody will read.
HostTensor ShapeOnly(v1::DType dtype, std::vector<int64_t> shape) {
  return {.dtype = dtype, .shape = std::move(shape), .owner = nullptr, .bytes = {}};
}

// "cu_seqlens_q" as its flag spells it.
std::string FlagName(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

bool LooksLikeFile(std::string_view text) {
  return Contains(text, ".npy") || Contains(text, ".safetensors");
}

class Builder {
 public:
  Builder(const ProblemFlags& flags, Purpose purpose) : flags_(flags), purpose_(purpose) {}

  absl::StatusOr<Problem> Build() {
    for (const auto step :
         {&Builder::ReadDTypes, &Builder::OpenInput, &Builder::Lengths, &Builder::MainTensors,
          &Builder::Shape, &Builder::Options, &Builder::OptionTensors, &Builder::BackwardTensors}) {
      if (absl::Status status = (this->*step)(); !status.ok()) return status;
    }
    return std::move(problem_);
  }

 private:
  bool planning() const {
    return purpose_ == Purpose::kPlanForward || purpose_ == Purpose::kPlanBackward;
  }
  bool backward() const {
    return purpose_ == Purpose::kBackward || purpose_ == Purpose::kPlanBackward;
  }
  bool thd() const { return problem_.header.shape().layout() == v1::LAYOUT_THD; }

  absl::Status ReadDTypes() {
    if (!flags_.dtype.empty()) {
      dtype_ = DTypeFromFlag(flags_.dtype);
      if (!dtype_) {
        return Usage(Cat("--dtype ", flags_.dtype, ": must be fp32, fp16 or bf16"));
      }
    }
    if (!flags_.out_dtype.empty()) {
      const std::optional<v1::DType> out_dtype = DTypeFromFlag(flags_.out_dtype);
      if (!out_dtype) {
        return Usage(Cat("--out-dtype ", flags_.out_dtype, ": must be fp32, fp16 or bf16"));
      }
      problem_.header.mutable_options()->set_out_dtype(*out_dtype);
    }
    return absl::OkStatus();
  }

  absl::Status OpenInput() {
    const bool some = !flags_.q.empty() || !flags_.k.empty() || !flags_.v.empty();
    if (flags_.random && (some || !flags_.input.empty())) {
      return Usage("--random makes q, k and v; it cannot be given with --input, --q, --k or --v");
    }
    if (some && flags_.input.empty() &&
        (flags_.q.empty() || flags_.k.empty() || flags_.v.empty())) {
      return Usage(Cat("--q, --k and --v go together; missing:", flags_.q.empty() ? " --q" : "",
                       flags_.k.empty() ? " --k" : "", flags_.v.empty() ? " --v" : ""));
    }
    made_up_ = !some && flags_.input.empty();
    if (made_up_ && !flags_.random && !planning()) {
      return Usage("no tensors: give --input FILE, or --q, --k and --v, or --random");
    }
    if (!flags_.input.empty()) {
      absl::StatusOr<TensorMap> tensors = OpenTensors(flags_.input);
      if (!tensors.ok()) return tensors.status();
      if (tensors->contains("")) {
        return Usage(
            Cat("--input ", flags_.input, ": a .npy file holds one tensor; give --q, --k and --v"));
      }
      input_ = *std::move(tensors);
    }
    return absl::OkStatus();
  }

  // The tensor that `argument` names, or the one called `name` in --input; nullopt: neither.
  absl::StatusOr<std::optional<FileTensor>> Open(const std::string& argument,
                                                 const std::string& name) {
    if (!argument.empty()) {
      absl::StatusOr<FileTensor> tensor = OpenTensor(argument, name);
      if (!tensor.ok()) return tensor.status();
      return *std::move(tensor);
    }
    const auto found = input_.find(flags_.prefix + name);
    if (found == input_.end()) return std::nullopt;
    return found->second;
  }

  // Fills a list of lengths from "0,5,9", from a file, or from --input.
  absl::Status Integers(const std::string& argument, const std::string& name,
                        google::protobuf::RepeatedField<int64_t>* target) {
    if (!argument.empty() && !LooksLikeFile(argument)) {
      for (const std::string& item : Split(argument, ',')) {
        int64_t value = 0;
        if (!ParseInteger(item, &value)) {
          return Usage(Cat("--", FlagName(name), " ", argument, ": '", item,
                           "' is neither an integer nor a file"));
        }
        target->Add(value);
      }
      return absl::OkStatus();
    }
    absl::StatusOr<std::optional<FileTensor>> tensor = Open(argument, name);
    if (!tensor.ok()) return tensor.status();
    if (!*tensor) return absl::OkStatus();
    absl::StatusOr<std::vector<int64_t>> values = ToIntegers(**tensor, name);
    if (!values.ok()) return values.status();
    target->Add(values->begin(), values->end());
    return absl::OkStatus();
  }

  absl::Status Lengths() {
    v1::AttentionShape* shape = problem_.header.mutable_shape();
    v1::AttentionOptions* options = problem_.header.mutable_options();
    for (const auto& [argument, name, target] :
         {std::tuple(&flags_.cu_seqlens_q, "cu_seqlens_q", shape->mutable_cu_seqlens_q()),
          std::tuple(&flags_.cu_seqlens_k, "cu_seqlens_k", shape->mutable_cu_seqlens_k()),
          std::tuple(&flags_.seqlens_q, "seqlens_q", options->mutable_seqlens_q()),
          std::tuple(&flags_.seqlens_k, "seqlens_k", options->mutable_seqlens_k())}) {
      if (absl::Status status = Integers(*argument, name, target); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status MainTensors() { return made_up_ ? MakeMainTensors() : OpenMainTensors(); }

  absl::Status OpenMainTensors() {
    client::AttentionInputs& in = problem_.inputs;
    for (const auto& [argument, name, target] :
         {std::tuple(&flags_.q, "q", &in.q), std::tuple(&flags_.k, "k", &in.k),
          std::tuple(&flags_.v, "v", &in.v)}) {
      absl::StatusOr<std::optional<FileTensor>> tensor = Open(*argument, name);
      if (!tensor.ok()) return tensor.status();
      if (!*tensor) {
        return Usage(Cat(flags_.input, ": has no tensor '", flags_.prefix, name, "'"));
      }
      absl::StatusOr<HostTensor> host = ToHostTensor(**tensor, name, dtype_);
      if (!host.ok()) return host.status();
      *target = *std::move(host);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<HostTensor> Make(v1::DType dtype, std::vector<int64_t> shape,
                                  RandomStream stream) {
    if (planning() && stream != RandomStream::kBlockMask) {
      absl::StatusOr<int64_t> size = CheckedByteSize(shape, client::SizeOf(dtype));
      if (!size.ok()) return size.status();
      return ShapeOnly(dtype, std::move(shape));
    }
    return RandomTensor(dtype, std::move(shape), flags_.seed, stream);
  }

  absl::Status MakeMainTensors() {
    v1::AttentionShape* shape = problem_.header.mutable_shape();
    const bool packed =
        Lower(flags_.layout) == "thd" || (flags_.layout.empty() && shape->cu_seqlens_q_size() > 0);
    const int64_t batch = flags_.batch.value_or(1);
    const int64_t seqlen_q = flags_.seqlen_q.value_or(1024);
    const int64_t seqlen_k = flags_.seqlen_k.value_or(seqlen_q);
    const int64_t heads = flags_.num_heads.value_or(8);
    const int64_t kv_heads = flags_.num_kv_heads.value_or(heads);
    const int64_t dim = flags_.head_dim.value_or(64);
    const int64_t dim_v = flags_.head_dim_v.value_or(dim);
    for (const auto& [name, value] :
         {std::pair("--batch", batch), std::pair("--seqlen-q", seqlen_q),
          std::pair("--seqlen-k", seqlen_k), std::pair("--num-heads", heads),
          std::pair("--num-kv-heads", kv_heads), std::pair("--head-dim", dim),
          std::pair("--head-dim-v", dim_v)}) {
      if (value < 0 || value > int64_t{1} << 40) {
        return Usage(Cat(name, " ", value, ": must be within 0 and 2^40"));
      }
    }
    std::vector<int64_t> q = {batch, seqlen_q, heads, dim};
    std::vector<int64_t> k = {batch, seqlen_k, kv_heads, dim};
    if (packed) {
      if (absl::Status status = Pack(batch, seqlen_q, shape->mutable_cu_seqlens_q());
          !status.ok()) {
        return status;
      }
      if (shape->cu_seqlens_k_size() == 0 && !flags_.seqlen_k && !flags_.cu_seqlens_q.empty()) {
        *shape->mutable_cu_seqlens_k() = shape->cu_seqlens_q();
      }
      if (absl::Status status = Pack(batch, seqlen_k, shape->mutable_cu_seqlens_k());
          !status.ok()) {
        return status;
      }
      q = {*shape->cu_seqlens_q().rbegin(), heads, dim};
      k = {*shape->cu_seqlens_k().rbegin(), kv_heads, dim};
    }
    std::vector<int64_t> v = k;
    v.back() = dim_v;
    const v1::DType dtype = dtype_.value_or(v1::DTYPE_FP32);
    for (auto [shape_of, stream, target] : {std::tuple(&q, RandomStream::kQ, &problem_.inputs.q),
                                            std::tuple(&k, RandomStream::kK, &problem_.inputs.k),
                                            std::tuple(&v, RandomStream::kV, &problem_.inputs.v)}) {
      absl::StatusOr<HostTensor> made = Make(dtype, *shape_of, stream);
      if (!made.ok()) return made.status();
      *target = *std::move(made);
    }
    return absl::OkStatus();
  }

  // Starts of `batch` sequences of equal length, where none are given.
  absl::Status Pack(int64_t batch, int64_t seqlen, google::protobuf::RepeatedField<int64_t>* cu) {
    if (cu->size() > 0) return absl::OkStatus();
    // Beyond this the header could not carry the starts.
    if (batch > 16384) return Usage(Cat("--batch ", batch, ": at most 16384 with THD"));
    if (absl::StatusOr<int64_t> total = CheckedByteSize(std::vector{batch, seqlen}, 1);
        !total.ok()) {
      return total.status();
    }
    for (int64_t b = 0; b <= batch; ++b) cu->Add(b * seqlen);
    return absl::OkStatus();
  }

  absl::Status Shape() {
    v1::AttentionShape* shape = problem_.header.mutable_shape();
    const size_t rank = problem_.inputs.q.shape.size();
    v1::Layout layout = rank == 4   ? v1::LAYOUT_BSHD
                        : rank == 3 ? v1::LAYOUT_THD
                                    : v1::LAYOUT_UNSPECIFIED;
    if (!flags_.layout.empty()) {
      layout = Lower(flags_.layout) == "thd" ? v1::LAYOUT_THD : v1::LAYOUT_BSHD;
    }
    if ((layout == v1::LAYOUT_BSHD && rank != 4) || (layout == v1::LAYOUT_THD && rank != 3) ||
        layout == v1::LAYOUT_UNSPECIFIED) {
      return Usage(Cat("q has shape ", ShapeString(problem_.inputs.q.shape),
                       "; BSHD is [batch, seqlen, num_heads, head_dim], THD is "
                       "[total_tokens, num_heads, head_dim]"));
    }
    shape->set_layout(layout);
    if (thd() && (shape->cu_seqlens_q_size() == 0 || shape->cu_seqlens_k_size() == 0)) {
      return Usage(
          "THD needs --cu-seqlens-q and --cu-seqlens-k (or tensors of that name in --input)");
    }
    if (problem_.inputs.k.shape.size() != rank) {
      return Usage(
          Cat("k has shape ", ShapeString(problem_.inputs.k.shape), ", but q has ", rank, " axes"));
    }
    shape->set_num_heads(problem_.inputs.q.shape[rank - 2]);
    shape->set_num_kv_heads(problem_.inputs.k.shape[rank - 2]);
    // With files the numbers of heads may be stated too: two axes of a file are easily swapped.
    if (!made_up_) {
      if (flags_.num_heads) shape->set_num_heads(*flags_.num_heads);
      if (flags_.num_kv_heads) shape->set_num_kv_heads(*flags_.num_kv_heads);
    }
    return absl::OkStatus();
  }

  absl::Status Options() {
    v1::AttentionOptions* options = problem_.header.mutable_options();
    if (flags_.softmax_scale) options->set_softmax_scale(*flags_.softmax_scale);
    options->set_causal(flags_.causal);
    options->set_alignment(flags_.alignment == "top-left" ? v1::ALIGNMENT_TOP_LEFT
                                                          : v1::ALIGNMENT_BOTTOM_RIGHT);
    if (flags_.window_left) options->set_window_left(*flags_.window_left);
    if (flags_.window_right) options->set_window_right(*flags_.window_right);
    if (flags_.softcap) options->set_softcap(*flags_.softcap);
    if (flags_.dropout_p.has_value() != flags_.dropout_seed.has_value()) {
      return Usage("--dropout-p and --dropout-seed go together");
    }
    if (flags_.dropout_p) {
      options->mutable_dropout()->set_p(*flags_.dropout_p);
      options->mutable_dropout()->set_seed(*flags_.dropout_seed);
      options->mutable_dropout()->set_offset(flags_.dropout_offset);
    }
    options->set_deterministic(flags_.deterministic);

    v1::PathPolicy* policy = problem_.header.mutable_path_policy();
    if (flags_.policy == "auto") {
      policy->set_mode(v1::PATH_POLICY_AUTO);
    } else if (flags_.policy == "require-flash") {
      policy->set_mode(v1::PATH_POLICY_REQUIRE_FLASH);
    } else if (flags_.policy == "force-standard") {
      policy->set_mode(v1::PATH_POLICY_FORCE_STANDARD);
    } else {
      policy->set_mode(v1::PATH_POLICY_NAMED);
      policy->set_path(flags_.policy);
    }
    problem_.header.set_report_level(flags_.report_level == "full" ? v1::REPORT_LEVEL_FULL
                                                                   : v1::REPORT_LEVEL_BASIC);
    return absl::OkStatus();
  }

  // One tensor beside q, k and v: from a file, or made where `argument` is "random".
  absl::Status Extra(const std::string& argument, const std::string& name, RandomStream stream,
                     v1::DType made_dtype, std::vector<int64_t> made_shape, HostTensor* target) {
    if (argument == "random") {
      absl::StatusOr<HostTensor> made = Make(made_dtype, std::move(made_shape), stream);
      if (!made.ok()) return made.status();
      *target = *std::move(made);
      return absl::OkStatus();
    }
    absl::StatusOr<std::optional<FileTensor>> tensor = Open(argument, name);
    if (!tensor.ok()) return tensor.status();
    if (!*tensor) return absl::OkStatus();
    std::optional<v1::DType> wanted;
    if (name == "block_mask") {
      wanted = v1::DTYPE_UINT8;
    } else if (name == "dout" && dtype_) {
      wanted = dtype_;
    } else if ((*tensor)->dtype == FileDType::kF64 && dtype_) {
      wanted = v1::DTYPE_FP32;  // where --dtype allows F64 at all, these keep what FP32 holds
    } else if (name == "out" || name == "bias") {
      if (dtype_ == v1::DTYPE_BF16 && SizeOf((*tensor)->dtype) == 2 &&
          (*tensor)->dtype != FileDType::kF16) {
        wanted = dtype_;
      }
    }
    absl::StatusOr<HostTensor> host = ToHostTensor(**tensor, name, wanted);
    if (!host.ok()) return host.status();
    *target = *std::move(host);
    return absl::OkStatus();
  }

  // [batch, num_heads, seqlen_q] or [num_heads, total_q].
  std::vector<int64_t> LseShape() const {
    const std::vector<int64_t>& q = problem_.inputs.q.shape;
    return thd() ? std::vector<int64_t>{q[1], q[0]} : std::vector<int64_t>{q[0], q[2], q[1]};
  }

  absl::Status OptionTensors() {
    client::AttentionInputs& in = problem_.inputs;
    const int64_t heads = problem_.header.shape().num_heads();
    const Extent extent = LargestSequence(problem_);
    const auto blocks = [](int64_t tokens, int64_t block) {
      return block < 1 ? int64_t{0} : (tokens + block - 1) / block;
    };
    // A block mask of THD is sized by the longest q and the longest k, which may be of two
    // sequences.
    const auto [longest_q, longest_k] = Longest();
    const std::vector<int64_t> bias_shape =
        thd() ? std::vector<int64_t>{heads, in.q.shape[0], longest_k}
              : std::vector<int64_t>{1, heads, extent.queries, extent.keys};
    const std::vector<int64_t> mask_shape = {1, heads,
                                             blocks(longest_q, flags_.block_q.value_or(128)),
                                             blocks(longest_k, flags_.block_k.value_or(128))};
    absl::Status status =
        Extra(flags_.bias, "bias", RandomStream::kBias, v1::DTYPE_FP32, bias_shape, &in.bias);
    if (status.ok() && flags_.alibi_slopes == "standard") {
      StandardSlopes(heads);
    } else if (status.ok()) {
      status = Extra(flags_.alibi_slopes, "alibi_slopes", RandomStream::kAlibi, v1::DTYPE_FP32,
                     {heads}, &in.alibi_slopes);
    }
    if (status.ok()) {
      status =
          Extra(flags_.sinks, "sinks", RandomStream::kSinks, v1::DTYPE_FP32, {heads}, &in.sinks);
    }
    if (status.ok()) {
      status = Extra(flags_.block_mask, "block_mask", RandomStream::kBlockMask, v1::DTYPE_UINT8,
                     mask_shape, &in.block_mask);
    }
    if (!status.ok()) return status;
    if ((flags_.block_q || flags_.block_k) && in.block_mask.empty()) {
      return Usage("--block-q and --block-k describe --block-mask, which is missing");
    }
    if (!in.block_mask.empty()) {
      v1::BlockMask* mask = problem_.header.mutable_options()->mutable_block_mask();
      if (flags_.block_q) mask->set_block_q(*flags_.block_q);
      if (flags_.block_k) mask->set_block_k(*flags_.block_k);
    }
    return absl::OkStatus();
  }

  // The geometric slopes of Press et al. 2022 for a power of two of heads: 2^(-8(h+1)/H).
  void StandardSlopes(int64_t heads) {
    if (planning()) {
      problem_.inputs.alibi_slopes = ShapeOnly(v1::DTYPE_FP32, {heads});
      return;
    }
    problem_.inputs.alibi_slopes = HostTensor::Allocate(v1::DTYPE_FP32, {heads});
    std::byte* bytes = problem_.inputs.alibi_slopes.mutable_bytes().data();
    for (int64_t h = 0; h < heads; ++h) {
      const float slope = std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(heads));
      std::memcpy(bytes + h * 4, &slope, 4);
    }
  }

  std::pair<int64_t, int64_t> Longest() const {
    if (!thd()) return {problem_.inputs.q.shape[1], problem_.inputs.k.shape[1]};
    const auto longest = [](const google::protobuf::RepeatedField<int64_t>& cu) {
      int64_t most = 0;
      for (int i = 1; i < cu.size(); ++i) most = std::max(most, cu[i] - cu[i - 1]);
      return most;
    };
    return {longest(problem_.header.shape().cu_seqlens_q()),
            longest(problem_.header.shape().cu_seqlens_k())};
  }

  absl::Status BackwardTensors() {
    if (!backward()) return absl::OkStatus();
    client::AttentionInputs& in = problem_.inputs;
    std::vector<int64_t> out_shape = in.q.shape;
    out_shape.back() = in.v.shape.empty() ? 0 : in.v.shape.back();
    if (flags_.dout == "ones") {
      problem_.dout = Ones(out_shape);
    } else {
      const std::string dout = flags_.dout.empty() && made_up_ ? "random" : flags_.dout;
      absl::Status status =
          Extra(dout, "dout", RandomStream::kDout, in.q.dtype, out_shape, &problem_.dout);
      if (!status.ok()) return status;
    }
    absl::Status status =
        Extra(flags_.dlse, "dlse", RandomStream::kDlse, v1::DTYPE_FP32, LseShape(), &problem_.dlse);
    if (status.ok()) {
      status = Extra(flags_.out, "out", RandomStream::kDout, in.q.dtype, {}, &problem_.out);
    }
    if (status.ok()) {
      status = Extra(flags_.lse, "lse", RandomStream::kDlse, v1::DTYPE_FP32, {}, &problem_.lse);
    }
    if (!status.ok()) return status;
    if (problem_.dout.empty() && !planning()) {
      return Usage(
          "backward needs dout: --dout FILE, 'dout' in --input, --dout random or --dout ones");
    }
    if (problem_.out.empty() != problem_.lse.empty()) {
      return Usage(Cat("out and lse go together; ", problem_.out.empty() ? "out" : "lse",
                       " is missing (without both, forward runs first)"));
    }
    return absl::OkStatus();
  }

  HostTensor Ones(std::vector<int64_t> shape) const {
    if (planning()) return ShapeOnly(problem_.inputs.q.dtype, std::move(shape));
    HostTensor ones = HostTensor::Allocate(problem_.inputs.q.dtype, std::move(shape));
    const std::span<std::byte> bytes = ones.mutable_bytes();
    const uint32_t bits = ones.dtype == v1::DTYPE_FP32   ? 0x3F800000u
                          : ones.dtype == v1::DTYPE_BF16 ? 0x3F80u
                                                         : 0x3C00u;
    const size_t size = client::SizeOf(ones.dtype);
    for (size_t at = 0; at + size <= bytes.size(); at += size) {
      std::memcpy(&bytes[at], &bits, size);
    }
    return ones;
  }

  const ProblemFlags& flags_;
  const Purpose purpose_;
  std::optional<v1::DType> dtype_;
  TensorMap input_;
  bool made_up_ = false;
  Problem problem_;
};

}  // namespace

absl::StatusOr<Problem> MakeProblem(const ProblemFlags& flags, Purpose purpose) {
  return Builder(flags, purpose).Build();
}

}  // namespace attn::cli
