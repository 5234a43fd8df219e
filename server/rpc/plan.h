// Plan: what a call would do and cost, without running it.
#ifndef ATTN_SERVER_RPC_PLAN_H_
#define ATTN_SERVER_RPC_PLAN_H_

#include "absl/status/status.h"
#include "attention/v1/attention.pb.h"
#include "server/rpc/service_context.h"

namespace attn::server {

// Errors: as Forward and Backward have for the same header, except that a path policy that cannot
// be met gives an answer without a path. Thread-safe.
absl::Status MakePlan(const ServiceContext& context, const ::attention::v1::PlanRequest& request,
                      ::attention::v1::PlanResponse* response);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_PLAN_H_
