// The process that the RPC benches call: attnd, and what it is compared with, under one allocator.
// Writes ports.json into the directory it is given and serves until SIGTERM.
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/backends.h"
#include "server/config/log.h"
#include "server/rpc/server.h"
#include "tests/bench/rpc_peers.h"

namespace attn::bench {
namespace {

absl::Status Serve(const std::filesystem::path& directory, const sigset_t& signals) {
  const std::string unix_address = absl::StrCat("unix:", (directory / "attnd.sock").string());
  server::ServerOptions options;
  options.config.listen = {"127.0.0.1:0", unix_address};
  options.config.metrics_listen = "127.0.0.1:0";
  options.config.Resolve(server::AvailableMemoryBytes());
  ThreadPool pool(options.config.threads);
  options.backends.push_back(MakeFlashCpuBackend(&pool));
  options.backends.push_back(MakeStandardCpuBackend(&pool));
  server::log::Init(options.config.log_level, options.config.log_format);
  auto attnd = server::Server::Start(std::move(options));
  if (!attnd.ok()) return attnd.status();
  const auto echo = EchoServer::Start();
  if (!echo.ok()) return echo.status();
  const auto plain = PlainServer::Start((directory / "plain.sock").string());
  if (!plain.ok()) return plain.status();
  nlohmann::json ports;
  ports["attention_tcp"] = (*attnd)->addresses()[0];
  ports["attention_unix"] = (*attnd)->addresses()[1];
  ports["echo"] = absl::StrCat("127.0.0.1:", (*echo)->port());
  ports["plain_port"] = (*plain)->port();
  ports["plain_unix"] = (*plain)->unix_path();
  {
    std::ofstream file(directory / "ports.tmp");
    file << ports;
  }
  std::filesystem::rename(directory / "ports.tmp", directory / "ports.json");
  int signal = 0;
  sigwait(&signals, &signal);
  (*attnd)->Drain();
  return absl::OkStatus();
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: attn_rpc_bench_server DIRECTORY\n");
    return 2;
  }
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const absl::Status status = attn::bench::Serve(argv[1], signals);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
