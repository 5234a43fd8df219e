#include "server/metrics/http.h"

#include <CivetServer.h>

#include <string_view>
#include <utility>
#include <vector>

#include "kernels/api/text.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

struct Answer {
  int code = 200;
  std::string type;
  std::string body;
  std::string headers = "";  // more of them, each with its line end
};

std::string_view Phrase(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 405:
      return "Method Not Allowed";
    default:
      return "Service Unavailable";
  }
}

void Reply(mg_connection* connection, const Answer& answer, bool with_body) {
  const std::string head =
      Cat("HTTP/1.1 ", answer.code, " ", Phrase(answer.code), "\r\nContent-Type: ", answer.type,
          "\r\nContent-Length: ", answer.body.size(),
          "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
          "Cross-Origin-Resource-Policy: same-origin\r\nConnection: close\r\n",
          answer.headers, "\r\n");
  mg_write(connection, head.data(), head.size());
  if (with_body) mg_write(connection, answer.body.data(), answer.body.size());
}

class Page : public CivetHandler {
 public:
  explicit Page(std::function<Answer()> answer) : answer_(std::move(answer)) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    Reply(connection, answer_(), /*with_body=*/true);
    return true;
  }
  bool handleHead(CivetServer*, mg_connection* connection) override {
    Reply(connection, answer_(), /*with_body=*/false);
    return true;
  }

 private:
  const std::function<Answer()> answer_;
};

std::function<Answer()> Probe(std::function<bool()> good) {
  return [good = std::move(good)] {
    return good() ? Answer{200, "text/plain", "ok\n"} : Answer{503, "text/plain", "not ready\n"};
  };
}

std::function<Answer()> Text(std::function<std::string()> text, const char* type) {
  return [text = std::move(text), type] { return Answer{200, type, text()}; };
}

std::function<Answer()> Html(std::function<HttpServer::Document()> document) {
  return [document = std::move(document)] {
    HttpServer::Document page = document();
    return Answer{200, "text/html; charset=utf-8", std::move(page.html),
                  Cat("Content-Security-Policy: ", page.security_policy,
                      "\r\nReferrer-Policy: no-referrer\r\n")};
  };
}

int LogCivet(const mg_connection*, const char* message) {
  log::Debug("http", {{"message", message}});
  return 1;
}

// Before any page is looked up, so that no method is left to civetweb's file server, which has
// answers for PUT, DELETE, OPTIONS and PROPFIND.
int RefuseWrites(mg_connection* connection) {
  const mg_request_info* request = mg_get_request_info(connection);
  const std::string_view method = request->request_method;
  if (method == "GET" || method == "HEAD") return 0;
  // What the body holds is not read, so the connection cannot go on.
  Reply(connection,
        {405, "text/plain", "this port is read-only: GET and HEAD\n", "Allow: GET, HEAD\r\n"},
        /*with_body=*/true);
  return 405;
}

class CivetHttpServer : public HttpServer {
 public:
  CivetHttpServer(const std::string& host, const std::vector<std::string>& options,
                  const CivetCallbacks& callbacks, Pages pages)
      : server_(options, &callbacks) {
    Add("/metrics$", Text(std::move(pages.metrics), "text/plain; version=0.0.4; charset=utf-8"));
    Add("/healthz$", Probe(std::move(pages.alive)));
    Add("/readyz$", Probe(std::move(pages.ready)));
    if (pages.status) Add("/$", Html(std::move(pages.status)));
    if (pages.json) Add("/status.json$", Text(std::move(pages.json), "application/json"));
    const std::vector<int> ports = server_.getListeningPorts();
    bound_ = Cat(host, ":", ports.empty() ? 0 : ports[0]);
  }
  ~CivetHttpServer() override { server_.close(); }

  std::string bound_address() const override { return bound_; }

 private:
  void Add(const char* path, std::function<Answer()> answer) {
    pages_.push_back(std::make_unique<Page>(std::move(answer)));
    server_.addHandler(path, pages_.back().get());
  }

  std::vector<std::unique_ptr<Page>> pages_;
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
  // A scrape and a probe may come together with pages. A browser opens connections before it has
  // something to ask, and each holds a thread until it does or 10 s are over: browsers alone must
  // not keep a probe waiting.
  const std::vector<std::string> options = {
      "listening_ports", Cat(host, ":", port),       "num_threads", "8", "request_timeout_ms",
      "10000",           "enable_directory_listing", "no"};
  CivetCallbacks callbacks;
  callbacks.log_message = &LogCivet;
  callbacks.begin_request = &RefuseWrites;
  try {
    return std::make_unique<CivetHttpServer>(host, options, callbacks, std::move(pages));
  } catch (const std::exception& error) {
    return absl::UnavailableError(Cat("--metrics-listen ", address,
                                      " cannot be bound: is another process using it? (",
                                      error.what(), ")"));
  }
}

}  // namespace attn::server
