// The HTTP side: the status page, /metrics for Prometheus, /healthz and /readyz for orchestrators.
#ifndef ATTN_SERVER_METRICS_HTTP_H_
#define ATTN_SERVER_METRICS_HTTP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace attn::server {

// Serves until destroyed. The functions are called from HTTP threads and must be thread-safe.
//
// Read-only: GET and HEAD are answered, every other method is 405 whatever the path. No reply may
// be taken for another type than its Content-Type, read by pages of other origins, or kept in a
// cache.
class HttpServer {
 public:
  struct Document {
    std::string html;
    std::string security_policy;  // the value of Content-Security-Policy
  };
  struct Pages {
    std::function<std::string()> metrics;  // the Prometheus text format
    std::function<bool()> alive;           // /healthz: 200 or 503
    std::function<bool()> ready;           // /readyz: 200 or 503
    std::function<Document()> status;      // /; empty: 404
    std::function<std::string()> json;     // /status.json; empty: 404
  };

  // `address` is host:port; port 0 lets the system choose. Errors: UNAVAILABLE where the address
  // cannot be bound (names it).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Pages pages);
  virtual ~HttpServer() = default;

  virtual std::string bound_address() const = 0;  // host:port
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_HTTP_H_
