// attention.v1.Attention as gRPC sees it: raw methods where tensors travel, typed ones elsewhere.
#ifndef ATTN_SERVER_RPC_SERVICE_H_
#define ATTN_SERVER_RPC_SERVICE_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/service_type.h>

#include <memory>

#include "server/rpc/service_context.h"

namespace attn::server {

// `context` must outlive the service.
std::unique_ptr<grpc::Service> MakeAttentionService(ServiceContext* context);

// Fills in what GetServerInfo answers.
void FillServerInfo(const ServiceContext& context,
                    ::attention::v1::GetServerInfoResponse* response);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_SERVICE_H_
