// The gauges that are read when scraped: what the server holds at that moment.
#ifndef ATTN_SERVER_RPC_SERVER_METRICS_H_
#define ATTN_SERVER_RPC_SERVER_METRICS_H_

#include <memory>

#include "server/metrics/sensors.h"
#include "server/rpc/service_context.h"
#include "server/status/serving_state.h"

namespace attn::server {

// Everything must outlive the gauges: see Metrics::RemoveLive(). `sensors` may be null.
void AddServerMetrics(const ServiceContext& context, const ServingState& state,
                      const std::shared_ptr<const DeviceSensors>& sensors, Metrics* metrics);

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_SERVER_METRICS_H_
