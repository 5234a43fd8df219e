#include "server/rpc/service.h"

#include "attention/v1/attention.grpc.pb.h"
#include "server/config/log.h"
#include "server/rpc/call_reactors.h"
#include "server/rpc/convert.h"
#include "server/rpc/plan.h"

namespace attn::server {
namespace {

using ByteBuffer = grpc::ByteBuffer;
using RawStream = grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>;

using Raw1 = v1::Attention::WithRawCallbackMethod_Forward<v1::Attention::Service>;
using Raw2 = v1::Attention::WithRawCallbackMethod_Backward<Raw1>;
using Raw3 = v1::Attention::WithRawCallbackMethod_ForwardStream<Raw2>;
using Raw4 = v1::Attention::WithRawCallbackMethod_BackwardStream<Raw3>;
using Typed1 = v1::Attention::WithCallbackMethod_Plan<Raw4>;
using AttentionBase = v1::Attention::WithCallbackMethod_GetServerInfo<Typed1>;

class AttentionService final : public AttentionBase {
 public:
  explicit AttentionService(ServiceContext* context) : context_(context) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* rpc, const ByteBuffer* request,
                                    ByteBuffer* response) override {
    return StartUnaryCall(context_, Pass::kForward, rpc, request, response);
  }
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* rpc, const ByteBuffer* request,
                                     ByteBuffer* response) override {
    return StartUnaryCall(context_, Pass::kBackward, rpc, request, response);
  }
  RawStream* ForwardStream(grpc::CallbackServerContext* rpc) override {
    return StartStreamCall(context_, Pass::kForward, rpc);
  }
  RawStream* BackwardStream(grpc::CallbackServerContext* rpc) override {
    return StartStreamCall(context_, Pass::kBackward, rpc);
  }

  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* rpc, const v1::PlanRequest* request,
                                 v1::PlanResponse* response) override {
    absl::Status status = context_->admission->draining()
                              ? absl::UnavailableError("the server is draining")
                              : MakePlan(*context_, *request, response);
    return Answer(rpc, Method::kPlan, status);
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* rpc,
                                          const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse* response) override {
    absl::Status status = absl::OkStatus();
    if (context_->admission->draining()) {
      status = absl::UnavailableError("the server is draining");
    } else {
      FillServerInfo(*context_, response);
    }
    return Answer(rpc, Method::kGetServerInfo, status);
  }

 private:
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* rpc, Method method,
                                   const absl::Status& status) {
    context_->metrics->CountRequest(method, status.code());
    const std::optional<wire::TraceContext> trace = TraceOf(*rpc);
    AddTrace(trace, rpc);
    log::Debug("call", {{"method", Name(method)},
                        {"code", CodeName(status.code())},
                        {"trace_id", trace ? trace->trace_id() : std::string()},
                        {"span_id", trace ? trace->span_id() : std::string()},
                        {"error", status.message()}});
    grpc::ServerUnaryReactor* reactor = rpc->DefaultReactor();
    reactor->Finish(wire::ToGrpc(status));
    return reactor;
  }

  ServiceContext* const context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAttentionService(ServiceContext* context) {
  return std::make_unique<AttentionService>(context);
}

void FillServerInfo(const ServiceContext& context, v1::GetServerInfoResponse* response) {
  response->set_version(Version());
  response->set_git_commit(GitCommit());
  std::vector<DeviceStatus> health;
  if (context.device_hooks.present()) health = context.device_hooks.status();
  for (const v1::DeviceInfo& device : context.devices) {
    v1::DeviceInfo& out = *response->add_devices();
    out = device;
    for (const DeviceStatus& status : health) {
      if (device.kind() == v1::DEVICE_KIND_CUDA && status.index == device.index()) {
        out.set_error(status.error);
      }
    }
    if (device.kind() != v1::DEVICE_KIND_CPU) continue;
    out.set_matrix_tflops(context.rates->BestForwardFlopsPerSecond() * 1e-12);
    out.set_copy_gb_per_s(context.rates->copy_bytes_per_second() * 1e-9);
  }
  const PathTable::Snapshot candidates = context.paths->candidates();
  for (const PathCandidate& candidate : *candidates) {
    v1::PathInfo& path = *response->add_paths();
    path.set_path(std::string(Name(candidate.path)));
    path.set_path_class(ToProto(ClassOf(candidate.path)));
    path.set_device_kind(ToProto(DeviceOf(candidate.path)));
    path.set_available(candidate.backend != nullptr && candidate.standing.empty());
    for (const Rejection& rejection : candidate.standing) {
      ToProto(rejection, /*full=*/true, path.add_rejections());
    }
  }
  v1::ServerLimits& limits = *response->mutable_limits();
  limits.set_max_header_bytes(wire::kMaxHeaderBytes);
  limits.set_max_chunk_bytes(wire::kMaxChunkBytes);
  limits.set_max_unary_bytes(context.config.max_unary_bytes);
  limits.set_max_request_bytes(context.config.max_request_bytes);
  limits.set_max_inflight_bytes(context.config.max_inflight_bytes);
  limits.set_max_inflight_requests(static_cast<uint32_t>(context.config.max_inflight_requests));
  limits.set_workspace_limit_bytes(context.config.workspace_limit_bytes);
  limits.set_max_head_dim(kMaxHeadDim);
  response->set_uptime_ns(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(context.clock->Now() - context.started)
          .count()));
}

}  // namespace attn::server
