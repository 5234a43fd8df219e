#include "client/load/metrics.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/api/text.h"

namespace attn::load {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxPageBytes = 64 << 20;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// False: the deadline passed first.
bool Ready(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd item = {fd, events, 0};
    const int ready = poll(&item, 1, static_cast<int>(left));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the next call on it says what is wrong
  }
}

std::string ErrorText(int error) {
  char buffer[128];
  return strerror_r(error, buffer, sizeof buffer);
}

// Sends the request and reads until the server closes.
absl::StatusOr<std::string> Exchange(const addrinfo& address, const std::string& request,
                                     Clock::time_point deadline) {
  const Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) return absl::UnavailableError(ErrorText(errno));
  if (connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) {
    return absl::UnavailableError(ErrorText(errno));
  }
  size_t sent = 0;
  while (sent < request.size()) {
    if (!Ready(socket.fd(), POLLOUT, deadline)) return absl::DeadlineExceededError("no answer");
    const ssize_t n = send(socket.fd(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (errno != EAGAIN && errno != EINTR) {
      return absl::UnavailableError(ErrorText(errno));
    }
  }
  std::string reply;
  std::string buffer(1 << 16, '\0');
  for (;;) {
    if (!Ready(socket.fd(), POLLIN, deadline)) return absl::DeadlineExceededError("no answer");
    const ssize_t n = recv(socket.fd(), buffer.data(), buffer.size(), 0);
    if (n == 0) return reply;
    if (n > 0) {
      reply.append(buffer, 0, static_cast<size_t>(n));
      if (reply.size() > kMaxPageBytes) return absl::InternalError("a page of over 64 MiB");
    } else if (errno != EAGAIN && errno != EINTR) {
      return absl::UnavailableError(ErrorText(errno));
    }
  }
}

// The body of a reply with status 200. The request was HTTP/1.0, so it is not chunked.
absl::StatusOr<std::string> BodyOf(const std::string& reply) {
  const size_t end = reply.find("\r\n\r\n");
  if (!reply.starts_with("HTTP/1.") || end == std::string::npos) {
    return absl::InternalError("the answer is not HTTP");
  }
  if (reply.size() < 12 || reply.compare(9, 3, "200") != 0) {
    return absl::UnavailableError(Cat("answered ", reply.substr(0, reply.find("\r\n"))));
  }
  return reply.substr(end + 4);
}

// The family that a sample belongs to, and whether it is a bucket of a histogram.
std::string FamilyOf(const std::string& sample, const Samples& samples, bool* bucket) {
  std::string name = sample.substr(0, sample.find('{'));
  *bucket = false;
  if (samples.types.contains(name)) return name;
  for (const std::string_view suffix : {"_bucket", "_sum", "_count"}) {
    if (!name.ends_with(suffix)) continue;
    const std::string family = name.substr(0, name.size() - suffix.size());
    if (!samples.types.contains(family)) continue;
    *bucket = suffix == "_bucket";
    return family;
  }
  return name;
}

// Where the name and labels of a sample line end: at the first space outside of quotes.
size_t EndOfSample(std::string_view line) {
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quoted && line[i] == '\\') {
      ++i;
    } else if (line[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && (line[i] == ' ' || line[i] == '\t')) {
      return i;
    }
  }
  return std::string_view::npos;
}

}  // namespace

absl::StatusOr<MetricsUrl> ParseMetricsUrl(const std::string& url) {
  std::string rest = url;
  if (const size_t scheme = rest.find("://"); scheme != std::string::npos) {
    if (rest.substr(0, scheme) != "http") {
      return absl::InvalidArgumentError(Cat("'", url, "': only http:// is supported"));
    }
    rest.erase(0, scheme + 3);
  }
  MetricsUrl parsed;
  const size_t slash = rest.find('/');
  parsed.path = slash == std::string::npos ? "/metrics" : rest.substr(slash);
  std::string authority = rest.substr(0, slash);
  const size_t bracket = authority.rfind(']');
  const size_t colon = authority.rfind(':');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    parsed.port = authority.substr(colon + 1);
    authority.erase(colon);
  } else {
    parsed.port = "80";
  }
  if (authority.starts_with('[') && authority.ends_with(']')) {
    authority = authority.substr(1, authority.size() - 2);
  }
  parsed.host = authority;
  const bool digits = parsed.port.find_first_not_of("0123456789") == std::string::npos;
  const bool plain = url.find_first_of(" \r\n\t") == std::string::npos;
  if (parsed.host.empty() || parsed.port.empty() || !digits || !plain) {
    return absl::InvalidArgumentError(
        Cat("'", url, "' is not a URL such as http://127.0.0.1:9464/metrics"));
  }
  return parsed;
}

absl::StatusOr<std::string> FetchPage(const MetricsUrl& url, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const std::string where = Cat("http://", url.host, ":", url.port, url.path, ": ");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(url.host.c_str(), url.port.c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(Cat(where, gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  const std::string request = Cat("GET ", url.path, " HTTP/1.0\r\nHost: ", url.host,
                                  "\r\nAccept: text/plain\r\nConnection: close\r\n\r\n");
  absl::Status failure = absl::UnavailableError("no address");
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    absl::StatusOr<std::string> reply = Exchange(*address, request, deadline);
    if (reply.ok()) reply = BodyOf(*reply);
    if (reply.ok()) return reply;
    failure = reply.status();
  }
  return absl::Status(failure.code(), Cat(where, std::string(failure.message())));
}

absl::StatusOr<Samples> ParseExposition(std::string_view page) {
  Samples samples;
  int64_t number = 0;
  while (!page.empty()) {
    ++number;
    const size_t end = page.find('\n');
    std::string_view line = page.substr(0, end);
    page.remove_prefix(end == std::string_view::npos ? page.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.starts_with("# TYPE ")) {
      line.remove_prefix(7);
      const size_t space = line.find(' ');
      if (space != std::string_view::npos) {
        samples.types[std::string(line.substr(0, space))] = std::string(line.substr(space + 1));
      }
      continue;
    }
    if (line.empty() || line.starts_with('#')) continue;
    const size_t split = EndOfSample(line);
    // A timestamp may follow the value.
    const std::string text(split == std::string_view::npos ? "" : line.substr(split + 1));
    char* stop = nullptr;
    const double value = std::strtod(text.c_str(), &stop);
    if (stop == text.c_str() || (*stop != '\0' && *stop != ' ')) {
      return absl::InvalidArgumentError(Cat("line ", number, ": not a sample: ", line));
    }
    samples.values[std::string(line.substr(0, split))] = value;
  }
  return samples;
}

std::map<std::string, double> Differences(const Samples& before, const Samples& after) {
  std::map<std::string, double> differences;
  for (const auto& [sample, value] : after.values) {
    bool bucket = false;
    const auto type = after.types.find(FamilyOf(sample, after, &bucket));
    if (bucket || (type != after.types.end() && type->second == "gauge")) continue;
    const auto earlier = before.values.find(sample);
    const double grown = value - (earlier == before.values.end() ? 0.0 : earlier->second);
    if (grown != 0 && !std::isnan(grown)) differences[sample] = grown;
  }
  return differences;
}

}  // namespace attn::load
