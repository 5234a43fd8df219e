#include "server/rpc/attention_call.h"

#include <algorithm>

#include "kernels/api/text.h"
#include "kernels/api/traffic.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

// A queued call pays two thread switches, some 20 µs; 2^20 FLOPs take about as long on one core.
constexpr uint64_t kTinyFlops = uint64_t{1} << 20;
constexpr uint64_t kTinyBytes = uint64_t{256} << 10;

// gRPC's timer may fire a little before the deadline as this process counts it.
constexpr std::chrono::milliseconds kDeadlineSlack{10};

google::protobuf::ArenaOptions ArenaOn(char* block, size_t size) {
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = size;
  return options;
}

uint64_t AlignUp(uint64_t bytes) {
  constexpr uint64_t kAlign = BufferPool::kAlignment;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

std::string_view StreamTwin(Pass pass) {
  return pass == Pass::kForward ? "ForwardStream" : "BackwardStream";
}

}  // namespace

AttentionCall::AttentionCall(ServiceContext* context, Method method, Pass pass, TimePoint deadline)
    : context_(context),
      method_(method),
      pass_(pass),
      deadline_(deadline),
      token_(deadline),
      arena_(ArenaOn(arena_block_.data(), arena_block_.size())),
      request_id_(Cat(context->request_id_prefix,
                      context->next_request.fetch_add(1, std::memory_order_relaxed))) {
  times_.start = context_->clock->Now();
}

AttentionCall::~AttentionCall() = default;

absl::Status AttentionCall::ReadHeader(std::string_view serialized) {
  auto* header = google::protobuf::Arena::CreateMessage<v1::BackwardRequestHeader>(&arena_);
  if (absl::Status s = wire::ParseInto(serialized, "header", header); !s.ok()) return s;
  if (absl::Status s = Convert(*header, pass_, Purpose::kRun, &header_); !s.ok()) return s;
  absl::StatusOr<AttentionProblem> problem = Validate(header_.spec, pass_);
  if (!problem.ok()) return problem.status();
  problem_ = *std::move(problem);
  if (absl::Status s = CheckOutputSizes(problem_); !s.ok()) return s;
  if (absl::Status s = LocatePayloads(&header_, &payload_sizes_); !s.ok()) return s;

  PlanOutputs();
  // Before the path is chosen: what no path could serve is a matter of size, not of policy.
  const uint64_t bytes = std::max(InputBytes(), RequestBytes(header_.spec)) + OutputBytes();
  if (bytes > context_->config.max_request_bytes) {
    return TooManyBytesError(bytes, context_->config.max_request_bytes);
  }

  choice_ = SelectPath(problem_, pass_, header_.policy, context_->paths->candidates(),
                       static_cast<int64_t>(context_->config.workspace_limit_bytes));
  for (const Rejection& rejection : choice_.rejections) {
    context_->metrics->CountRejection(rejection.path, rejection.reason);
  }
  if (choice_.backend == nullptr) return UnmetPolicyError(header_.policy, choice_);
  kernel_ = choice_.backend->KernelId(problem_, pass_);
  workspace_bytes_ = choice_.backend->WorkspaceBytes(problem_, pass_);
  // Counting visible entries takes time in the number of rows: of a call that cannot be tiny they
  // are counted where it runs, after it was admitted.
  if (bytes <= kTinyBytes) flops_ = Flops(problem_, pass_);
  times_.parsed = context_->clock->Now();
  return absl::OkStatus();
}

void AttentionCall::PlanOutputs() {
  const auto add = [this](DType dtype, int64_t elements) {
    Output& output = output_plan_[num_outputs_++];
    output.dtype = dtype;
    output.bytes = static_cast<uint64_t>(elements) * static_cast<uint64_t>(SizeOf(dtype));
  };
  if (pass_ == Pass::kForward) {
    add(problem_.out_dtype, OutElements(problem_));
    add(DType::kFp32, LseElements(problem_));
  } else {
    add(problem_.out_dtype, DqElements(problem_));
    add(problem_.out_dtype, DkElements(problem_));
    add(problem_.out_dtype, DvElements(problem_));
    if (problem_.bias) add(DType::kFp32, DbiasElements(problem_));
    if (problem_.has_sinks) add(DType::kFp32, problem_.num_heads);
  }
  uint64_t offset = 0;
  for (int i = 0; i < num_outputs_; ++i) {
    output_plan_[i].offset = offset;
    offset += AlignUp(output_plan_[i].bytes);
  }
}

uint64_t AttentionCall::OutputBytes() const {
  uint64_t bytes = 0;
  for (int i = 0; i < num_outputs_; ++i) bytes += output_plan_[i].bytes;
  return bytes;
}

uint64_t AttentionCall::InputBytes() const {
  uint64_t bytes = 0;
  for (uint64_t size : payload_sizes_) bytes += size;
  return bytes;
}

absl::Status AttentionCall::CheckUnaryMessage(uint64_t message_bytes) const {
  const uint64_t limit = context_->config.max_unary_bytes;
  if (message_bytes <= limit + wire::kMaxHeaderBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(Cat(
      "the request has ", message_bytes, " bytes; a unary message holds at most ", limit,
      " bytes of tensors (--max-unary-bytes). ", StreamTwin(pass_), " takes tensors of any size"));
}

absl::Status AttentionCall::CheckUnary(std::span<const uint64_t> payload_sizes) {
  if (absl::Status s = CheckPayloadSizes(header_, payload_sizes); !s.ok()) return s;
  payload_sizes_.assign(payload_sizes.begin(), payload_sizes.end());
  const uint64_t limit = context_->config.max_unary_bytes;
  if (OutputBytes() > limit) {
    return absl::ResourceExhaustedError(Cat(
        "the reply would have ", OutputBytes(), " bytes of tensors; a unary message holds at most ",
        limit, " (--max-unary-bytes). ", StreamTwin(pass_), " takes tensors of any size"));
  }
  return absl::OkStatus();
}

absl::Status AttentionCall::Admit() {
  absl::StatusOr<Admission::Ticket> ticket = context_->admission->Admit(
      InputBytes() + OutputBytes(), static_cast<uint64_t>(workspace_bytes_), &retry_);
  if (!ticket.ok()) return ticket.status();
  ticket_ = *std::move(ticket);
  return absl::OkStatus();
}

absl::Status AttentionCall::AllocateInputs() {
  payload_offsets_.clear();
  uint64_t offset = 0;
  for (uint64_t size : payload_sizes_) {
    payload_offsets_.push_back(offset);
    offset += AlignUp(size);
  }
  absl::StatusOr<BufferPool::Buffer> buffer = context_->buffers->Allocate(offset);
  if (!buffer.ok()) return buffer.status();
  inputs_ = *std::move(buffer);
  return absl::OkStatus();
}

bool AttentionCall::tiny() const {
  return flops_ && *flops_ <= kTinyFlops && ticket_.bytes() <= kTinyBytes;
}

const std::byte* AttentionCall::InputData(Input input) const {
  const TensorRef& ref = header_[input];
  if (!ref.present) return nullptr;
  return inputs_.data() + payload_offsets_[ref.payload] + ref.offset_bytes;
}

absl::Status AttentionCall::BindInputs() {
  const auto floats = [this](Input input) {
    return reinterpret_cast<const float*>(InputData(input));
  };
  if (problem_.alibi) problem_.alibi->slopes = floats(Input::kAlibiSlopes);
  if (problem_.bias) problem_.bias->data = InputData(Input::kBias);
  if (problem_.has_sinks) problem_.sinks = floats(Input::kSinks);
  if (problem_.block_mask) {
    problem_.block_mask->data = reinterpret_cast<const uint8_t*>(InputData(Input::kBlockMask));
  }
  return ValidateContents(problem_);
}

absl::Status AttentionCall::AllocateOutputs() {
  const Output& last = output_plan_[num_outputs_ - 1];
  absl::StatusOr<BufferPool::Buffer> buffer = context_->buffers->Allocate(last.offset + last.bytes);
  if (!buffer.ok()) return buffer.status();
  output_data_ = buffer->data();
  auto owner = std::make_shared<OutputMemory>();
  owner->pool = context_->buffers;
  owner->buffer = *std::move(buffer);
  for (int i = 0; i < num_outputs_; ++i) {
    outputs_[i].bytes = {output_data_ + output_plan_[i].offset, output_plan_[i].bytes};
    outputs_[i].owner = owner;
  }
  return absl::OkStatus();
}

absl::Status AttentionCall::RunBackend(std::span<std::byte> workspace) {
  RunContext run{.workspace = workspace, .cancel = &token_};
  const auto output = [this](int i) {
    return static_cast<void*>(output_data_ + output_plan_[i].offset);
  };
  if (pass_ == Pass::kForward) {
    const ForwardTensors tensors{.q = InputData(Input::kQ),
                                 .k = InputData(Input::kK),
                                 .v = InputData(Input::kV),
                                 .out = output(0),
                                 .lse = static_cast<float*>(output(1))};
    return choice_.backend->Forward(problem_, tensors, run);
  }
  BackwardTensors tensors{.q = InputData(Input::kQ),
                          .k = InputData(Input::kK),
                          .v = InputData(Input::kV),
                          .out = InputData(Input::kOut),
                          .lse = reinterpret_cast<const float*>(InputData(Input::kLse)),
                          .dout = InputData(Input::kDout),
                          .dlse = reinterpret_cast<const float*>(InputData(Input::kDlse)),
                          .dq = output(0),
                          .dk = output(1),
                          .dv = output(2)};
  int next = 3;
  if (problem_.bias) tensors.dbias = static_cast<float*>(output(next++));
  if (problem_.has_sinks) tensors.dsink = static_cast<float*>(output(next++));
  return choice_.backend->Backward(problem_, tensors, run);
}

absl::Status AttentionCall::Run() {
  if (absl::Status s = BindInputs(); !s.ok()) return s;
  if (absl::Status s = token_.Check(); !s.ok()) return s;
  if (absl::Status s = AllocateOutputs(); !s.ok()) return s;
  absl::StatusOr<BufferPool::Buffer> workspace =
      context_->buffers->Allocate(static_cast<uint64_t>(workspace_bytes_));
  if (!workspace.ok()) return workspace.status();

  times_.run = context_->clock->Now();
  if (absl::Status s = RunBackend(workspace->span()); !s.ok()) return s;
  times_.ran = context_->clock->Now();

  // With a block mask the visible entries are known only now that its contents are.
  if (!flops_ || problem_.block_mask) flops_ = Flops(problem_, pass_);
  model_ = choice_.backend->Model(problem_, pass_);
  compulsory_bytes_ = CompulsoryBytes(problem_, pass_);
  const auto kernel_time = std::chrono::nanoseconds(times_.ran - times_.run);
  context_->metrics->CountExecution(pass_, *choice_.path, problem_.dtype, *flops_, kernel_time);
  context_->rates->Observe(pass_, *choice_.path, *flops_, kernel_time);
  inputs_ = BufferPool::Buffer();
  DescribeOutputs();
  return absl::OkStatus();
}

std::string_view AttentionCall::path_name() const {
  return choice_.path ? Name(*choice_.path) : std::string_view();
}

std::string AttentionCall::RejectionList() const {
  std::string out;
  for (const Rejection& rejection : choice_.rejections) {
    out += Cat(out.empty() ? "" : ",", Name(rejection.path), ":", Name(rejection.reason));
  }
  return out;
}

absl::Status AttentionCall::Settle(absl::Status status) {
  const TimePoint now = context_->clock->Now();
  if (absl::IsCancelled(status) && deadline_ != TimePoint::max() &&
      now + kDeadlineSlack >= deadline_) {
    status = absl::DeadlineExceededError("the deadline passed");
  }
  context_->metrics->CountRequest(method_, status.code());
  // The metric says what the report says.
  const std::chrono::nanoseconds handler =
      status.ok() && report_ != nullptr ? std::chrono::nanoseconds(report_->times().handler_ns())
                                        : std::chrono::nanoseconds(now - times_.start);
  context_->metrics->ObserveStage(Stage::kHandler, pass_, handler);
  if (log::Enabled(LogLevel::kDebug)) {
    const auto micros = [](TimePoint from, TimePoint to) {
      return std::chrono::duration<double, std::micro>(to > from ? to - from
                                                                 : TimePoint::duration(0))
          .count();
    };
    log::Debug("call", {{"id", request_id_},
                        {"method", Name(method_)},
                        {"code", CodeName(status.code())},
                        {"path", path_name()},
                        {"kernel", kernel_},
                        {"bytes", ticket_.bytes()},
                        {"kernel_us", micros(times_.run, times_.ran)},
                        {"handler_us", micros(times_.start, now)},
                        {"error", status.message()}});
  }
  return status;
}

}  // namespace attn::server
