// 64 MiB each way through attnd with next to no computing (one key per sequence: out is v), over
// TCP and a Unix socket, unary and streaming, against a plain socket program that sends and
// receives the same bytes. All cells take turns within one run.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/rpc_bench.h"
#include "tests/bench/rpc_peers.h"

namespace attn::bench {
namespace {

constexpr double kBar = 0.6;
constexpr int64_t kBatch = 4096, kHeads = 64, kHeadDim = 128;

struct Options {
  std::string server;
  int rounds = 15;
  std::string only;  // one cell, for a profiler: "TCP unary", "Unix streaming", …
};

// One way of moving the bytes over one transport.
struct Cell {
  const char* name;
  std::function<absl::Status()> exchange;
  std::vector<double> seconds;
};

struct Transport {
  const char* name;
  std::unique_ptr<client::Client> client;
  std::unique_ptr<PlainConnection> plain;
  Cell cells[3];
};

// out of every query head is its sequence's v.
absl::Status CheckOut(const client::ForwardCall& call, const client::HostTensor& out) {
  constexpr size_t kRow = kHeadDim * 2;
  for (int64_t row = 0; row < kBatch * kHeads; ++row) {
    if (std::memcmp(out.bytes.data() + row * kRow, call.inputs.v.bytes.data() + row / kHeads * kRow,
                    kRow) != 0) {
      return absl::DataLossError("out differs from v");
    }
  }
  return absl::OkStatus();
}

absl::Status Prepare(const std::string& target, const client::ForwardCall& call,
                     std::span<const std::byte> request, std::span<std::byte> reply,
                     Transport* transport) {
  client::ChannelOptions channel;
  channel.target = target;
  channel.max_retries = 0;
  auto client = client::Client::Connect(channel);
  if (!client.ok()) return client.status();
  transport->client = std::move(*client);
  const auto forward = [client = transport->client.get(), &call](bool streaming) {
    client::CallOptions options;
    options.streaming = streaming;
    return client->Forward(call, options);
  };
  for (const bool streaming : {false, true}) {  // verify before timing
    const auto result = forward(streaming);
    if (!result.ok()) return result.status();
    if (result->streamed != streaming) return absl::InternalError("the wrong method was used");
    if (absl::Status s = CheckOut(call, result->out); !s.ok()) return s;
  }
  transport->cells[0] = {
      "plain",
      [plain = transport->plain.get(), request, reply] { return plain->Exchange(request, reply); },
      {}};
  transport->cells[1] = {"unary", [forward] { return forward(false).status(); }, {}};
  transport->cells[2] = {"streaming", [forward] { return forward(true).status(); }, {}};
  return absl::OkStatus();
}

// Where the time of one call goes, as the server sees it.
void PrintStages(Transport& transport, const client::ForwardCall& call) {
  for (const bool streaming : {false, true}) {
    client::CallOptions options;
    options.streaming = streaming;
    const auto result = transport.client->Forward(call, options);
    if (!result.ok()) continue;
    const auto& t = result->report.times();
    std::printf(
        "  %s %s, ms: latency %.1f; server: parse %.2f, gather %.1f, queue %.2f, kernel "
        "%.1f, reply %.2f, handler %.1f\n",
        transport.name, streaming ? "streaming" : "unary",
        static_cast<double>(result->latency.count()) / 1e6, t.parse_ns() / 1e6, t.gather_ns() / 1e6,
        t.queue_ns() / 1e6, t.kernel_ns() / 1e6, t.reply_ns() / 1e6, t.handler_ns() / 1e6);
  }
}

absl::Status Run(const Options& options) {
  const auto server = BenchServer::Start(options.server);
  if (!server.ok()) return server.status();
  const client::ForwardCall call =
      MakeForward(client::v1::DTYPE_BF16, kBatch, 1, 1, kHeads, 1, kHeadDim);
  const size_t request_bytes =
      call.inputs.q.bytes.size() + call.inputs.k.bytes.size() + call.inputs.v.bytes.size();
  const size_t reply_bytes = call.inputs.q.bytes.size() + kBatch * kHeads * sizeof(float);
  const std::vector<std::byte> request(request_bytes, std::byte{1});
  std::vector<std::byte> reply(reply_bytes);

  Transport transports[2] = {{"TCP", nullptr, nullptr, {}}, {"Unix", nullptr, nullptr, {}}};
  auto tcp = PlainConnection::Tcp((*server)->plain_port);
  auto local = PlainConnection::Unix((*server)->plain_unix);
  if (!tcp.ok()) return tcp.status();
  if (!local.ok()) return local.status();
  transports[0].plain = std::move(*tcp);
  transports[1].plain = std::move(*local);
  if (absl::Status s = Prepare((*server)->attention_tcp, call, request, reply, &transports[0]);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = Prepare((*server)->attention_unix, call, request, reply, &transports[1]);
      !s.ok()) {
    return s;
  }
  for (int round = -2; round < options.rounds; ++round) {  // the first two warm up
    for (Transport& transport : transports) {
      for (Cell& cell : transport.cells) {
        if (!options.only.empty() && absl::StrCat(transport.name, " ", cell.name) != options.only) {
          continue;
        }
        const auto seconds = Timed(cell.exchange);
        if (!seconds.ok()) return seconds.status();
        if (round >= 0) cell.seconds.push_back(*seconds);
      }
    }
  }

  std::printf("rpc-throughput on %s; %.1f MiB in, %.1f MiB out, median of %d rounds\n",
              Machine().c_str(), request_bytes / 1048576.0, reply_bytes / 1048576.0,
              options.rounds);
  std::printf("%6s %10s %12s %12s %12s %10s\n", "", "", "median ms", "p10..p90 ms", "GB/s both",
              "of plain");
  const double gigabytes = static_cast<double>(request_bytes + reply_bytes) / 1e9;
  double worst = 1e9;
  for (Transport& transport : transports) {
    const double plain = Median(transport.cells[0].seconds);
    double best = 0;
    for (const Cell& cell : transport.cells) {
      const double median = Median(cell.seconds);
      std::printf("%6s %10s %12.1f %5.0f..%-5.0f %12.2f %10.2f\n", transport.name, cell.name,
                  median * 1e3, Percentile(cell.seconds, 0.1) * 1e3,
                  Percentile(cell.seconds, 0.9) * 1e3, gigabytes / median, plain / median);
      if (&cell != &transport.cells[0]) best = std::max(best, plain / median);
    }
    worst = std::min(worst, best);
  }
  for (Transport& transport : transports) PrintStages(transport, call);
  std::printf(
      "rpc-throughput: %.2fx of plain (bar: the better of unary and streaming at least "
      "%.1fx, for TCP and for Unix)\n",
      worst, kBar);
  return worst >= kBar ? absl::OkStatus() : absl::OutOfRangeError("the bar does not hold");
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  attn::bench::Options options;
  CLI::App app("Throughput of large calls", "attn_rpc_throughput");
  app.add_option("--server", options.server, "attn_rpc_bench_server")->required();
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--only", options.only, "Run one cell alone, for a profiler: 'Unix unary'");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = attn::bench::Run(options);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
