// attnd: wiring only. Settings, backends, signals; everything else is in the libraries.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/simd.h"
#include "server/config/config.h"
#include "server/config/log.h"
#include "server/rpc/server.h"

namespace attn::server {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitFailed = 1;

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (absl::StartsWith(line, "model name") && colon != std::string::npos) {
      return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
    }
  }
  return "CPU";
}

// A thread that waits for SIGTERM and SIGINT, which every thread of the process has blocked: no
// handler runs, so nothing needs to be async-signal-safe.
class SignalThread {
 public:
  // Call before any other thread starts: they inherit the mask.
  static void Block() {
    const sigset_t set = Signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
  }

  // Waits for the first signal; returns its name.
  static std::string WaitForFirst() {
    const sigset_t set = Signals();
    int signal = 0;
    while (sigwait(&set, &signal) != 0) {
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
    return set;
  }

  std::atomic<bool> done_{false};
  std::thread thread_;
};

int PrintSelfTest(const std::vector<SelfTestResult>& results) {
  int failed = 0;
  for (const SelfTestResult& r : results) {
    std::printf("%-14s %-8s %-4s %s\n", std::string(Name(r.path)).c_str(),
                std::string(Name(r.pass)).c_str(), std::string(Name(r.dtype)).c_str(),
                r.status.ok() ? "passed" : r.status.ToString().c_str());
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

int Main(int argc, char** argv) {
  absl::StatusOr<CommandLine> command_line =
      ParseCommandLine(std::vector<std::string>(argv + 1, argv + argc), &ProcessEnvironment);
  if (!command_line.ok()) {
    std::fprintf(stderr, "attnd: %s\n", std::string(command_line.status().message()).c_str());
    return kExitUsage;
  }
  if (command_line->print) {
    std::fputs(command_line->print->c_str(), stdout);
    return 0;
  }
  Config config = command_line->config;
  config.Resolve(AvailableMemoryBytes());
  if (config.check_config) {
    std::fputs(config.ToFileText().c_str(), stdout);
    return 0;
  }
  log::Init(config.log_level, config.log_format);
  SignalThread::Block();

  ThreadPool pool(config.threads);
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(MakeFlashCpuBackend(&pool));
  backends.push_back(MakeStandardCpuBackend(&pool));
  if (config.self_test_only) {
    absl::StatusOr<PathTable> paths =
        PathTable::Create(std::move(backends), config.disable_path, config.cpu_fallback);
    if (paths.ok()) return PrintSelfTest(SelfTestAll(&*paths));
    std::fprintf(stderr, "attnd: %s\n", std::string(paths.status().message()).c_str());
    return kExitUsage;
  }

  ServerOptions options{.config = config, .backends = std::move(backends), .devices = {}};
  ::attention::v1::DeviceInfo& cpu = options.devices.emplace_back();
  cpu.set_kind(::attention::v1::DEVICE_KIND_CPU);
  cpu.set_name(CpuName());
  cpu.set_memory_bytes(AvailableMemoryBytes());
  cpu.set_cores(static_cast<uint32_t>(pool.num_workers()));
  cpu.set_isa(std::string(Name(ChosenSimdTarget())));
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
  if (!server.ok()) {
    log::Error("cannot start", {{"error", server.status().message()}});
    return kExitFailed;
  }
  LogReady(**server);

  log::Info("stopping", {{"signal", SignalThread::WaitForFirst()}});
  {
    SignalThread more_signals(server->get());
    (*server)->Drain();
  }
  return 0;
}

}  // namespace
}  // namespace attn::server

int main(int argc, char** argv) { return attn::server::Main(argc, argv); }
