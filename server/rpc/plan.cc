#include "server/rpc/plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/text.h"
#include "kernels/api/traffic.h"
#include "proto/wire/framing.h"
#include "server/rpc/convert.h"

namespace attn::server {
namespace {

uint64_t ResponseBytes(const AttentionProblem& p, Pass pass) {
  const auto element = static_cast<uint64_t>(SizeOf(p.out_dtype));
  if (pass == Pass::kForward) {
    return static_cast<uint64_t>(OutElements(p)) * element +
           static_cast<uint64_t>(LseElements(p)) * 4;
  }
  const int64_t floats = DbiasElements(p) + (p.has_sinks ? p.num_heads : 0);
  return static_cast<uint64_t>(DqElements(p) + DkElements(p) + DvElements(p)) * element +
         static_cast<uint64_t>(floats) * 4;
}

// What to change so that this reason no longer holds; empty where the caller cannot change it.
std::string AdviceFor(const Rejection& rejection) {
  const auto advise = [&rejection](std::string_view what) {
    return Cat("for ", Name(rejection.path), ": ", what, rejection.detail.empty() ? "" : " (",
               rejection.detail, rejection.detail.empty() ? "" : ")");
  };
  switch (rejection.reason) {
    case Reason::kDtypeUnsupported:
      return advise("send q, k and v in a dtype the path takes");
    case Reason::kHeadDimUnsupported:
      return advise("use a head_dim the path takes, or split the heads");
    case Reason::kOptionUnsupported:
      return advise("leave the option out, or choose a value the path takes");
    case Reason::kAlignment:
      return advise("send contiguous tensors at aligned offsets");
    case Reason::kWorkspaceLimit:
      return advise(
          "split the batch, or raise --workspace-limit-bytes (on a GPU, --device-memory-limit) on "
          "the server");
    case Reason::kPolicy:
      return advise("set path_policy to AUTO or REQUIRE_FLASH");
    case Reason::kDisabledByConfig:
      return advise("remove --disable-path on the server");
    case Reason::kCpuFallbackDisabled:
      return advise("set --cpu-fallback on the server");
    case Reason::kSelfTestFailed:
      return advise("ask the operator: the path failed its self-test");
    case Reason::kNotBuilt:
    case Reason::kNoCudaDevice:
    case Reason::kArchUnsupported:
      return "";
  }
  return "";
}

// What to change to get flash: what the fastest flash path of this server's best device asks for
// of those that decline the call for the fewest reasons. Nothing where flash runs there already.
void AddAdvice(const ServiceContext& context, const PathChoice& choice,
               v1::PlanResponse* response) {
  std::optional<PathId> nearest;
  size_t fewest = 0;
  const PathTable::Snapshot candidates = context.paths->candidates();
  for (const PathCandidate& candidate : *candidates) {
    if (candidate.backend == nullptr || ClassOf(candidate.path) != PathClass::kFlash) continue;
    if (nearest && DeviceOf(candidate.path) != DeviceOf(*nearest)) break;
    if (choice.path == candidate.path) return;
    const auto reasons = static_cast<size_t>(std::count_if(
        choice.rejections.begin(), choice.rejections.end(),
        [&candidate](const Rejection& rejection) { return rejection.path == candidate.path; }));
    if (nearest && reasons >= fewest) continue;
    nearest = candidate.path;
    fewest = reasons;
  }
  for (const Rejection& rejection : choice.rejections) {
    if (rejection.path != nearest) continue;
    if (std::string advice = AdviceFor(rejection); !advice.empty()) {
      response->add_advice(std::move(advice));
    }
  }
}

// On CUDA the rates are those of the first device: a host's devices are alike as a rule.
void AddPrediction(const ServiceContext& context, Pass pass, PathId path,
                   v1::PlanResponse* response) {
  const v1::DeviceInfo* device =
      DeviceOf(path) == DeviceKind::kCuda ? context.CudaDevice(-1) : nullptr;
  const auto nanoseconds = [](uint64_t work, double per_second) {
    return per_second > 0 ? static_cast<uint64_t>(static_cast<double>(work) / per_second * 1e9)
                          : uint64_t{0};
  };
  const v1::Traffic& traffic = response->traffic();
  const double copy_rate =
      device != nullptr ? device->copy_gb_per_s() * 1e9 : context.rates->copy_bytes_per_second();
  response->set_predicted_compute_ns(
      nanoseconds(response->flops(), context.rates->FlopsPerSecond(pass, path)));
  response->set_predicted_memory_ns(nanoseconds(traffic.compulsory_bytes(), copy_rate));
  // Computing and waiting for memory overlap.
  response->set_predicted_ns(
      std::max(response->predicted_compute_ns(), response->predicted_memory_ns()));
  if (device == nullptr) return;
  response->set_predicted_transfer_ns(
      nanoseconds(traffic.host_to_device_bytes(), device->host_to_device_gb_per_s() * 1e9) +
      nanoseconds(traffic.device_to_host_bytes(), device->device_to_host_gb_per_s() * 1e9));
}

// Copies the block mask out of its payload and points the problem at the copy.
absl::Status BindBlockMask(const v1::PlanRequest& request, ConvertedHeader& header,
                           AttentionProblem* problem, std::vector<uint8_t>* mask) {
  const TensorRef& ref = header[Input::kBlockMask];
  if (!ref.present || !ref.has_source || request.payload_size() == 0) return absl::OkStatus();
  const int64_t span = header.spec.block_mask->mask.SpanElements();
  if (ref.payload >= static_cast<uint32_t>(request.payload_size())) {
    return absl::InvalidArgumentError(Cat("options.block_mask.mask.payload is ", ref.payload,
                                          ", but the message has ", request.payload_size(),
                                          " payloads"));
  }
  const std::string& payload = request.payload(static_cast<int>(ref.payload));
  if (span < 0 || ref.offset_bytes > payload.size() ||
      static_cast<uint64_t>(span) > payload.size() - ref.offset_bytes) {
    return absl::InvalidArgumentError(
        Cat("options.block_mask.mask needs ", span, " bytes at offset_bytes ", ref.offset_bytes,
            " of payload ", ref.payload, ", which has ", payload.size(), " bytes"));
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(payload.data()) + ref.offset_bytes;
  mask->assign(bytes, bytes + span);
  if (mask->empty()) return absl::OkStatus();
  problem->block_mask->data = mask->data();
  return ValidateContents(*problem);
}

void AddPicture(const AttentionProblem& problem, const TileModel& model,
                v1::PlanResponse* response) {
  int64_t n = 0, m = 0;
  for (const Sequence& sequence : problem.sequences) {
    if (sequence.len_q * sequence.len_k < n * m || sequence.len_q * sequence.len_k == 0) continue;
    n = sequence.len_q;
    m = sequence.len_k;
  }
  response->set_score_entries_per_head(static_cast<uint64_t>(n) * static_cast<uint64_t>(m));
  response->set_visible_pairs(VisiblePairs(problem));
  response->set_on_chip_elements(static_cast<uint64_t>(model.on_chip_elements));
  response->set_tile_q(static_cast<uint64_t>(model.tile_q));
  response->set_tile_k(static_cast<uint64_t>(model.tile_k));
  response->set_standard_elements_per_head(StandardElementsPerHead(n, m, problem.head_dim));
  if (model.on_chip_elements > 0) {
    response->set_flash_elements_per_head(
        FlashElementsPerHead(n, m, problem.head_dim, model.on_chip_elements));
  }
}

}  // namespace

absl::Status MakePlan(const ServiceContext& context, const v1::PlanRequest& request,
                      v1::PlanResponse* response) {
  Pass pass = Pass::kForward;
  switch (request.pass()) {
    case v1::PASS_UNSPECIFIED:
      return absl::InvalidArgumentError("pass is required");
    case v1::PASS_FORWARD:
      break;
    case v1::PASS_BACKWARD:
      pass = Pass::kBackward;
      break;
    default:
      return absl::UnimplementedError(
          Cat("pass has the value ", request.pass(), ", which this server does not know"));
  }
  if (request.header().ByteSizeLong() > wire::kMaxHeaderBytes) {
    return absl::InvalidArgumentError(Cat("header has ", request.header().ByteSizeLong(),
                                          " bytes; at most ", wire::kMaxHeaderBytes));
  }
  ConvertedHeader header;
  if (absl::Status s = Convert(request.header(), pass, Purpose::kPlan, &header); !s.ok()) return s;
  absl::StatusOr<AttentionProblem> validated = Validate(header.spec, pass);
  if (!validated.ok()) return validated.status();
  AttentionProblem problem = *std::move(validated);
  if (absl::Status s = CheckOutputSizes(problem); !s.ok()) return s;

  const uint64_t bytes = RequestBytes(header.spec) + ResponseBytes(problem, pass);
  if (bytes > context.config.max_request_bytes) {
    return TooManyBytesError(bytes, context.config.max_request_bytes);
  }

  // Exactly what AttentionCall::ReadHeader() does: what Plan says is what Forward does.
  const PathChoice choice = SelectPath(problem, pass, header.policy, *context.paths->candidates(),
                                       static_cast<int64_t>(context.config.workspace_limit_bytes));
  for (const Rejection& rejection : choice.rejections) {
    ToProto(rejection, header.full_report, response->add_rejections());
  }
  AddAdvice(context, choice, response);

  std::vector<uint8_t> mask;
  if (absl::Status s = BindBlockMask(request, header, &problem, &mask); !s.ok()) return s;
  TileModel model;
  v1::Traffic& traffic = *response->mutable_traffic();
  if (choice.backend != nullptr) {
    response->set_path(std::string(Name(*choice.path)));
    response->set_path_class(ToProto(ClassOf(*choice.path)));
    response->set_device_kind(ToProto(DeviceOf(*choice.path)));
    response->set_kernel(choice.backend->KernelId(problem, pass));
    response->set_workspace_bytes(
        static_cast<uint64_t>(choice.backend->WorkspaceBytes(problem, pass)));
    model = choice.backend->Model(problem, pass);
    traffic.set_tile_bytes(model.bytes());
  }
  const bool on_cpu = !choice.path || DeviceOf(*choice.path) == DeviceKind::kCpu;
  traffic.set_wire_request_bytes(RequestBytes(header.spec));
  traffic.set_wire_response_bytes(ResponseBytes(problem, pass));
  if (!on_cpu) {
    traffic.set_host_to_device_bytes(traffic.wire_request_bytes());
    traffic.set_device_to_host_bytes(traffic.wire_response_bytes());
  }
  traffic.set_compulsory_bytes(CompulsoryBytes(problem, pass));
  traffic.set_standard_bytes(StandardBytes(problem, pass, on_cpu ? 4 : SizeOf(problem.dtype)));
  response->set_flops(Flops(problem, pass));
  AddPicture(problem, model, response);
  if (choice.path) AddPrediction(context, pass, *choice.path, response);
  return absl::OkStatus();
}

}  // namespace attn::server
