// Peak memory of one forward and backward on a CPU path, in a process of its own.
//
//   attn_cpu_memory                     the figure cpu-memory: runs itself for each path and length
//   attn_cpu_memory measure PATH S      one measurement; prints peak bytes above the idle process
//
// Shape: batch 1, 8 heads, head_dim 64, fp32. What is measured is VmHWM: tensors, workspace, the
// kernels' own buffers, everything. Prints a table and ends with `cpu-memory: <worst ratio> (bar:
// 2.2)`: the largest peak(2S) / peak(S) of flash_cpu; exit status 0 only where it holds.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/spec.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/thread_pool.h"

namespace attn {
namespace {

constexpr int64_t kHeads = 8;
constexpr int64_t kDim = 64;
constexpr double kBar = 2.2;

// "VmHWM" or "VmRSS" of this process, bytes.
int64_t ProcessMemory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, field.size(), field) == 0) {
      return std::atoll(line.c_str() + field.size() + 1) * 1024;
    }
  }
  std::fprintf(stderr, "no %s in /proc/self/status\n", field.c_str());
  std::exit(1);
}

std::vector<float> Values(int64_t n) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(i % 101) / 101.0f - 0.5f;
  return values;
}

std::vector<std::byte> Workspace(const Backend& backend, const AttentionProblem& p, Pass pass,
                                 RunContext* context) {
  std::vector<std::byte> bytes(backend.WorkspaceBytes(p, pass) + 64);
  auto* begin =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  context->workspace = {begin, bytes.size() - 64};
  return bytes;
}

int Measure(const std::string& path, int64_t s) {
  ThreadPool pool;
  const std::unique_ptr<Backend> backend =
      path == "standard_cpu" ? MakeStandardCpuBackend(&pool) : MakeFlashCpuBackend(&pool);
  const int64_t idle = ProcessMemory("VmRSS");
  AttentionSpec spec;
  spec.num_heads = spec.num_kv_heads = kHeads;
  spec.q = spec.k = spec.v = {DType::kFp32, {1, s, kHeads, kDim}, {}};
  spec.out = spec.dout = spec.q;
  spec.lse = TensorSpec{DType::kFp32, {1, kHeads, s}, {}};
  const absl::StatusOr<AttentionProblem> forward = Validate(spec, Pass::kForward);
  const absl::StatusOr<AttentionProblem> backward = Validate(spec, Pass::kBackward);
  if (!forward.ok() || !backward.ok()) return 1;
  const int64_t n = s * kHeads * kDim;
  const std::vector<float> q = Values(n), k = Values(n), v = Values(n), dout = Values(n);
  std::vector<float> out(n), lse(kHeads * s), dq(n), dk(n), dv(n);
  RunContext context;
  {
    const auto workspace = Workspace(*backend, *forward, Pass::kForward, &context);
    const absl::Status status =
        backend->Forward(*forward, {q.data(), k.data(), v.data(), out.data(), lse.data()}, context);
    if (!status.ok()) return 1;
  }
  const auto workspace = Workspace(*backend, *backward, Pass::kBackward, &context);
  BackwardTensors t{q.data(), k.data(), v.data(), out.data(), lse.data(), dout.data()};
  t.dq = dq.data();
  t.dk = dk.data();
  t.dv = dv.data();
  if (!backend->Backward(*backward, t, context).ok()) return 1;
  std::printf("%lld\n", static_cast<long long>(ProcessMemory("VmHWM") - idle));
  return 0;
}

int64_t MeasureApart(const std::string& self, const std::string& path, int64_t s) {
  const std::string command = "'" + self + "' measure " + path + " " + std::to_string(s);
  FILE* child = popen(command.c_str(), "r");
  long long bytes = 0;
  const bool read = child != nullptr && std::fscanf(child, "%lld", &bytes) == 1;
  if (child == nullptr || pclose(child) != 0 || !read) {
    std::fprintf(stderr, "failed: %s\n", command.c_str());
    std::exit(1);
  }
  return bytes;
}

int Figure(const std::string& self) {
  struct Row {
    const char* path;
    int64_t largest;  // standard_cpu's scores grow with S², its time too
  };
  double worst = 0;
  std::printf("%-14s %8s %12s %14s\n", "path", "S", "peak MiB", "peak(S)/peak(S/2)");
  for (const Row& row : {Row{"flash_cpu", 16384}, Row{"standard_cpu", 4096}}) {
    int64_t previous = 0;
    for (int64_t s = 1024; s <= row.largest; s *= 2) {
      const int64_t peak = MeasureApart(self, row.path, s);
      const double ratio =
          previous == 0 ? 0.0 : static_cast<double>(peak) / static_cast<double>(previous);
      std::printf("%-14s %8lld %12.1f", row.path, static_cast<long long>(s),
                  static_cast<double>(peak) / (1 << 20));
      if (previous != 0) std::printf(" %14.2f", ratio);
      std::printf("\n");
      std::fflush(stdout);
      if (std::strcmp(row.path, "flash_cpu") == 0) worst = std::max(worst, ratio);
      previous = peak;
    }
  }
  std::printf("cpu-memory: %.2f (bar: %.1f)\n", worst, kBar);
  return worst <= kBar ? 0 : 1;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "measure") == 0) {
    return attn::Measure(argv[2], std::atoll(argv[3]));
  }
  if (argc == 1) return attn::Figure(argv[0]);
  std::fprintf(stderr, "usage: attn_cpu_memory [measure flash_cpu|standard_cpu S]\n");
  return 2;
}
