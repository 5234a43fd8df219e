// attnd: wiring only. Settings, backends, signals; everything else is in the libraries.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_join.h"
#include "kernels/api/text.h"
#include "kernels/cpu/thread_pool.h"
#include "server/backends.h"
#include "server/config/config.h"
#include "server/config/log.h"
#include "server/execution/allocator.h"
#include "server/rpc/server.h"

namespace attn::server {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitFailed = 1;
// gRPC reads into slices of 64 KiB. With tcmalloc's default of 32 MiB its threads come to cache
// some 20 MiB of them, which no other thread can give back when the server is at rest.
constexpr size_t kThreadCacheBytes = size_t{8} << 20;

// A thread that waits for SIGTERM, SIGINT and SIGHUP, which every thread of the process has
// blocked: no handler runs, so nothing needs to be async-signal-safe.
class SignalThread {
 public:
  // Call before any other thread starts: they inherit the mask.
  static void Block() {
    const sigset_t set = Signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
  }

  // Waits for the first signal to stop; returns its name. Calls `reload` on each SIGHUP until then.
  static std::string WaitForStop(const std::function<void()>& reload) {
    const sigset_t set = Signals();
    int signal = 0;
    while (sigwait(&set, &signal) != 0 || signal == SIGHUP) {
      if (signal == SIGHUP) reload();
      signal = 0;
    }
    return signal == SIGINT ? "SIGINT" : "SIGTERM";
  }

  // Further signals hasten the drain of `server`, until destroyed.
  explicit SignalThread(Server* server)
      : thread_([this, server] {
          const sigset_t set = Signals();
          while (true) {
            int signal = 0;
            if (sigwait(&set, &signal) != 0) continue;
            if (done_.load()) return;
            if (signal == SIGHUP) continue;  // too late to change anything
            log::Warn("second signal: not waiting any longer");
            server->Hasten();
          }
        }) {}
  ~SignalThread() {
    done_.store(true);
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }

 private:
  static sigset_t Signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    return set;
  }

  std::atomic<bool> done_{false};
  std::thread thread_;
};

int PrintSelfTest(const std::vector<SelfTestResult>& results) {
  int failed = 0;
  for (const SelfTestResult& r : results) {
    const std::string device = r.device < 0 ? "" : Cat("cuda:", r.device, " ");
    std::printf("%-14s %-8s %-4s %s%s\n", std::string(Name(r.path)).c_str(),
                std::string(Name(r.pass)).c_str(), std::string(Name(r.dtype)).c_str(),
                device.c_str(), r.status.ok() ? "passed" : r.status.ToString().c_str());
    failed += r.status.ok() ? 0 : 1;
  }
  return failed > 0 || results.empty() ? kExitFailed : 0;
}

void LogReady(const Server& server) {
  std::vector<std::string> paths;
  for (PathId path : kAllPaths) {
    if (server.paths().available(path)) paths.emplace_back(Name(path));
  }
  log::Info("serving", {{"version", Version()},
                        {"commit", GitCommit()},
                        {"listen", absl::StrJoin(server.addresses(), ",")},
                        {"metrics", server.metrics_address()},
                        {"paths", absl::StrJoin(paths, ",")}});
}

// Reads settings again from where they came; what does not parse changes nothing.
void Reload(const std::vector<std::string>& arguments, const Config& in_force, Server* server) {
  absl::StatusOr<CommandLine> again = ParseCommandLine(arguments, &ProcessEnvironment);
  absl::Status status = again.status();
  if (status.ok()) {
    Config& config = again->config;
    // Found out at the start, not to be found out differently now.
    if (config.executor_workers == 0) config.executor_workers = in_force.executor_workers;
    config.Resolve(AvailableMemoryBytes());
    status = server->Reload(config);
  }
  if (!status.ok()) log::Error("settings stay as they were", {{"error", status.message()}});
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  absl::StatusOr<CommandLine> command_line = ParseCommandLine(arguments, &ProcessEnvironment);
  if (!command_line.ok()) {
    std::fprintf(stderr, "attnd: %s\n", std::string(command_line.status().message()).c_str());
    return kExitUsage;
  }
  if (command_line->print) {
    std::fputs(command_line->print->c_str(), stdout);
    return 0;
  }
  Config config = command_line->config;
  const bool own_workers = config.executor_workers == 0;
  config.Resolve(AvailableMemoryBytes());
  if (config.check_config) {
    std::fputs(config.ToFileText().c_str(), stdout);
    return 0;
  }
  BoundThreadCaches(kThreadCacheBytes);
  log::Init(config.log_level, config.log_format);
  SignalThread::Block();

  ThreadPool pool(config.threads);
  absl::StatusOr<Backends> backends = MakeBackends(config, &pool);
  if (!backends.ok()) {
    std::fprintf(stderr, "attnd: %s\n", std::string(backends.status().message()).c_str());
    return kExitUsage;
  }
  if (config.self_test_only) {
    absl::StatusOr<PathTable> paths = PathTable::Create(
        std::move(backends->backends), config.disable_path, config.cpu_fallback, backends->absent);
    if (paths.ok()) return PrintSelfTest(SelfTestAll(&*paths, CudaIndices(backends->devices)));
    std::fprintf(stderr, "attnd: %s\n", std::string(paths.status().message()).c_str());
    return kExitUsage;
  }
  // Two more than calls can be under way on devices: they bring in what comes next.
  if (own_workers && backends->lanes > 0) config.executor_workers = backends->lanes + 2;

  ServerOptions options{.config = config,
                        .backends = std::move(backends->backends),
                        .absent = std::move(backends->absent),
                        .devices = std::move(backends->devices),
                        .device_hooks = std::move(backends->hooks),
                        .sensors = std::move(backends->sensors)};
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
  if (!server.ok()) {
    log::Error("cannot start", {{"error", server.status().message()}});
    return kExitFailed;
  }
  LogReady(**server);

  const std::string signal = SignalThread::WaitForStop(
      [&arguments, &config, &server] { Reload(arguments, config, server->get()); });
  log::Info("stopping", {{"signal", signal}});
  {
    SignalThread more_signals(server->get());
    (*server)->Drain();
  }
  return 0;
}

}  // namespace
}  // namespace attn::server

int main(int argc, char** argv) { return attn::server::Main(argc, argv); }
