// The parts of AttentionCall that write the reply's words: response header and execution report.
#include <algorithm>

#include "kernels/api/traffic.h"
#include "server/rpc/attention_call.h"

namespace attn::server {
namespace {

uint64_t Nanoseconds(TimePoint from, TimePoint to) {
  if (to <= from) return 0;
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
}

// The standard algorithm stores FP32 scores on a CPU, scores of the input dtype on CUDA.
int64_t ScoreBytes(PathId path, DType dtype) {
  return DeviceOf(path) == DeviceKind::kCpu ? 4 : SizeOf(dtype);
}

}  // namespace

void AttentionCall::DescribeOutputs() {
  const AttentionSpec& spec = header_.spec;
  const auto describe = [this](v1::Tensor* tensor, int index, const std::vector<int64_t>& shape) {
    tensor->set_dtype(ToProto(output_plan_[index].dtype));
    tensor->mutable_shape()->Assign(shape.begin(), shape.end());
    tensor->set_payload(static_cast<uint32_t>(index));
  };
  if (pass_ == Pass::kForward) {
    auto* header = google::protobuf::Arena::CreateMessage<v1::ForwardResponseHeader>(&arena_);
    std::vector<int64_t> shape = spec.q.shape;
    shape.back() = problem_.head_dim_v;
    describe(header->mutable_out(), 0, shape);
    if (problem_.layout == Layout::kBshd) {
      describe(header->mutable_lse(), 1, {problem_.batch, problem_.num_heads, problem_.seqlen_q});
    } else {
      describe(header->mutable_lse(), 1, {problem_.num_heads, problem_.total_q});
    }
    response_header_ = header;
    return;
  }
  auto* header = google::protobuf::Arena::CreateMessage<v1::BackwardResponseHeader>(&arena_);
  describe(header->mutable_dq(), 0, spec.q.shape);
  describe(header->mutable_dk(), 1, spec.k.shape);
  describe(header->mutable_dv(), 2, spec.v.shape);
  int next = 3;
  if (problem_.bias) describe(header->mutable_dbias(), next++, spec.bias->shape);
  if (problem_.has_sinks) describe(header->mutable_dsink(), next++, {problem_.num_heads});
  response_header_ = header;
}

const v1::ExecutionReport& AttentionCall::Report() {
  const PathId path = *choice_.path;
  const uint64_t flops = flops_.value_or(0);
  const uint64_t kernel_ns = Nanoseconds(times_.run, times_.ran);
  const uint64_t standard = StandardBytes(problem_, pass_, ScoreBytes(path, problem_.dtype));
  report_ = google::protobuf::Arena::CreateMessage<v1::ExecutionReport>(&arena_);
  v1::ExecutionReport& r = *report_;
  r.set_pass(ToProto(pass_));
  r.set_path_class(ToProto(ClassOf(path)));
  r.set_device_kind(ToProto(DeviceOf(path)));
  r.set_path(std::string(Name(path)));
  r.set_kernel(kernel_);
  r.mutable_rejections()->Reserve(static_cast<int>(choice_.rejections.size()));
  for (const Rejection& rejection : choice_.rejections) {
    ToProto(rejection, header_.full_report, r.add_rejections());
  }
  r.set_fused_batch(1);
  r.set_flops(flops);
  if (kernel_ns > 0) {
    r.set_achieved_tflops(static_cast<double>(flops) / static_cast<double>(kernel_ns) * 1e-3);
    r.set_achieved_gb_per_s(static_cast<double>(compulsory_bytes_) /
                            static_cast<double>(kernel_ns));
  }
  r.set_request_id(request_id_);

  v1::Traffic& traffic = *r.mutable_traffic();
  traffic.set_wire_request_bytes(InputBytes());
  traffic.set_wire_response_bytes(OutputBytes());
  traffic.set_compulsory_bytes(compulsory_bytes_);
  traffic.set_tile_bytes(model_.bytes());
  traffic.set_standard_bytes(standard);

  // Gathering comes before the queue in a stream (chunks arrive, then the call waits) and after it
  // in a unary call (the bytes are copied when a worker takes the call up).
  const bool streamed = method_ == Method::kForwardStream || method_ == Method::kBackwardStream;
  const bool queued = times_.queued != TimePoint();
  const uint64_t queue_ns = queued ? Nanoseconds(times_.queued, times_.started) : 0;
  const TimePoint gather_from = streamed || !queued ? times_.parsed : times_.started;
  const TimePoint now = context_->clock->Now();
  v1::StageTimes& times = *r.mutable_times();
  times.set_parse_ns(Nanoseconds(times_.start, times_.parsed));
  times.set_gather_ns(Nanoseconds(gather_from, times_.gathered));
  times.set_queue_ns(queue_ns);
  times.set_kernel_ns(kernel_ns);
  times.set_reply_ns(Nanoseconds(times_.ran, now));
  times.set_handler_ns(Nanoseconds(times_.start, now));

  Metrics& metrics = *context_->metrics;
  const auto observe = [this, &metrics](Stage stage, uint64_t ns) {
    metrics.ObserveStage(stage, pass_, std::chrono::nanoseconds(ns));
  };
  observe(Stage::kParse, times.parse_ns());
  observe(Stage::kGather, times.gather_ns());
  observe(Stage::kQueue, queue_ns);
  observe(Stage::kKernel, kernel_ns);
  observe(Stage::kReply, times.reply_ns());
  metrics.CountBytes(ByteLevel::kWireRequest, traffic.wire_request_bytes());
  metrics.CountBytes(ByteLevel::kWireResponse, traffic.wire_response_bytes());
  metrics.CountBytes(ByteLevel::kCompulsory, compulsory_bytes_);
  metrics.CountBytes(ByteLevel::kTile, model_.bytes());
  metrics.CountBytes(ByteLevel::kStandard, standard);
  return r;
}

}  // namespace attn::server
