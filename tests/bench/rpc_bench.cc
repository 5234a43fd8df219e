#include "tests/bench/rpc_bench.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/api/dtype.h"

namespace attn::bench {
namespace {

namespace v1 = client::v1;

client::HostTensor SmallNumbers(v1::DType dtype, std::vector<int64_t> shape) {
  client::HostTensor tensor = client::HostTensor::Allocate(dtype, std::move(shape));
  const DType kind = dtype == v1::DTYPE_FP32 ? DType::kFp32 : DType::kBf16;
  const int64_t count = tensor.NumElements();
  for (int64_t i = 0; i < count; ++i) {
    StoreElement(tensor.mutable_bytes().data(), kind, i, static_cast<float>(i % 251) / 128.0f);
  }
  return tensor;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchServer>> BenchServer::Start(const std::string& program) {
  auto server = std::unique_ptr<BenchServer>(new BenchServer());
  const std::filesystem::path& directory = server->directory_.path();
  const std::string ports_file = directory / "ports.json";
  const absl::StatusOr<pid_t> pid = Spawn({program, directory.string()}, directory / "log");
  if (!pid.ok()) return pid.status();
  server->pid_ = *pid;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    std::ifstream file(ports_file);
    const auto ports = nlohmann::json::parse(file, nullptr, false);
    if (!ports.is_discarded()) {
      server->attention_tcp = ports["attention_tcp"];
      server->attention_unix = ports["attention_unix"];
      server->echo = ports["echo"];
      server->plain_port = ports["plain_port"];
      server->plain_unix = ports["plain_unix"];
      return server;
    }
    if (waitpid(server->pid_, nullptr, WNOHANG) == server->pid_) {
      server->pid_ = -1;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::ifstream log(directory / "log");
  return absl::UnavailableError(absl::StrCat(
      program, " did not start: ", std::string(std::istreambuf_iterator<char>(log), {})));
}

BenchServer::~BenchServer() {
  if (pid_ <= 0) return;
  kill(pid_, SIGTERM);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (waitpid(pid_, nullptr, WNOHANG) != pid_) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

double Percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<ptrdiff_t>(fraction * (values.size() - 1) + 0.5);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double Median(std::vector<double> values) { return Percentile(std::move(values), 0.5); }

client::ForwardCall MakeForward(v1::DType dtype, int64_t batch, int64_t seqlen_q, int64_t keys,
                                int64_t heads, int64_t kv_heads, int64_t head_dim) {
  client::ForwardCall call;
  call.header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  call.header.mutable_shape()->set_num_heads(heads);
  call.header.mutable_shape()->set_num_kv_heads(kv_heads);
  call.inputs.q = SmallNumbers(dtype, {batch, seqlen_q, heads, head_dim});
  call.inputs.k = SmallNumbers(dtype, {batch, keys, kv_heads, head_dim});
  call.inputs.v = SmallNumbers(dtype, {batch, keys, kv_heads, head_dim});
  return call;
}

std::string Machine() {
  std::ifstream file("/proc/cpuinfo");
  std::string name = "unknown CPU";
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 10, "model name") == 0) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  }
  return absl::StrCat(name, ", ", std::thread::hardware_concurrency(), " cores");
}

}  // namespace attn::bench
