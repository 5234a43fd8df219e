// gRPC's side of a call: starts handlers for the raw methods of attention.v1.Attention.
#ifndef ATTN_SERVER_RPC_CALL_REACTORS_H_
#define ATTN_SERVER_RPC_CALL_REACTORS_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <optional>

#include "proto/wire/trace_context.h"
#include "server/metrics/metrics.h"
#include "server/rpc/attention_call.h"
#include "server/rpc/service_context.h"

namespace attn::server {

// Handles one Forward or Backward. `request` and `response` are gRPC's and live until the call is
// done. The reactor deletes itself.
grpc::ServerUnaryReactor* StartUnaryCall(ServiceContext* context, Pass pass,
                                         grpc::CallbackServerContext* rpc,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response);

// Handles one ForwardStream or BackwardStream. The reactor deletes itself.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartStreamCall(
    ServiceContext* context, Pass pass, grpc::CallbackServerContext* rpc);

// The call's deadline on the steady clock; max() where it has none.
TimePoint DeadlineOf(const grpc::CallbackServerContext& rpc, const Clock& clock);

// A new span in the trace that the call's metadata names. nullopt: none does, or not validly, which
// includes more than one value.
std::optional<wire::TraceContext> TraceOf(const grpc::CallbackServerContext& rpc);

// Tells the caller of the span; nothing without one. Call before finishing the call.
void AddTrace(const std::optional<wire::TraceContext>& trace, grpc::CallbackServerContext* rpc);

// Puts the path, kernel and rejections, or the retry hint, and the span into the trailing metadata.
// Call before finishing the call.
void AddTrailingMetadata(const AttentionCall& call, grpc::CallbackServerContext* rpc);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_CALL_REACTORS_H_
