// A server's /metrics page, before and after a load.
#ifndef ATTN_CLIENT_LOAD_METRICS_H_
#define ATTN_CLIENT_LOAD_METRICS_H_

#include <chrono>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace attn::load {

// Host, port and path of "http://HOST[:PORT][/PATH]"; "http://" may be left out, the port is 80 and
// the path /metrics where none is given. IPv6 addresses stand in brackets.
struct MetricsUrl {
  std::string host, port, path;
};
// Errors: INVALID_ARGUMENT, also for https.
absl::StatusOr<MetricsUrl> ParseMetricsUrl(const std::string& url);

// GET. Errors: UNAVAILABLE (no connection, a status other than 200), DEADLINE_EXCEEDED, INTERNAL
// (not HTTP, or a page over 64 MiB). All name the URL.
absl::StatusOr<std::string> FetchPage(const MetricsUrl& url, std::chrono::milliseconds timeout);

// Samples by name with labels as they stand on the page: "attn_x_total{pass=\"forward\"}".
struct Samples {
  std::map<std::string, double> values;
  std::map<std::string, std::string> types;  // of families: "counter", "gauge", "histogram", …
};
// Reads the Prometheus text format. Errors: INVALID_ARGUMENT, naming the line.
absl::StatusOr<Samples> ParseExposition(std::string_view page);

// How counters and histograms grew: samples that changed, by how much. A sample that is new counts
// from 0. Gauges and bucket series are left out: a difference of a gauge says nothing, and buckets
// are many.
std::map<std::string, double> Differences(const Samples& before, const Samples& after);

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_METRICS_H_
