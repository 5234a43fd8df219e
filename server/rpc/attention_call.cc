#include "server/rpc/attention_call.h"

#include <algorithm>
#include <utility>

#include "kernels/api/text.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

// A queued call pays two thread switches, some 20 µs; 2^20 FLOPs take about as long on one core.
constexpr uint64_t kTinyFlops = uint64_t{1} << 20;

// gRPC's timer may fire a little before the deadline as this process counts it.
constexpr std::chrono::milliseconds kDeadlineSlack{10};

google::protobuf::ArenaOptions ArenaOn(char* block, size_t size) {
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = size;
  return options;
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
  absl::Status status;
  plan_ = context_->plans.Find(pass_, serialized);
  if (plan_ == nullptr || plan_->paths_version != context_->paths->version()) {
    auto plan = std::make_shared<CallPlan>();
    status = MakeCallPlan(*context_, pass_, serialized, plan.get());
    plan_ = std::move(plan);
    if (status.ok()) context_->plans.Add(pass_, serialized, plan_);
  }
  for (const Rejection& rejection : plan_->choice.rejections) {
    context_->metrics->CountRejection(rejection.path, rejection.reason);
  }
  if (!status.ok()) return status;
  problem_ = plan_->problem;
  payload_sizes_ = plan_->payload_sizes;
  times_.parsed = context_->clock->Now();
  return absl::OkStatus();
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
  if (absl::Status s = CheckPayloadSizes(plan_->header, payload_sizes); !s.ok()) return s;
  payload_sizes_.assign(payload_sizes.begin(), payload_sizes.end());
  const uint64_t limit = context_->config.max_unary_bytes;
  if (const uint64_t bytes = plan_->OutputBytes(); bytes > limit) {
    return absl::ResourceExhaustedError(
        Cat("the reply would have ", bytes, " bytes of tensors; a unary message holds at most ",
            limit, " (--max-unary-bytes). ", StreamTwin(pass_), " takes tensors of any size"));
  }
  return absl::OkStatus();
}

absl::Status AttentionCall::Admit() {
  absl::StatusOr<Admission::Ticket> ticket = context_->admission->Admit(
      InputBytes() + plan_->OutputBytes(), static_cast<uint64_t>(plan_->workspace_bytes), &retry_);
  if (!ticket.ok()) {
    context_->metrics->CountRefusal(absl::IsUnavailable(ticket.status()) ? Refusal::kDraining
                                    : retry_.count() > 0                 ? Refusal::kFull
                                                                         : Refusal::kTooLarge);
    return ticket.status();
  }
  ticket_ = *std::move(ticket);
  return absl::OkStatus();
}

absl::Status AttentionCall::Allocate(std::bitset<wire::kMaxPayloads> left_out) {
  payload_offsets_.clear();
  uint64_t offset = 0;
  for (size_t i = 0; i < payload_sizes_.size(); ++i) {
    payload_offsets_.push_back(offset);
    if (!left_out[i]) offset += BufferPool::AlignUp(payload_sizes_[i]);
  }
  absl::StatusOr<BufferPool::Buffer> buffer = context_->buffers->Allocate(offset);
  if (!buffer.ok()) return buffer.status();
  inputs_ = *std::move(buffer);
  return absl::OkStatus();
}

absl::Status AttentionCall::AllocateInputs() { return Allocate({}); }

absl::Status AttentionCall::Gather(std::span<const wire::Bytes> payloads) {
  std::bitset<wire::kMaxPayloads> left_out;
  if (plan_->reads_inputs) {
    reader_.emplace(plan_->header, payloads);
    for (const Input input : {Input::kQ, Input::kK, Input::kV}) {
      left_out.set(plan_->header[input].payload);
    }
  }
  if (absl::Status s = Allocate(left_out); !s.ok()) return s;
  for (size_t i = 0; i < payloads.size(); ++i) {
    if (!left_out[i]) payloads[i].CopyTo(0, payloads[i].size, payload(i));
  }
  return absl::OkStatus();
}

AttentionCall::PayloadReader::PayloadReader(const ConvertedHeader& header,
                                            std::span<const wire::Bytes> payloads)
    : sources_{Source(header[Input::kQ], payloads), Source(header[Input::kK], payloads),
               Source(header[Input::kV], payloads)} {}

void AttentionCall::PayloadReader::Read(Tensor tensor, uint64_t offset_bytes, uint64_t count_bytes,
                                        std::byte* destination) const {
  const Source& source = sources_[static_cast<size_t>(tensor)];
  source.bytes.CopyTo(source.offset + offset_bytes, count_bytes, destination);
}

bool AttentionCall::tiny() const {
  // On a device even a small call may have to wait for its turn, which is not for gRPC's threads.
  return !on_cuda() && plan_->cost && plan_->cost->flops <= kTinyFlops &&
         ticket_.bytes() <= kSmallCallBytes;
}

const std::byte* AttentionCall::InputData(Input input) const {
  const TensorRef& ref = plan_->header[input];
  if (!ref.present) return nullptr;
  if (reader_ && (input == Input::kQ || input == Input::kK || input == Input::kV)) return nullptr;
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
  const CallPlan::Output& last = plan_->outputs[plan_->num_outputs - 1];
  absl::StatusOr<BufferPool::Buffer> buffer = context_->buffers->Allocate(last.offset + last.bytes);
  if (!buffer.ok()) return buffer.status();
  output_data_ = buffer->data();
  auto owner = std::make_shared<OutputMemory>();
  owner->pool = context_->buffers;
  owner->buffer = *std::move(buffer);
  for (int i = 0; i < plan_->num_outputs; ++i) {
    outputs_[i].bytes = {output_data_ + plan_->outputs[i].offset, plan_->outputs[i].bytes};
    outputs_[i].owner = owner;
  }
  return absl::OkStatus();
}

absl::Status AttentionCall::RunBackend(std::span<std::byte> workspace) {
  const RunContext run{.workspace = workspace,
                       .cancel = &token_,
                       .reader = reader_ ? &*reader_ : nullptr,
                       .reading_ns = &reading_ns_,
                       .device_times = &device_times_};
  const auto output = [this](int i) {
    return static_cast<void*>(output_data_ + plan_->outputs[i].offset);
  };
  if (pass_ == Pass::kForward) {
    const ForwardTensors tensors{.q = InputData(Input::kQ),
                                 .k = InputData(Input::kK),
                                 .v = InputData(Input::kV),
                                 .out = output(0),
                                 .lse = static_cast<float*>(output(1))};
    return plan_->choice.backend->Forward(problem_, tensors, run);
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
  return plan_->choice.backend->Backward(problem_, tensors, run);
}

std::chrono::nanoseconds AttentionCall::KernelTime() const {
  return on_cuda() ? std::chrono::nanoseconds(device_times_.kernel_ns)
                   : std::chrono::nanoseconds(times_.ran - times_.run) -
                         std::chrono::nanoseconds(reading_ns_);
}

absl::Status AttentionCall::Run() {
  if (absl::Status s = BindInputs(); !s.ok()) return s;
  if (absl::Status s = token_.Check(); !s.ok()) return s;
  if (absl::Status s = AllocateOutputs(); !s.ok()) return s;
  BufferPool::Buffer workspace;
  if (plan_->workspace_bytes > 0) {
    auto buffer = context_->buffers->Allocate(static_cast<uint64_t>(plan_->workspace_bytes));
    if (!buffer.ok()) return buffer.status();
    workspace = *std::move(buffer);
  }

  times_.run = context_->clock->Now();
  if (absl::Status s = RunBackend(workspace.span()); !s.ok()) return s;
  times_.ran = context_->clock->Now();

  // With a block mask the visible entries are known only now that its contents are.
  cost_ = plan_->cost && !problem_.block_mask ? *plan_->cost
                                              : CostOf(problem_, pass_, *plan_->choice.backend);
  CountExecution();
  inputs_ = BufferPool::Buffer();
  reader_.reset();
  return absl::OkStatus();
}

double AttentionCall::RooflineNs() const {
  double tflops = context_->host_tflops, gb_per_s = context_->host_copy_gb_per_s;
  if (on_cuda()) {
    const v1::DeviceInfo* device =
        device_times_.device_index < 0 ? nullptr : context_->CudaDevice(device_times_.device_index);
    tflops = device == nullptr ? 0 : device->matrix_tflops();
    gb_per_s = device == nullptr ? 0 : device->copy_gb_per_s();
  }
  if (tflops <= 0 || gb_per_s <= 0) return 0;
  return std::max(static_cast<double>(cost_->flops) / (tflops * 1e3),
                  static_cast<double>(cost_->compulsory_bytes) / gb_per_s);
}

void AttentionCall::CountExecution() const {
  const PathId path = *plan_->choice.path;
  const std::chrono::nanoseconds kernel = KernelTime();
  context_->metrics->CountExecution(
      {.pass = pass_,
       .path = path,
       .dtype = problem_.dtype,
       .head_dim = problem_.head_dim,
       .device = device_times_.device_index,
       .flops = static_cast<double>(cost_->flops),
       .compulsory_bytes = static_cast<double>(cost_->compulsory_bytes),
       .tile_bytes = static_cast<double>(cost_->model.bytes()),
       .standard_bytes = static_cast<double>(cost_->standard_bytes),
       .kernel = kernel,
       .roofline_seconds = RooflineNs() * 1e-9,
       .rejections = plan_->choice.rejections});
  context_->rates->Observe(pass_, path, cost_->flops, kernel);
}

void AttentionCall::Remember(const absl::Status& status, std::chrono::nanoseconds handler) const {
  CallRecord record;
  record.ended = std::chrono::system_clock::now();
  record.method = method_;
  record.request_id = request_id_;
  record.code = status.code();
  record.error = std::string(status.message());
  if (plan_ != nullptr) {
    record.shape = ShapeOf(plan_->problem);
    record.rejections = plan_->rejections;
  }
  record.handler = handler;
  if (status.ok() && report_ != nullptr) record.report = report_->SerializeAsString();
  context_->recent.Add(std::move(record));
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
  Remember(status, handler);
  if (log::Enabled(LogLevel::kDebug)) {
    const auto micros = [](TimePoint from, TimePoint to) {
      return std::chrono::duration<double, std::micro>(to > from ? to - from
                                                                 : TimePoint::duration(0))
          .count();
    };
    log::Debug("call", {{"id", request_id_},
                        {"method", Name(method_)},
                        {"code", CodeName(status.code())},
                        {"path", plan_ ? plan_->path_name() : std::string_view()},
                        {"kernel", plan_ ? plan_->kernel : std::string()},
                        {"bytes", ticket_.bytes()},
                        {"device", device_times_.device_index},
                        {"run_us", micros(times_.run, times_.ran)},
                        {"handler_us", micros(times_.start, now)},
                        {"trace_id", trace_ ? trace_->trace_id() : std::string()},
                        {"span_id", trace_ ? trace_->span_id() : std::string()},
                        {"error", status.message()}});
  }
  return status;
}

}  // namespace attn::server
