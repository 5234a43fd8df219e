// The part of AttentionCall that writes the execution report.
#include "server/rpc/attention_call.h"

namespace attn::server {
namespace {

uint64_t Nanoseconds(TimePoint from, TimePoint to) {
  if (to <= from) return 0;
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
}

}  // namespace

void AttentionCall::ReportDevice(v1::ExecutionReport* report) const {
  const DeviceTimes& times = device_times_;
  report->set_device_index(times.device_index);
  v1::StageTimes& stages = *report->mutable_times();
  stages.set_device_queue_ns(times.queue_ns);
  stages.set_host_to_device_ns(times.host_to_device_ns);
  stages.set_device_to_host_ns(times.device_to_host_ns);
  v1::Traffic& traffic = *report->mutable_traffic();
  traffic.set_host_to_device_bytes(times.host_to_device_bytes);
  traffic.set_device_to_host_bytes(times.device_to_host_bytes);
  if (times.kernel_ns > 0) {
    report->set_fraction_of_roofline(RooflineNs() / static_cast<double>(times.kernel_ns));
  }
  Metrics& metrics = *context_->metrics;
  const auto observe = [this, &metrics](Stage stage, uint64_t ns) {
    metrics.ObserveStage(stage, pass_, std::chrono::nanoseconds(ns));
  };
  observe(Stage::kDeviceQueue, times.queue_ns);
  observe(Stage::kHostToDevice, times.host_to_device_ns);
  observe(Stage::kDeviceToHost, times.device_to_host_ns);
  const PathId path = *plan_->choice.path;
  metrics.CountBytes(ByteLevel::kHostToDevice, pass_, path, times.host_to_device_bytes);
  metrics.CountBytes(ByteLevel::kDeviceToHost, pass_, path, times.device_to_host_bytes);
}

const v1::ExecutionReport& AttentionCall::Report() {
  const PathId path = *plan_->choice.path;
  const CallCost& cost = *cost_;
  const std::vector<Rejection>& rejections = plan_->choice.rejections;
  const auto kernel_ns = static_cast<uint64_t>(KernelTime().count());
  report_ = google::protobuf::Arena::CreateMessage<v1::ExecutionReport>(&arena_);
  v1::ExecutionReport& r = *report_;
  r.set_pass(ToProto(pass_));
  r.set_path_class(ToProto(ClassOf(path)));
  r.set_device_kind(ToProto(DeviceOf(path)));
  r.set_path(std::string(Name(path)));
  r.set_kernel(plan_->kernel);
  r.mutable_rejections()->Reserve(static_cast<int>(rejections.size()));
  for (const Rejection& rejection : rejections) {
    ToProto(rejection, plan_->header.full_report, r.add_rejections());
  }
  r.set_fused_batch(1);
  r.set_flops(cost.flops);
  if (kernel_ns > 0) {
    r.set_achieved_tflops(static_cast<double>(cost.flops) / static_cast<double>(kernel_ns) * 1e-3);
    r.set_achieved_gb_per_s(static_cast<double>(cost.compulsory_bytes) /
                            static_cast<double>(kernel_ns));
  }
  r.set_request_id(request_id_);
  if (trace_) {
    r.set_trace_id(trace_->trace_id());
    r.set_span_id(trace_->span_id());
  }
  if (on_cuda()) ReportDevice(&r);

  v1::Traffic& traffic = *r.mutable_traffic();
  traffic.set_wire_request_bytes(InputBytes());
  traffic.set_wire_response_bytes(plan_->OutputBytes());
  traffic.set_compulsory_bytes(cost.compulsory_bytes);
  traffic.set_tile_bytes(cost.model.bytes());
  traffic.set_standard_bytes(cost.standard_bytes);

  // Gathering comes before the queue in a stream (chunks arrive, then the call waits) and after it
  // in a unary call (the bytes are copied when a worker takes the call up).
  const bool streamed = method_ == Method::kForwardStream || method_ == Method::kBackwardStream;
  const bool queued = times_.queued != TimePoint();
  const uint64_t queue_ns = queued ? Nanoseconds(times_.queued, times_.started) : 0;
  const TimePoint gather_from = streamed || !queued ? times_.parsed : times_.started;
  const TimePoint now = context_->clock->Now();
  v1::StageTimes& times = *r.mutable_times();
  times.set_parse_ns(Nanoseconds(times_.start, times_.parsed));
  times.set_gather_ns(Nanoseconds(gather_from, times_.gathered) + reading_ns_);
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
  metrics.CountBytes(ByteLevel::kWireRequest, pass_, path, traffic.wire_request_bytes());
  metrics.CountBytes(ByteLevel::kWireResponse, pass_, path, traffic.wire_response_bytes());
  return r;
}

}  // namespace attn::server
