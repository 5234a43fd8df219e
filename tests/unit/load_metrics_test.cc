#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "client/load/metrics.h"

namespace attn::load {
namespace {

using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

TEST(MetricsUrlTest, PartsAndDefaults) {
  const auto full = ParseMetricsUrl("http://host.example:9464/other");
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->host, "host.example");
  EXPECT_EQ(full->port, "9464");
  EXPECT_EQ(full->path, "/other");
  const auto bare = ParseMetricsUrl("127.0.0.1:9464");
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->path, "/metrics");
  const auto six = ParseMetricsUrl("http://[::1]:9464");
  ASSERT_TRUE(six.ok());
  EXPECT_EQ(six->host, "::1");
  EXPECT_EQ(ParseMetricsUrl("http://[::1]/x")->port, "80");
  for (const char* bad : {"", "https://host/metrics", "http://:9464", "host:abc", "host:1 /x",
                          "http://host:1\r\nX: y"}) {
    EXPECT_FALSE(ParseMetricsUrl(bad).ok()) << bad;
  }
}

constexpr char kPage[] =
    "# HELP attn_requests_total Calls.\n"
    "# TYPE attn_requests_total counter\n"
    "attn_requests_total{code=\"OK\"} 10\n"
    "attn_requests_total{code=\"A \\\"b\\\" c\"} 2 1700000000\n"
    "# TYPE attn_inflight gauge\n"
    "attn_inflight 3\n"
    "# TYPE attn_latency_seconds histogram\n"
    "attn_latency_seconds_bucket{le=\"+Inf\"} 12\n"
    "attn_latency_seconds_sum 1.5\r\n"
    "attn_latency_seconds_count 12\n"
    "nan_value NaN\n";

TEST(ExpositionTest, ReadsSamplesAndTypes) {
  const auto samples = ParseExposition(kPage);
  ASSERT_TRUE(samples.ok()) << samples.status();
  EXPECT_EQ(samples->values.at("attn_requests_total{code=\"OK\"}"), 10);
  EXPECT_EQ(samples->values.at("attn_requests_total{code=\"A \\\"b\\\" c\"}"), 2);
  EXPECT_EQ(samples->values.at("attn_latency_seconds_sum"), 1.5);
  EXPECT_EQ(samples->types.at("attn_inflight"), "gauge");
}

TEST(ExpositionTest, NamesTheBadLine) {
  const auto samples = ParseExposition("good 1\nbad\n");
  ASSERT_FALSE(samples.ok());
  EXPECT_THAT(std::string(samples.status().message()), HasSubstr("line 2"));
  EXPECT_FALSE(ParseExposition("x 1y\n").ok());
  EXPECT_FALSE(ParseExposition("<html>\n").ok());
}

TEST(ExpositionTest, DifferencesAreOfWhatGrows) {
  const auto before = ParseExposition(kPage);
  auto after = *before;
  after.values["attn_requests_total{code=\"OK\"}"] = 15;
  after.values["attn_requests_total{code=\"NEW\"}"] = 1;
  after.values["attn_inflight"] = 7;
  after.values["attn_latency_seconds_bucket{le=\"+Inf\"}"] = 20;
  after.values["attn_latency_seconds_count"] = 20;
  EXPECT_THAT(Differences(*before, after),
              UnorderedElementsAre(Pair("attn_requests_total{code=\"OK\"}", 5),
                                   Pair("attn_requests_total{code=\"NEW\"}", 1),
                                   Pair("attn_latency_seconds_count", 8)));
}

// Answers one connection with `reply`.
class OneAnswer {
 public:
  explicit OneAnswer(std::string reply) : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, reply] {
      const int fd = accept(listener_, nullptr, nullptr);
      char buffer[4096];
      const ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      request_.assign(buffer, static_cast<size_t>(std::max<ssize_t>(0, n)));
      if (!reply.empty()) {
        send(fd, reply.data(), reply.size(), MSG_NOSIGNAL);
      } else {
        // Until the client gives up.
        while (recv(fd, buffer, sizeof buffer, 0) > 0) {
        }
      }
      close(fd);
    });
  }
  ~OneAnswer() {
    thread_.join();
    close(listener_);
  }
  MetricsUrl url() const { return {"127.0.0.1", std::to_string(port_), "/metrics"}; }
  const std::string& request() const { return request_; }

 private:
  const int listener_;
  int port_ = 0;
  std::string request_;
  std::thread thread_;
};

TEST(FetchPageTest, GetsTheBody) {
  OneAnswer server("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nattn_x 1\n");
  const auto page = FetchPage(server.url(), std::chrono::seconds(10));
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(*page, "attn_x 1\n");
}

TEST(FetchPageTest, SaysWhatIsWrong) {
  {
    OneAnswer server("HTTP/1.1 404 Not Found\r\n\r\n");
    const auto page = FetchPage(server.url(), std::chrono::seconds(10));
    EXPECT_THAT(std::string(page.status().message()), HasSubstr("404 Not Found"));
  }
  {
    OneAnswer server("SSH-2.0\r\n");
    EXPECT_EQ(FetchPage(server.url(), std::chrono::seconds(10)).status().code(),
              absl::StatusCode::kInternal);
  }
  {
    OneAnswer server("");
    EXPECT_EQ(FetchPage(server.url(), std::chrono::milliseconds(50)).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  const MetricsUrl nobody = {"127.0.0.1", "1", "/metrics"};
  EXPECT_EQ(FetchPage(nobody, std::chrono::seconds(10)).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace attn::load
