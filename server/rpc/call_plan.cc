#include "server/rpc/call_plan.h"

#include <google/protobuf/arena.h>

#include <algorithm>
#include <utility>

#include "kernels/api/text.h"
#include "kernels/api/traffic.h"
#include "proto/wire/byte_buffer.h"
#include "server/rpc/service_context.h"

namespace attn::server {
namespace {

// The standard algorithm stores FP32 scores on a CPU, scores of the input dtype on CUDA.
int64_t ScoreBytes(PathId path, DType dtype) {
  return DeviceOf(path) == DeviceKind::kCpu ? 4 : SizeOf(dtype);
}

void PlanOutputs(Pass pass, CallPlan* plan) {
  const AttentionProblem& problem = plan->problem;
  const auto add = [plan](DType dtype, int64_t elements) {
    CallPlan::Output& output = plan->outputs[plan->num_outputs++];
    output.dtype = dtype;
    output.bytes = static_cast<uint64_t>(elements) * static_cast<uint64_t>(SizeOf(dtype));
  };
  if (pass == Pass::kForward) {
    add(problem.out_dtype, OutElements(problem));
    add(DType::kFp32, LseElements(problem));
  } else {
    add(problem.out_dtype, DqElements(problem));
    add(problem.out_dtype, DkElements(problem));
    add(problem.out_dtype, DvElements(problem));
    if (problem.bias) add(DType::kFp32, DbiasElements(problem));
    if (problem.has_sinks) add(DType::kFp32, problem.num_heads);
  }
  uint64_t offset = 0;
  for (int i = 0; i < plan->num_outputs; ++i) {
    plan->outputs[i].offset = offset;
    offset += BufferPool::AlignUp(plan->outputs[i].bytes);
  }
}

std::unique_ptr<google::protobuf::MessageLite> DescribeOutputs(Pass pass, const CallPlan& plan) {
  const AttentionSpec& spec = plan.header.spec;
  const AttentionProblem& problem = plan.problem;
  const auto describe = [&plan](v1::Tensor* tensor, int index, const std::vector<int64_t>& shape) {
    tensor->set_dtype(ToProto(plan.outputs[index].dtype));
    tensor->mutable_shape()->Assign(shape.begin(), shape.end());
    tensor->set_payload(static_cast<uint32_t>(index));
  };
  if (pass == Pass::kForward) {
    auto header = std::make_unique<v1::ForwardResponseHeader>();
    std::vector<int64_t> shape = spec.q.shape;
    shape.back() = problem.head_dim_v;
    describe(header->mutable_out(), 0, shape);
    if (problem.layout == Layout::kBshd) {
      describe(header->mutable_lse(), 1, {problem.batch, problem.num_heads, problem.seqlen_q});
    } else {
      describe(header->mutable_lse(), 1, {problem.num_heads, problem.total_q});
    }
    return header;
  }
  auto header = std::make_unique<v1::BackwardResponseHeader>();
  describe(header->mutable_dq(), 0, spec.q.shape);
  describe(header->mutable_dk(), 1, spec.k.shape);
  describe(header->mutable_dv(), 2, spec.v.shape);
  int next = 3;
  if (problem.bias) describe(header->mutable_dbias(), next++, spec.bias->shape);
  if (problem.has_sinks) describe(header->mutable_dsink(), next++, {problem.num_heads});
  return header;
}

// Whether q, k and v are in payloads that hold no option tensor, which must be in one piece.
bool InputsAreApart(const ConvertedHeader& header) {
  for (const Input option : {Input::kAlibiSlopes, Input::kBias, Input::kSinks, Input::kBlockMask}) {
    for (const Input input : {Input::kQ, Input::kK, Input::kV}) {
      if (header[option].present && header[option].payload == header[input].payload) return false;
    }
  }
  return true;
}

}  // namespace

CallCost CostOf(const AttentionProblem& problem, Pass pass, const Backend& backend) {
  return {
      .flops = Flops(problem, pass),
      .model = backend.Model(problem, pass),
      .compulsory_bytes = CompulsoryBytes(problem, pass),
      .standard_bytes = StandardBytes(problem, pass, ScoreBytes(backend.path(), problem.dtype))};
}

uint64_t CallPlan::InputBytes() const {
  uint64_t bytes = 0;
  for (uint64_t size : payload_sizes) bytes += size;
  return bytes;
}

uint64_t CallPlan::OutputBytes() const {
  uint64_t bytes = 0;
  for (int i = 0; i < num_outputs; ++i) bytes += outputs[i].bytes;
  return bytes;
}

absl::Status MakeCallPlan(const ServiceContext& context, Pass pass, std::string_view serialized,
                          CallPlan* plan) {
  google::protobuf::Arena arena;
  auto* header = google::protobuf::Arena::CreateMessage<v1::BackwardRequestHeader>(&arena);
  if (absl::Status s = wire::ParseInto(serialized, "header", header); !s.ok()) return s;
  if (absl::Status s = Convert(*header, pass, Purpose::kRun, &plan->header); !s.ok()) return s;
  absl::StatusOr<AttentionProblem> problem = Validate(plan->header.spec, pass);
  if (!problem.ok()) return problem.status();
  plan->problem = *std::move(problem);
  if (absl::Status s = CheckOutputSizes(plan->problem); !s.ok()) return s;
  if (absl::Status s = LocatePayloads(&plan->header, &plan->payload_sizes); !s.ok()) return s;

  PlanOutputs(pass, plan);
  // Before the path is chosen: what no path could serve is a matter of size, not of policy.
  const uint64_t bytes =
      std::max(plan->InputBytes(), RequestBytes(plan->header.spec)) + plan->OutputBytes();
  if (bytes > context.config.max_request_bytes) {
    return TooManyBytesError(bytes, context.config.max_request_bytes);
  }

  PathChoice& choice = plan->choice;
  plan->paths_version = context.paths->version();
  choice = SelectPath(plan->problem, pass, plan->header.policy, *context.paths->candidates(),
                      static_cast<int64_t>(context.config.workspace_limit_bytes));
  for (const Rejection& rejection : choice.rejections) {
    plan->rejections +=
        Cat(plan->rejections.empty() ? "" : ",", Name(rejection.path), ":", Name(rejection.reason));
  }
  if (choice.backend == nullptr) return UnmetPolicyError(plan->header.policy, choice);
  plan->kernel = choice.backend->KernelId(plan->problem, pass);
  if (!choice.backend->WorkspaceOnDevice()) {
    plan->workspace_bytes = choice.backend->WorkspaceBytes(plan->problem, pass);
  }
  plan->response_header = DescribeOutputs(pass, *plan);
  plan->reads_inputs =
      choice.backend->ReadsInputs(plan->problem, pass) && InputsAreApart(plan->header);
  if (bytes <= kSmallCallBytes) plan->cost = CostOf(plan->problem, pass, *choice.backend);
  return absl::OkStatus();
}

std::shared_ptr<const CallPlan> CallPlanCache::Find(Pass pass, std::string_view serialized) {
  if (serialized.size() > kMaxHeaderBytes) return nullptr;
  Plans surplus;  // goes after the lock
  MutexLock lock(mutex_);
  Generations& generations = passes_[pass == Pass::kForward ? 0 : 1];
  if (const auto it = generations.young.find(serialized); it != generations.young.end()) {
    return it->second;
  }
  const auto it = generations.old.find(serialized);
  if (it == generations.old.end()) return nullptr;
  std::shared_ptr<const CallPlan> plan = it->second;
  Insert(generations, it->first, plan, &surplus);
  return plan;
}

void CallPlanCache::Add(Pass pass, std::string_view serialized,
                        std::shared_ptr<const CallPlan> plan) {
  if (serialized.size() > kMaxHeaderBytes || plan->problem.sequences.size() > kMaxSequences) return;
  std::string key(serialized);
  Plans surplus;  // goes after the lock
  MutexLock lock(mutex_);
  Insert(passes_[pass == Pass::kForward ? 0 : 1], std::move(key), std::move(plan), &surplus);
}

void CallPlanCache::Insert(Generations& generations, std::string key,
                           std::shared_ptr<const CallPlan> plan, Plans* surplus) {
  if (generations.young.size() >= kGeneration) {
    surplus->swap(generations.old);
    generations.old.swap(generations.young);
  }
  generations.young.insert_or_assign(std::move(key), std::move(plan));
}

size_t CallPlanCache::size() const {
  MutexLock lock(mutex_);
  size_t plans = 0;
  for (const Generations& generations : passes_) {
    plans += generations.young.size() + generations.old.size();
  }
  return plans;
}

}  // namespace attn::server
