// Which path each kind of device would take for calls as they are typical, and why not a faster
// one.
#ifndef ATTN_SERVER_RPC_STATUS_PLANS_H_
#define ATTN_SERVER_RPC_STATUS_PLANS_H_

#include <nlohmann/json_fwd.hpp>

#include "server/rpc/service_context.h"

namespace attn::server {

// For each representative shape, dtype, pass and kind of device what SelectPath() says, that is,
// what Forward and Backward would do; server/README.md has the keys. It changes only when the path
// table does. Takes some milliseconds. Thread-safe.
nlohmann::ordered_json PlansJson(const ServiceContext& context);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_STATUS_PLANS_H_
