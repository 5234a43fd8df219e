// attnd as it is on a host with two GPUs, as far as its metrics go: the library that attnd links,
// two made-up CUDA devices whose paths compute on the CPU, and sensors through a fake NVML. Takes
// attnd's flags and stops on SIGTERM. So dashboards and alerts meet every series of a GPU host.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "server/metrics/nvml.h"
#include "server/rpc/server.h"

namespace attn::server {
namespace {

constexpr int kDevices = 2;
constexpr const char* kBusIds[kDevices] = {"0000:3B:00.0", "0000:86:00.0"};

// A CUDA path in name and in what it reports.
class LookalikeBackend final : public Backend {
 public:
  LookalikeBackend(PathId path, std::unique_ptr<Backend> cpu) : path_(path), cpu_(std::move(cpu)) {}

  PathId path() const override { return path_; }
  void AppendRejections(const AttentionProblem& problem, Pass pass,
                        std::vector<Rejection>* rejections) const override {
    const size_t before = rejections->size();
    cpu_->AppendRejections(problem, pass, rejections);
    for (size_t i = before; i < rejections->size(); ++i) (*rejections)[i].path = path_;
  }
  std::string KernelId(const AttentionProblem& problem, Pass pass) const override {
    return cpu_->KernelId(problem, pass);
  }
  int64_t WorkspaceBytes(const AttentionProblem& problem, Pass pass) const override {
    return cpu_->WorkspaceBytes(problem, pass);
  }
  TileModel Model(const AttentionProblem& problem, Pass pass) const override {
    return cpu_->Model(problem, pass);
  }
  absl::Status Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                       const RunContext& context) const override {
    return Timed(context, [&] { return cpu_->Forward(problem, tensors, context); });
  }
  absl::Status Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                        const RunContext& context) const override {
    return Timed(context, [&] { return cpu_->Backward(problem, tensors, context); });
  }

 private:
  template <typename Run>
  absl::Status Timed(const RunContext& context, const Run& run) const {
    const auto start = std::chrono::steady_clock::now();
    absl::Status status = run();
    if (context.device_times != nullptr) {
      const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - start;
      const int any = next_.fetch_add(1, std::memory_order_relaxed) % kDevices;
      *context.device_times = {
          .device_index = context.device_index < 0 ? any : context.device_index,
          .queue_ns = 1'000,
          .host_to_device_ns = 20'000,
          .kernel_ns = static_cast<uint64_t>(took.count()),
          .device_to_host_ns = 10'000,
          .host_to_device_bytes = 4'096,
          .device_to_host_bytes = 2'048};
    }
    return status;
  }

  const PathId path_;
  const std::unique_ptr<Backend> cpu_;
  mutable std::atomic<uint32_t> next_{0};
};

DeviceHooks Hooks() {
  DeviceHooks hooks;
  hooks.status = [] {
    std::vector<DeviceStatus> all;
    for (int i = 0; i < kDevices; ++i) {
      all.push_back({.index = i,
                     .pci_bus_id = kBusIds[i],
                     .busy_lanes = 1,
                     .memory_in_use_bytes = 1'000'000,
                     .memory_retained_bytes = 2'000'000,
                     .memory_limit_bytes = 100'000'000});
    }
    return all;
  };
  hooks.on_unhealthy = [](const std::function<void()>&) {};
  hooks.trim = [] {};
  return hooks;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "attn_fake_gpu_server: %s\n", std::string(status.message()).c_str());
  return 2;
}

int Main(int argc, char** argv) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  absl::StatusOr<CommandLine> command_line =
      ParseCommandLine(std::vector<std::string>(argv + 1, argv + argc), &ProcessEnvironment);
  if (!command_line.ok()) return Fail(command_line.status());
  auto sensors = OpenNvml(ATTN_FAKE_NVML);
  if (!sensors.ok()) return Fail(sensors.status());
  ThreadPool pool(2);
  ServerOptions options{.config = command_line->config, .backends = {}, .devices = {}};
  options.backends.push_back(
      std::make_unique<LookalikeBackend>(PathId::kFlashSm80, MakeFlashCpuBackend(&pool)));
  options.backends.push_back(
      std::make_unique<LookalikeBackend>(PathId::kStandardCuda, MakeStandardCpuBackend(&pool)));
  for (int i = 0; i < kDevices; ++i) {
    ::attention::v1::DeviceInfo& device = options.devices.emplace_back();
    device.set_kind(::attention::v1::DEVICE_KIND_CUDA);
    device.set_index(i);
    device.set_name("made up");
    device.set_isa("sm_90");
    device.set_matrix_tflops(0.1);
    device.set_copy_gb_per_s(10);
  }
  options.device_hooks = Hooks();
  options.sensors = *std::move(sensors);
  options.measure_rates = false;  // its problem for CUDA devices would take a CPU minutes
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(options));
  if (!server.ok()) return Fail(server.status());
  int signal = 0;
  while (sigwait(&set, &signal) != 0) {
  }
  (*server)->Drain();
  return 0;
}

}  // namespace
}  // namespace attn::server

int main(int argc, char** argv) { return attn::server::Main(argc, argv); }
