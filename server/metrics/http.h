// The HTTP side: /metrics for Prometheus, /healthz and /readyz for orchestrators.
#ifndef ATTN_SERVER_METRICS_HTTP_H_
#define ATTN_SERVER_METRICS_HTTP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace attn::server {

// Serves until destroyed. The functions are called from HTTP threads and must be thread-safe.
class HttpServer {
 public:
  struct Pages {
    std::function<std::string()> metrics;  // the Prometheus text format
    std::function<bool()> alive;           // /healthz: 200 or 503
    std::function<bool()> ready;           // /readyz: 200 or 503
  };

  // `address` is host:port; port 0 lets the system choose. Errors: UNAVAILABLE where the address
  // cannot be bound (names it).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Pages pages);
  virtual ~HttpServer() = default;

  virtual std::string bound_address() const = 0;  // host:port
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_HTTP_H_
