#include "server/metrics/http.h"

#include <CivetServer.h>

#include <vector>

#include "kernels/api/text.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

void Reply(mg_connection* connection, int code, const std::string& type, const std::string& body) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
            "Cache-Control: no-store\r\n\r\n",
            code, code == 200 ? "OK" : "Service Unavailable", type.c_str(), body.size());
  mg_write(connection, body.data(), body.size());
}

class MetricsPage : public CivetHandler {
 public:
  explicit MetricsPage(std::function<std::string()> text) : text_(std::move(text)) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    Reply(connection, 200, "text/plain; version=0.0.4; charset=utf-8", text_());
    return true;
  }

 private:
  std::function<std::string()> text_;
};

class StatePage : public CivetHandler {
 public:
  explicit StatePage(std::function<bool()> good) : good_(std::move(good)) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    const bool good = good_();
    Reply(connection, good ? 200 : 503, "text/plain", good ? "ok\n" : "not ready\n");
    return true;
  }

 private:
  std::function<bool()> good_;
};

int LogCivet(const mg_connection*, const char* message) {
  log::Debug("http", {{"message", message}});
  return 1;
}

class CivetHttpServer : public HttpServer {
 public:
  CivetHttpServer(const std::string& host, const std::vector<std::string>& options,
                  const CivetCallbacks& callbacks, Pages pages)
      : metrics_(std::move(pages.metrics)),
        alive_(std::move(pages.alive)),
        ready_(std::move(pages.ready)),
        server_(options, &callbacks) {
    server_.addHandler("/metrics$", &metrics_);
    server_.addHandler("/healthz$", &alive_);
    server_.addHandler("/readyz$", &ready_);
    const std::vector<int> ports = server_.getListeningPorts();
    bound_ = Cat(host, ":", ports.empty() ? 0 : ports[0]);
  }
  ~CivetHttpServer() override { server_.close(); }

  std::string bound_address() const override { return bound_; }

 private:
  MetricsPage metrics_;
  StatePage alive_;
  StatePage ready_;
  CivetServer server_;
  std::string bound_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Pages pages) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host == "localhost") host = "127.0.0.1";  // civetweb takes numeric addresses
  const std::string port = address.substr(colon + 1);
  // Two threads: a scrape and a probe may come together. Requests are small; 10 s frees a stuck
  // one.
  const std::vector<std::string> options = {
      "listening_ports", Cat(host, ":", port),       "num_threads", "2", "request_timeout_ms",
      "10000",           "enable_directory_listing", "no"};
  CivetCallbacks callbacks;
  callbacks.log_message = &LogCivet;
  try {
    return std::make_unique<CivetHttpServer>(host, options, callbacks, std::move(pages));
  } catch (const std::exception& error) {
    return absl::UnavailableError(Cat("--metrics-listen ", address,
                                      " cannot be bound: is another process using it? (",
                                      error.what(), ")"));
  }
}

}  // namespace attn::server
