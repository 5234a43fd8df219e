// A request header's life before anything runs: parse, Convert, Validate, LocatePayloads, the
// traffic model, SelectPath with the real CPU backends. Whatever the header: no crash, no hang, no
// large allocation, and errors of the documented codes only. First byte: pass and purpose, and
// whether the rest is a serialized header or choices from which a nearly valid one is made.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/v1/attention.pb.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "kernels/api/traffic.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "server/rpc/convert.h"
#include "tests/fuzz/fuzz_support.h"

namespace attn {
namespace {

namespace v1 = ::attention::v1;
using fuzz::Require;

// Small fields from the input; zeros when it is used up.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Byte() { return at_ < size_ ? data_[at_++] : 0; }
  bool OneIn(int n) { return Byte() % n == 1 % n; }
  // Mostly small, at times an extreme.
  int64_t Extent() {
    static constexpr int64_t kExtremes[] = {-1,
                                            0,
                                            512,
                                            513,
                                            65'536,
                                            (int64_t{1} << 31) - 1,
                                            int64_t{1} << 31,
                                            int64_t{1} << 32,
                                            int64_t{1} << 40,
                                            int64_t{1} << 59,
                                            int64_t{1} << 62,
                                            INT64_MAX,
                                            INT64_MIN};
    const uint8_t byte = Byte();
    if (byte < 240) return byte % 40 + 1;
    return kExtremes[Byte() % std::size(kExtremes)];
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

void Fill(Choices& choices, v1::DType dtype, const std::vector<int64_t>& shape, uint32_t payload,
          v1::Tensor* tensor) {
  tensor->set_dtype(choices.OneIn(40) ? static_cast<v1::DType>(choices.Byte() % 6) : dtype);
  for (const int64_t extent : shape) {
    tensor->add_shape(choices.OneIn(40) ? choices.Extent() : extent);
  }
  tensor->set_payload(choices.OneIn(40) ? choices.Byte() : payload);
  if (choices.OneIn(20)) tensor->set_offset_bytes(choices.Extent());
  if (choices.OneIn(10)) {
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      tensor->add_strides(axis + 1 == shape.size() ? 1 : choices.Extent());
    }
  }
}

void FillOptions(Choices& choices, int64_t batch, int64_t heads, int64_t sq, int64_t sk,
                 v1::AttentionOptions* options) {
  if (choices.OneIn(4)) options->set_causal(true);
  if (choices.OneIn(4)) options->set_alignment(static_cast<v1::Alignment>(choices.Byte() % 4));
  if (choices.OneIn(4)) options->set_window_left(choices.Extent());
  if (choices.OneIn(4)) options->set_window_right(choices.Extent());
  if (choices.OneIn(6)) options->set_softcap(0.5f * static_cast<float>(choices.Extent()));
  if (choices.OneIn(6)) options->set_softmax_scale(static_cast<float>(choices.Extent()));
  if (choices.OneIn(4) && batch > 0 && batch < 64) {
    for (int64_t b = 0; b < batch; ++b) options->add_seqlens_k(choices.OneIn(4) ? 0 : sk);
  }
  if (choices.OneIn(4) && batch > 0 && batch < 64) {
    for (int64_t b = 0; b < batch; ++b) options->add_seqlens_q(choices.OneIn(4) ? 1 : sq);
  }
  if (choices.OneIn(6)) {
    Fill(choices, v1::DTYPE_FP32, {heads}, 3, options->mutable_alibi_slopes());
  }
  if (choices.OneIn(6)) Fill(choices, v1::DTYPE_FP32, {heads}, 4, options->mutable_sinks());
  if (choices.OneIn(6)) {
    Fill(choices, v1::DTYPE_FP16, {1, heads, sq, sk}, 5, options->mutable_bias());
  }
  if (choices.OneIn(6)) {
    options->mutable_dropout()->set_p(static_cast<float>(choices.Byte()) / 200.0f);
    options->mutable_dropout()->set_seed(choices.Byte());
  }
  if (choices.OneIn(6)) {
    v1::BlockMask* mask = options->mutable_block_mask();
    const int64_t block = 16 << choices.Byte() % 5;
    const auto blocks = [&](int64_t n) { return n > 0 ? (n - 1) / block + 1 : 0; };
    mask->set_block_q(block);
    mask->set_block_k(choices.OneIn(20) ? choices.Extent() : block);
    Fill(choices, v1::DTYPE_UINT8, {1, 1, blocks(sq), blocks(sk)}, 6, mask->mutable_mask());
  }
  if (choices.OneIn(6)) options->set_out_dtype(static_cast<v1::DType>(choices.Byte() % 6));
}

v1::BackwardRequestHeader MakeHeader(Choices& choices, bool backward) {
  v1::BackwardRequestHeader header;
  const bool thd = choices.OneIn(3);
  const int64_t kv_heads = choices.Extent(), group = choices.Byte() % 4 + 1;
  const int64_t heads = kv_heads > 0 && kv_heads < 1'000'000 ? kv_heads * group : kv_heads;
  const int64_t batch = choices.Extent(), sq = choices.Extent(), sk = choices.Extent();
  const int64_t dim = choices.Extent(), dim_v = choices.OneIn(2) ? dim : choices.Extent();
  header.mutable_shape()->set_layout(thd ? v1::LAYOUT_THD : v1::LAYOUT_BSHD);
  header.mutable_shape()->set_num_heads(heads);
  header.mutable_shape()->set_num_kv_heads(kv_heads);
  if (thd) {
    for (const int64_t n : {int64_t{0}, sq / 2, sq}) header.mutable_shape()->add_cu_seqlens_q(n);
    for (const int64_t n : {int64_t{0}, sk / 3, sk}) header.mutable_shape()->add_cu_seqlens_k(n);
  }
  const auto shape = [&](int64_t tokens, int64_t h, int64_t d) {
    return thd ? std::vector{tokens, h, d} : std::vector{batch, tokens, h, d};
  };
  const auto dtype = static_cast<v1::DType>(choices.Byte() % 3 + 1);
  Fill(choices, dtype, shape(sq, heads, dim), 0, header.mutable_q());
  Fill(choices, dtype, shape(sk, kv_heads, dim), 1, header.mutable_k());
  Fill(choices, dtype, shape(sk, kv_heads, dim_v), 2, header.mutable_v());
  const std::vector<int64_t> lse = thd ? std::vector{heads, sq} : std::vector{batch, heads, sq};
  if (backward) {
    Fill(choices, dtype, shape(sq, heads, dim_v), 7, header.mutable_out());
    Fill(choices, v1::DTYPE_FP32, lse, 8, header.mutable_lse());
    Fill(choices, dtype, shape(sq, heads, dim_v), 9, header.mutable_dout());
    if (choices.OneIn(3)) Fill(choices, v1::DTYPE_FP32, lse, 10, header.mutable_dlse());
  }
  FillOptions(choices, batch, heads, sq, sk, header.mutable_options());
  header.mutable_path_policy()->set_mode(static_cast<v1::PathPolicyMode>(choices.Byte() % 6));
  if (choices.OneIn(5)) header.mutable_path_policy()->set_path("flash_cpu");
  return header;
}

bool IsDocumented(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

void Examine(const v1::BackwardRequestHeader& header, Pass pass, server::Purpose purpose) {
  static ThreadPool* const pool = new ThreadPool(1);
  static const std::unique_ptr<Backend> flash = MakeFlashCpuBackend(pool);
  static const std::unique_ptr<Backend> standard = MakeStandardCpuBackend(pool);
  static const std::vector<PathCandidate> candidates = {
      {PathId::kFlashSm90, nullptr, {{PathId::kFlashSm90, Reason::kNotBuilt, ""}}},
      {PathId::kFlashCpu, flash.get(), {}},
      {PathId::kStandardCpu, standard.get(), {}}};

  server::ConvertedHeader converted;
  if (const auto status = server::Convert(header, pass, purpose, &converted); !status.ok()) {
    Require(IsDocumented(status) ? "" : status.ToString());
    return;
  }
  const absl::StatusOr<AttentionProblem> problem = Validate(converted.spec, pass);
  if (!problem.ok()) {
    Require(IsDocumented(problem.status()) ? "" : problem.status().ToString());
    return;
  }
  if (purpose == server::Purpose::kRun) {
    std::vector<uint64_t> sizes;
    const absl::Status status = server::LocatePayloads(&converted, &sizes);
    Require(status.ok() || IsDocumented(status) ? "" : status.ToString());
    if (status.ok()) {
      Require(server::CheckPayloadSizes(converted, sizes).ok() ? "" : "own sizes are refused");
      for (uint64_t& size : sizes) size = size == 0 ? 0 : size - 1;
      const bool any = std::any_of(sizes.begin(), sizes.end(), [](uint64_t s) { return s > 0; });
      Require(!any || !server::CheckPayloadSizes(converted, sizes).ok() ? "" : "short payload");
    }
  }
  const uint64_t pairs = VisiblePairs(*problem);
  Require(pairs == 0 || Flops(*problem, pass) > 0 ? "" : "pairs without operations");
  Require(StandardBytes(*problem, pass, 4) >= CompulsoryBytes(*problem, pass) ? "" : "traffic");
  const PathChoice choice =
      SelectPath(*problem, pass, converted.policy, candidates, int64_t{1} << 32);
  if (choice.backend == nullptr) {
    Require(absl::IsFailedPrecondition(UnmetPolicyError(converted.policy, choice)) ? "" : "code");
    return;
  }
  Require(choice.backend->WorkspaceBytes(*problem, pass) >= 0 ? "" : "negative workspace");
  Require(choice.backend->KernelId(*problem, pass).empty() ? "no kernel id" : "");
  // The tile model walks tiles. The server asks for it only after it has held the call's bytes
  // against max_request_bytes; so does this.
  constexpr int64_t kMaxElements = int64_t{4} << 30;
  const AttentionProblem& p = *problem;
  for (const int64_t elements : {DqElements(p), DkElements(p), DvElements(p), OutElements(p)}) {
    if (elements > kMaxElements) return;
  }
  (void)choice.backend->Model(p, pass);
}

}  // namespace
}  // namespace attn

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it logs every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const attn::Pass pass = data[0] & 1 ? attn::Pass::kBackward : attn::Pass::kForward;
  const auto purpose = data[0] & 2 ? attn::server::Purpose::kPlan : attn::server::Purpose::kRun;
  attention::v1::BackwardRequestHeader header;
  if (data[0] & 4) {
    if (!header.ParseFromArray(data + 1, static_cast<int>(size) - 1)) return 0;
  } else {
    attn::Choices choices(data + 1, size - 1);
    header = attn::MakeHeader(choices, data[0] & 1);
  }
  attn::Examine(header, pass, purpose);
  return 0;
}
