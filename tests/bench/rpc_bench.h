// What the two RPC benches share: the server process that holds attnd and its yardsticks, and
// statistics.
#ifndef ATTN_TESTS_BENCH_RPC_BENCH_H_
#define ATTN_TESTS_BENCH_RPC_BENCH_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/lib/client.h"
#include "tests/bench/rpc_process.h"

namespace attn::bench {

// attn_rpc_bench_server in a process of its own: attnd, echo and plain sockets.
class BenchServer {
 public:
  static absl::StatusOr<std::unique_ptr<BenchServer>> Start(const std::string& program);
  ~BenchServer();

  std::string attention_tcp, attention_unix;  // targets of attnd
  std::string echo;                           // target of the echo
  int plain_port = 0;
  std::string plain_unix;

 private:
  BenchServer() = default;
  TemporaryDirectory directory_;
  pid_t pid_ = -1;
};

double Median(std::vector<double> values);
double Percentile(std::vector<double> values, double fraction);

// Seconds that `work` took. Errors: those of `work`.
template <typename Work>
absl::StatusOr<double> Timed(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  if (absl::Status status = work(); !status.ok()) return status;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A forward of one key per sequence (seqlen_k of `keys` otherwise): q [batch, seqlen_q, heads,
// head_dim], values of small whole numbers.
client::ForwardCall MakeForward(client::v1::DType dtype, int64_t batch, int64_t seqlen_q,
                                int64_t keys, int64_t heads, int64_t kv_heads, int64_t head_dim);

// Host, CPU and build, for the head of a table.
std::string Machine();

}  // namespace attn::bench

#endif  // ATTN_TESTS_BENCH_RPC_BENCH_H_
