// p50 of a tiny call (batch 1, 1 head, S 16, head_dim 64, fp32) against a raw callback echo in the
// same process with the same bytes each way. Both are called by the client library's own transport;
// `client` is the whole library call, tensors in and tensors out, and is what the bar is for.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/lib/exchange.h"
#include "client/lib/transport.h"
#include "proto/wire/byte_buffer.h"
#include "tests/bench/rpc_bench.h"

namespace attn::bench {
namespace {

constexpr double kBar = 1.5;
constexpr char kForwardMethod[] = "/attention.v1.Attention/Forward";
constexpr char kPlanMethod[] = "/attention.v1.Attention/Plan";

struct Options {
  std::string server;
  int rounds = 15;
  int calls = 400;   // of each kind, per round
  int turn = 25;     // calls of one kind in a row
  std::string only;  // "echo", "raw" or "client" alone, for a profiler
};

absl::Status RawCall(client::Transport& transport, const std::string& method,
                     const grpc::ByteBuffer& request, uint64_t* reply_bytes) {
  grpc::ByteBuffer reply;
  const client::AttemptResult result = transport.Unary(method, request, {}, &reply);
  *reply_bytes = reply.Length();
  return result.status;
}

struct Bench {
  std::unique_ptr<BenchServer> server;
  std::unique_ptr<client::Client> client;
  std::unique_ptr<client::Transport> attention, echo;
  client::ForwardCall call;
  grpc::ByteBuffer request;
  uint64_t reply_bytes = 0;
};

// Starts everything and makes both sides move the same bytes.
absl::Status Prepare(const Options& options, Bench* bench) {
  auto server = BenchServer::Start(options.server);
  if (!server.ok()) return server.status();
  bench->server = std::move(*server);
  client::ChannelOptions channel;
  channel.target = bench->server->attention_tcp;
  channel.max_retries = 0;
  auto client = client::Client::Connect(channel);
  if (!client.ok()) return client.status();
  bench->client = std::move(*client);
  auto attention = client::Transport::Create(channel);
  if (!attention.ok()) return attention.status();
  bench->attention = std::move(*attention);
  channel.target = bench->server->echo;
  auto echo = client::Transport::Create(channel);
  if (!echo.ok()) return echo.status();
  bench->echo = std::move(*echo);

  bench->call = MakeForward(client::v1::DTYPE_FP32, 1, 16, 16, 1, 1, 64);
  const auto exchange = client::PrepareForward(bench->call);
  if (!exchange.ok()) return exchange.status();
  bench->request = wire::MakeUnary(exchange->header, exchange->payloads, nullptr);
  if (absl::Status s =
          RawCall(*bench->attention, kForwardMethod, bench->request, &bench->reply_bytes);
      !s.ok()) {
    return s;
  }
  const std::string wanted = absl::StrCat(bench->reply_bytes);
  grpc::Slice slice(wanted);
  const grpc::ByteBuffer command(&slice, 1);
  uint64_t bytes = 0;
  if (absl::Status s = RawCall(*bench->echo, kPlanMethod, command, &bytes); !s.ok()) return s;
  if (absl::Status s = RawCall(*bench->echo, kForwardMethod, bench->request, &bytes); !s.ok()) {
    return s;
  }
  if (bytes != bench->reply_bytes) {
    return absl::InternalError(
        absl::StrCat("the echo answers ", bytes, " bytes, attention ", bench->reply_bytes));
  }
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  Bench bench;
  if (absl::Status s = Prepare(options, &bench); !s.ok()) return s;
  const auto echo = [&] {
    uint64_t bytes = 0;
    return RawCall(*bench.echo, kForwardMethod, bench.request, &bytes);
  };
  const auto raw = [&] {
    uint64_t bytes = 0;
    return RawCall(*bench.attention, kForwardMethod, bench.request, &bytes);
  };
  std::vector<double> stages[3];
  const auto library = [&] {
    const auto result = bench.client->Forward(bench.call);
    if (!result.ok()) return result.status();
    stages[0].push_back(static_cast<double>(result->report.times().handler_ns()));
    stages[1].push_back(static_cast<double>(result->report.times().kernel_ns()));
    stages[2].push_back(static_cast<double>(result->latency.count()));
    return absl::OkStatus();
  };
  std::printf("rpc-overhead on %s; request %zu bytes, reply %zu bytes, TCP loopback\n",
              Machine().c_str(), bench.request.Length(), static_cast<size_t>(bench.reply_bytes));
  std::printf("%7s %14s %14s %14s %12s %12s\n", "round", "echo p50 us", "raw p50 us",
              "client p50 us", "raw/echo", "client/echo");
  std::vector<double> raw_ratios, client_ratios;
  absl::Status failure;
  for (int round = -1; round < options.rounds; ++round) {  // round -1 warms up
    std::vector<double> echo_s, raw_s, client_s;
    // By turns, in runs short enough that all see the same machine and long enough that each finds
    // its own code and data in the caches, as a caller in a loop does.
    const auto turn = [&failure, &options](const auto& call, std::vector<double>* seconds) {
      for (int i = 0; i < options.turn && failure.ok(); ++i) {
        const absl::StatusOr<double> time = Timed(call);
        failure = time.status();
        seconds->push_back(time.value_or(0));
      }
    };
    for (int i = 0; i < options.calls; i += options.turn) {
      const std::string& only = options.only;
      if (only.empty() || only == "echo") turn(echo, &echo_s);
      if (only.empty() || only == "raw") turn(raw, &raw_s);
      if (only.empty() || only == "client") turn(library, &client_s);
    }
    if (!failure.ok()) return failure;
    if (round < 0) continue;
    const double e = Median(echo_s), r = Median(raw_s), c = Median(client_s);
    raw_ratios.push_back(r / e);
    client_ratios.push_back(c / e);
    std::printf("%7d %14.1f %14.1f %14.1f %12.2f %12.2f\n", round, e * 1e6, r * 1e6, c * 1e6, r / e,
                c / e);
  }
  std::printf(
      "p50 within the client call: from send to last byte %.1f us; in the server's handler %.1f "
      "us, of which kernel %.1f us\n",
      Median(stages[2]) / 1e3, Median(stages[0]) / 1e3, Median(stages[1]) / 1e3);
  std::printf("raw call against echo: %.2fx\n", Median(raw_ratios));
  const double value = Median(client_ratios);
  std::printf("rpc-overhead: %.2fx (bar: at most %.1fx of a raw callback echo)\n", value, kBar);
  return value <= kBar ? absl::OkStatus() : absl::OutOfRangeError("the bar does not hold");
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  attn::bench::Options options;
  CLI::App app("Overhead of a tiny call", "attn_rpc_overhead");
  app.add_option("--server", options.server, "attn_rpc_bench_server")->required();
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--calls", options.calls, "Of each kind, per round")->check(CLI::Range(1, 100000));
  app.add_option("--turn", options.turn, "Calls of one kind in a row")
      ->check(CLI::Range(1, 100000));
  app.add_option("--only", options.only, "One kind alone, for a profiler: echo, raw, client");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = attn::bench::Run(options);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
