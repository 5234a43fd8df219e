// What Metrics keeps beside its cells. Private to server/metrics.
#ifndef ATTN_SERVER_METRICS_REGISTRY_H_
#define ATTN_SERVER_METRICS_REGISTRY_H_

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <string>
#include <vector>

#include "kernels/api/mutex.h"
#include "server/metrics/metrics.h"

namespace attn::server {

struct Metrics::Registry {
  struct Live {
    std::string name;
    std::string help;
    std::vector<LiveSeries> series;
  };

  prometheus::Registry registry;
  std::array<prometheus::Gauge*, kAllPaths.size()> available{};
  mutable Mutex mutex;
  std::vector<Live> live ATTN_GUARDED_BY(mutex);

  prometheus::Family<prometheus::Gauge>& Gauges(const std::string& name, const std::string& help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
};

// The work of one device.
struct Metrics::DeviceCells {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  Sum calls, flops, bytes, kernel_seconds, roofline_seconds;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_REGISTRY_H_
