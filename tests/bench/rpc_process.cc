#include "tests/bench/rpc_process.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attn::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(5);
constexpr auto kStartTimeout = std::chrono::seconds(120);  // sanitizer builds start slowly
constexpr const char* kGauges[] = {"attn_inflight_requests", "attn_inflight_bytes",
                                   "attn_queued_requests", "attn_queued_bytes"};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The body of http://127.0.0.1:port/path.
absl::StatusOr<std::string> HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::UnavailableError("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  std::string reply;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(request.size())) {
      char buffer[65536];
      for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) reply.append(buffer, n);
    }
  }
  close(fd);
  const size_t body = reply.find("\r\n\r\n");
  if (body == std::string::npos || reply.find(" 200 ") == std::string::npos) {
    return absl::UnavailableError(absl::StrCat("no answer for ", path, " on port ", port));
  }
  return reply.substr(body + 4);
}

absl::StatusOr<double> SumOf(const std::string& exposition, const std::string& name) {
  double sum = 0;
  bool found = false;
  std::istringstream lines(exposition);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, name.size(), name) != 0 || line.size() <= name.size()) continue;
    if (line[name.size()] != '{' && line[name.size()] != ' ') continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) {
      sum += value;
      found = true;
    }
  }
  if (!found) return absl::NotFoundError(absl::StrCat("no metric ", name));
  return sum;
}

}  // namespace

absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& arguments, const std::string& log) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    return absl::UnavailableError(
        absl::StrCat("starting ", arguments[0], ": ", std::strerror(errno)));
  }
  if (pid > 0) return pid;
  // In the child: only async-signal-safe calls. It ends with its parent, however that ends.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  if (!log.empty()) {
    const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
  }
  execv(argv[0], argv.data());
  _exit(127);
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "attn_bench_XXXXXX").string();
  if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(
    const std::string& attnd, std::vector<std::string> flags) {
  auto server = std::unique_ptr<ServerProcess>(new ServerProcess());
  const std::filesystem::path& directory = server->directory_.path();
  if (directory.empty()) return absl::UnavailableError("no temporary directory");
  const std::string ports_file = directory / "ports";
  server->log_path_ = directory / "log";
  std::vector<std::string> arguments = {attnd, "--listen=127.0.0.1:0",
                                        "--metrics-listen=127.0.0.1:0",
                                        absl::StrCat("--ports-file=", ports_file)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  absl::StatusOr<pid_t> pid = Spawn(arguments, server->log_path_);
  if (!pid.ok()) return pid.status();
  server->pid_ = *pid;
  const auto deadline = Clock::now() + kStartTimeout;
  while (Clock::now() < deadline) {
    const auto ports = nlohmann::json::parse(ReadFile(ports_file), nullptr, false);
    if (!ports.is_discarded()) {
      server->target_ = ports["listen"][0];
      const std::string metrics = ports["metrics"];
      server->metrics_port_ = std::atoi(metrics.substr(metrics.rfind(':') + 1).c_str());
      return server;
    }
    if (waitpid(server->pid_, nullptr, WNOHANG) == server->pid_) {
      server->pid_ = -1;
      break;
    }
    std::this_thread::sleep_for(kPoll);
  }
  return absl::UnavailableError(absl::StrCat(attnd, " did not start:\n", server->log()));
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::string ServerProcess::log() const { return ReadFile(log_path_); }

absl::StatusOr<double> ServerProcess::Metric(const std::string& name) const {
  const absl::StatusOr<std::string> page = HttpGet(metrics_port_, "/metrics");
  if (!page.ok()) return page.status();
  return SumOf(*page, name);
}

absl::Status ServerProcess::WaitIdle(std::chrono::milliseconds timeout) const {
  const auto deadline = Clock::now() + timeout;
  std::string busy = "the metrics page";
  while (Clock::now() < deadline) {
    busy.clear();
    const absl::StatusOr<std::string> page = HttpGet(metrics_port_, "/metrics");
    if (!page.ok()) {
      busy = std::string(page.status().message());
    } else {
      for (const char* gauge : kGauges) {
        const absl::StatusOr<double> value = SumOf(*page, gauge);
        if (!value.ok()) return value.status();
        if (*value != 0) busy = absl::StrCat(gauge, " is ", *value);
      }
    }
    if (busy.empty()) return absl::OkStatus();
    std::this_thread::sleep_for(kPoll);
  }
  return absl::DeadlineExceededError(busy);
}

uint64_t ServerProcess::ResidentBytes() const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 6, "VmRSS:") == 0) {
      return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
    }
  }
  return 0;
}

absl::Status ServerProcess::Stop(std::chrono::seconds timeout) {
  kill(pid_, SIGTERM);
  const auto deadline = Clock::now() + timeout;
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) != pid_) {
    if (Clock::now() > deadline) return absl::DeadlineExceededError("attnd does not stop");
    std::this_thread::sleep_for(kPoll);
  }
  pid_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(WIFEXITED(status)
                                 ? absl::StrCat("attnd exited with ", WEXITSTATUS(status))
                                 : absl::StrCat("attnd ended by signal ", WTERMSIG(status)));
}

}  // namespace attn::bench
