// The last calls as the status page shows them: one by one, and by the shapes that were served.
#ifndef ATTN_SERVER_RPC_STATUS_CALLS_H_
#define ATTN_SERVER_RPC_STATUS_CALLS_H_

#include <nlohmann/json_fwd.hpp>
#include <span>

#include "server/rpc/recent_calls.h"

namespace attn::server {

using CallRecords = std::span<const CallRecord>;

// In the order given; server/README.md has the keys. Thread-safe.
nlohmann::ordered_json CallsJson(CallRecords calls);

// The calls that were answered, by shape, pass and path, the most frequent first: how many, and of
// one call on average its time, FLOPs and bytes. Thread-safe.
nlohmann::ordered_json ShapesJson(CallRecords calls);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_STATUS_CALLS_H_
