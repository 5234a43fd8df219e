#include "server/rpc/status_plans.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/text.h"
#include "server/rpc/call_plan.h"

namespace attn::server {
namespace {

using Json = nlohmann::ordered_json;

struct Representative {
  const char* name;
  int64_t batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim;
  bool causal = false;
  bool bias_and_dropout = false;
};

// What serving and training stacks send, and what is known to be hard on fused kernels.
constexpr Representative kRepresentatives[] = {
    {"prefill", 1, 2048, 2048, 32, 8, 128, true},
    {"decode", 8, 1, 4096, 32, 8, 128, true},
    {"long context", 1, 32768, 32768, 32, 8, 128, true},
    {"encoder", 8, 512, 512, 12, 12, 64},
    {"bias and dropout", 2, 1024, 1024, 16, 16, 64, false, true},
    {"wide heads", 2, 1024, 1024, 8, 8, 320, true},
};
constexpr std::array kDTypes = {DType::kBf16, DType::kFp16, DType::kFp32};
constexpr std::array kPasses = {Pass::kForward, Pass::kBackward};

std::string Text(const Representative& r) {
  return Cat("batch ", r.batch, ", ", r.seqlen_q, " queries × ", r.seqlen_k, " keys, ", r.num_heads,
             " heads", r.num_kv_heads == r.num_heads ? "" : Cat(" over ", r.num_kv_heads),
             ", head_dim ", r.head_dim, r.causal ? ", causal" : "",
             r.bias_and_dropout ? ", additive bias, dropout 0.1" : "");
}

AttentionSpec SpecOf(const Representative& r, DType dtype) {
  AttentionSpec spec;
  spec.num_heads = r.num_heads;
  spec.num_kv_heads = r.num_kv_heads;
  spec.q = {dtype, {r.batch, r.seqlen_q, r.num_heads, r.head_dim}, {}};
  spec.k = spec.v = {dtype, {r.batch, r.seqlen_k, r.num_kv_heads, r.head_dim}, {}};
  spec.causal = r.causal;
  if (r.bias_and_dropout) {
    spec.bias = TensorSpec{dtype, {1, r.num_heads, r.seqlen_q, r.seqlen_k}, {}};
    spec.dropout = DropoutSpec{.p = 0.1f};
  }
  return spec;
}

// The kinds of device that this server has, the one that calls go to first.
std::vector<DeviceKind> Kinds(const ServiceContext& context) {
  std::vector<DeviceKind> kinds;
  if (context.paths->has_cuda()) kinds.push_back(DeviceKind::kCuda);
  kinds.push_back(DeviceKind::kCpu);
  return kinds;
}

class Board {
 public:
  explicit Board(const ServiceContext& context)
      : context_(context), candidates_(context.paths->candidates()) {}

  void Add(size_t shape, DType dtype, Pass pass) {
    const absl::StatusOr<AttentionProblem> problem =
        Validate(SpecOf(kRepresentatives[shape], dtype), pass);
    if (!problem.ok()) return;  // the table above is tested to be valid
    const PathChoice first = Choose(*problem, pass, *candidates_);
    for (DeviceKind kind : Kinds(context_)) {
      Json cell = {
          {"shape", shape}, {"dtype", Name(dtype)}, {"pass", Name(pass)}, {"device", Name(kind)}};
      const bool takes = first.path && DeviceOf(*first.path) == kind;
      const PathChoice choice = takes ? first : Choose(*problem, pass, Only(kind));
      cell["takes_calls"] = takes;
      cell["reasons"] = ReasonsIndex(choice.rejections);
      if (choice.path) {
        const CallCost cost = CostOf(*problem, pass, *choice.backend);
        cell["path"] = Name(*choice.path);
        cell["flash"] = ClassOf(*choice.path) == PathClass::kFlash;
        cell["kernel"] = choice.backend->KernelId(*problem, pass);
        cell["standard_bytes"] = cost.standard_bytes;
        cell["tile_bytes"] = cost.model.bytes();
        cell["compulsory_bytes"] = cost.compulsory_bytes;
        cell["flops"] = cost.flops;
      }
      cells_.push_back(std::move(cell));
    }
  }

  Json Take() {
    Json shapes = Json::array(), kinds = Json::array();
    for (const Representative& r : kRepresentatives) {
      shapes.push_back({{"name", r.name}, {"text", Text(r)}});
    }
    for (DeviceKind kind : Kinds(context_)) kinds.push_back(Name(kind));
    return {{"shapes", std::move(shapes)},
            {"devices", std::move(kinds)},
            {"reasons", std::move(reasons_)},
            {"cells", std::move(cells_)}};
  }

 private:
  PathChoice Choose(const AttentionProblem& problem, Pass pass,
                    std::span<const PathCandidate> candidates) const {
    return SelectPath(problem, pass, PathPolicy{}, candidates,
                      static_cast<int64_t>(context_.config.workspace_limit_bytes));
  }

  std::vector<PathCandidate> Only(DeviceKind kind) const {
    std::vector<PathCandidate> all;
    for (const PathCandidate& candidate : *candidates_) {
      if (DeviceOf(candidate.path) == kind) all.push_back(candidate);
    }
    return all;
  }

  // Many cells have the same reasons, so each list stands once.
  size_t ReasonsIndex(const std::vector<Rejection>& rejections) {
    Json list = Json::array();
    for (const Rejection& rejection : rejections) {
      list.push_back({{"path", Name(rejection.path)},
                      {"reason", Name(rejection.reason)},
                      {"detail", rejection.detail},
                      {"sentence", Sentence(rejection)}});
    }
    const auto found = std::find(reasons_.begin(), reasons_.end(), list);
    const auto index = static_cast<size_t>(found - reasons_.begin());
    if (found == reasons_.end()) reasons_.push_back(std::move(list));
    return index;
  }

  const ServiceContext& context_;
  const PathTable::Snapshot candidates_;
  Json reasons_ = Json::array();
  Json cells_ = Json::array();
};

}  // namespace

nlohmann::ordered_json PlansJson(const ServiceContext& context) {
  Board board(context);
  for (size_t shape = 0; shape < std::size(kRepresentatives); ++shape) {
    for (Pass pass : kPasses) {
      for (DType dtype : kDTypes) board.Add(shape, dtype, pass);
    }
  }
  return board.Take();
}

}  // namespace attn::server
