// Random calls with cancellations, deadlines and killed clients against a real attnd. Ends with one
// line "soak: value (bar: …)"; exit status 0 only where the bar holds: every call ended as it
// should, the gauges are back at 0, and resident memory at the end is within 20% of what it was
// after the first tenth of the calls. Both are taken when the server has been at rest, without a
// client, long enough to give memory back; the numbers in between are taken at once. Why without a
// client: gRPC holds buffers for what an open connection may bring next, as large as its last
// messages were. They come and go by several MiB from call to call and would hide what is kept for
// good. Beside each, the same with the client still connected is printed.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/api/mutex.h"
#include "tests/bench/rpc_process.h"
#include "tests/bench/soak_calls.h"

namespace attn::bench {
namespace {

using std::chrono::milliseconds;

constexpr double kMaxGrowth = 1.2;
constexpr int kConcurrency = 6;
// Longer than the server takes to give back memory when it has nothing to do.
constexpr auto kRest = std::chrono::seconds(8);
// One call in so many is a client process that is killed.
constexpr int kKilledEvery = 50;

struct Options {
  std::string attnd;
  int calls = 10'000;
  uint64_t seed = 1;
  bool memory_bar = true;
  std::string child_target;  // set: this process is a client that waits for its end
};

// What happened, by kind and code.
class Tally {
 public:
  void Add(const std::string& kind, absl::StatusCode code, const absl::Status& verdict) {
    MutexLock lock(mutex_);
    ++counts_[kind][absl::StatusCodeToString(code)];
    if (verdict.ok()) return;
    ++faults_;
    if (faults_ <= 20) std::printf("FAULT: %s: %s\n", kind.c_str(), verdict.ToString().c_str());
  }
  int faults() const {
    MutexLock lock(mutex_);
    return faults_;
  }
  void Print() const {
    MutexLock lock(mutex_);
    for (const auto& [kind, codes] : counts_) {
      std::printf("  %-14s", kind.c_str());
      for (const auto& [code, count] : codes) std::printf("  %s %d", code.c_str(), count);
      std::printf("\n");
    }
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::map<std::string, int>> counts_ ATTN_GUARDED_BY(mutex_);
  int faults_ ATTN_GUARDED_BY(mutex_) = 0;
};

// A client process: calls without end on a few threads, until it is killed.
int RunDoomedClient(const Options& options) {
  client::ChannelOptions channel;
  channel.target = options.child_target;
  const auto connection = client::Client::Connect(channel);
  if (!connection.ok()) return 1;
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 3; ++i) {
    threads.emplace_back([&connection, seed = options.seed * 3 + i] {
      Rng rng(seed);
      while (true) {
        absl::StatusCode code;
        (void)MakeCall(**connection, RandomKind(rng), rng, &code);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

// Starts a doomed client and kills it after a random time.
absl::Status KillAClient(const std::string& self, const std::string& target, Rng& rng) {
  const absl::StatusOr<pid_t> pid =
      Spawn({self, "--child-target", target, "--seed", absl::StrCat(rng() % 1'000'000)}, "");
  if (!pid.ok()) return pid.status();
  std::this_thread::sleep_for(milliseconds(rng() % 300));
  kill(*pid, SIGKILL);
  int status = 0;
  waitpid(*pid, &status, 0);
  if (WIFSIGNALED(status)) return absl::OkStatus();
  return absl::InternalError("the doomed client ended before it was killed");
}

// Calls first … last - 1, each from its own seed, whichever thread makes it.
void RunCalls(const Options& options, const std::string& self, const std::string& target, int first,
              int last, client::Client& client, Tally* tally) {
  std::atomic<int> next{first};
  std::vector<std::thread> threads;
  for (int t = 0; t < kConcurrency; ++t) {
    threads.emplace_back([&] {
      for (int index; (index = next.fetch_add(1)) < last;) {
        Rng rng(options.seed * 1'000'003 + static_cast<uint64_t>(index));
        if (index % kKilledEvery == kKilledEvery - 1) {
          const absl::Status status = KillAClient(self, target, rng);
          tally->Add("killed client", status.code(), status);
          continue;
        }
        const CallKind kind = RandomKind(rng);
        absl::StatusCode code = absl::StatusCode::kUnknown;
        const absl::Status verdict = MakeCall(client, kind, rng, &code);
        tally->Add(Name(kind), code, verdict);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Memory {
  double resident_mib = 0;
  // What the server's allocator says, past which some memory is mapped.
  double in_use_mib = 0;
  double retained_mib = 0;
};

Memory ReadMemory(const ServerProcess& server) {
  constexpr double kMiB = 1 << 20;
  return {static_cast<double>(server.ResidentBytes()) / kMiB,
          server.Metric("attn_process_allocator_in_use_bytes").value_or(0) / kMiB,
          server.Metric("attn_process_allocator_retained_bytes").value_or(0) / kMiB};
}

void PrintMemory(int calls, const char* when, const Memory& memory) {
  std::printf("%10d  %-16s %10.1f %10.1f %10.1f\n", calls, when, memory.resident_mib,
              memory.in_use_mib, memory.retained_mib);
  std::fflush(stdout);
}

// Memory when nothing has been asked for a while: with the client connected, and without one.
struct AtRest {
  Memory connected, alone;
};

AtRest ReadAtRest(const ServerProcess& server, int calls, std::unique_ptr<client::Client> client) {
  AtRest memory;
  std::this_thread::sleep_for(kRest);
  memory.connected = ReadMemory(server);
  PrintMemory(calls, "rest, connected", memory.connected);
  client.reset();
  std::this_thread::sleep_for(kRest);
  memory.alone = ReadMemory(server);
  PrintMemory(calls, "rest", memory.alone);
  return memory;
}

struct Outcome {
  AtRest first, last;  // after the first tenth of the calls, and at the end
  absl::Status idle;   // the gauges are back at 0
  absl::StatusOr<double> executions = absl::UnknownError("not read");
  absl::Status stopped;
  std::string server_log;
};

// All the calls, in tenths. Errors: no client can be made.
absl::Status MakeCalls(const Options& options, const std::string& self, const ServerProcess& server,
                       Tally* tally, Outcome* outcome) {
  client::ChannelOptions channel;
  channel.target = server.target();
  channel.channels = 2;
  std::unique_ptr<client::Client> client;
  constexpr int kTenths = 10;
  for (int tenth = 0; tenth < kTenths && outcome->idle.ok(); ++tenth) {
    if (client == nullptr) {
      auto connection = client::Client::Connect(channel);
      if (!connection.ok()) return connection.status();
      client = *std::move(connection);
    }
    const int done = options.calls * (tenth + 1) / kTenths;
    RunCalls(options, self, server.target(), options.calls * tenth / kTenths, done, *client, tally);
    outcome->idle = server.WaitIdle(std::chrono::seconds(60));
    const Memory memory = ReadMemory(server);
    PrintMemory(done, "at once", memory);
    if (tenth != 0 && tenth != kTenths - 1) continue;
    (tenth == 0 ? outcome->first : outcome->last) =
        options.memory_bar ? ReadAtRest(server, done, std::move(client)) : AtRest{memory, memory};
  }
  return absl::OkStatus();
}

// The last line, and whether the bar holds.
bool Judge(const Options& options, const Tally& tally, const Outcome& outcome) {
  const bool sanitizer = outcome.server_log.find("Sanitizer") != std::string::npos ||
                         outcome.server_log.find("runtime error:") != std::string::npos;
  tally.Print();
  std::printf("  executions counted by the server: %.0f\n", outcome.executions.value_or(-1));
  if (!outcome.idle.ok()) {
    std::printf("FAULT: gauges are not back at 0: %s\n", outcome.idle.ToString().c_str());
  }
  if (!outcome.stopped.ok()) std::printf("FAULT: %s\n", outcome.stopped.ToString().c_str());
  if (sanitizer || !outcome.stopped.ok()) {
    std::printf("--- log of attnd ---\n%s\n", outcome.server_log.c_str());
  }
  const double growth = outcome.last.alone.resident_mib / outcome.first.alone.resident_mib;
  std::printf("  growth with the client still connected: %.3f\n",
              outcome.last.connected.resident_mib / outcome.first.connected.resident_mib);
  std::printf(
      "soak: %.3f (bar: resident memory at the end at most %.2fx of that after the first "
      "%d calls%s; gauges back to 0: %s; %d faults, bar 0)\n",
      growth, kMaxGrowth, options.calls / 10, options.memory_bar ? "" : ", not judged here",
      outcome.idle.ok() ? "yes" : "no", tally.faults());
  return outcome.idle.ok() && outcome.stopped.ok() && !sanitizer && tally.faults() == 0 &&
         outcome.executions.value_or(0) > 0 && (!options.memory_bar || growth <= kMaxGrowth);
}

int Run(const Options& options, const std::string& self) {
  auto server = ServerProcess::Start(options.attnd, {});
  if (!server.ok()) {
    std::fprintf(stderr, "soak: %s\n", server.status().ToString().c_str());
    return 2;
  }
  std::printf("%10s  %-16s %10s %10s %10s\n", "calls", "MiB", "resident", "in use", "retained");
  Tally tally;
  Outcome outcome;
  const absl::Status made = MakeCalls(options, self, **server, &tally, &outcome);
  if (!made.ok()) {
    std::fprintf(stderr, "soak: %s\n", made.ToString().c_str());
    return 2;
  }
  outcome.executions = (*server)->Metric("attn_executions_total");
  outcome.stopped = (*server)->Stop(std::chrono::seconds(120));
  outcome.server_log = (*server)->log();
  return Judge(options, tally, outcome) ? 0 : 1;
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  attn::bench::Options options;
  CLI::App app("Random calls, cancellations, deadlines and killed clients against attnd",
               "attn_soak");
  app.add_option("--attnd", options.attnd, "The server's program");
  app.add_option("--calls", options.calls, "Calls in all")->check(CLI::Range(10, 100'000'000));
  app.add_option("--seed", options.seed, "The same seed makes the same calls");
  app.add_flag("!--no-memory-bar", options.memory_bar,
               "Do not judge memory (sanitizers keep freed memory)");
  app.add_option("--child-target", options.child_target, "Used by the soak itself")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!options.child_target.empty()) return attn::bench::RunDoomedClient(options);
  if (options.attnd.empty()) {
    std::fprintf(stderr, "attn_soak: --attnd is required\n");
    return 2;
  }
  return attn::bench::Run(options, "/proc/self/exe");
}
