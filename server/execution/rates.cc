#include "server/execution/rates.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "kernels/api/problem.h"
#include "kernels/api/traffic.h"
#include "server/execution/test_problem.h"

namespace attn::server {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

double Seconds(nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// Copies more than any cache holds for its share, on every thread at once.
double MeasureCopy(int threads) {
  constexpr size_t kBytes = size_t{16} << 20;  // per thread, each way
  threads = std::clamp(threads, 1, 8);         // eight streams fill the memory channels of a host
  std::vector<std::unique_ptr<char[]>> blocks;
  for (int i = 0; i < 2 * threads; ++i) {
    blocks.emplace_back(new (std::nothrow) char[kBytes]);
    if (blocks.back() == nullptr) return 0;
    std::memset(blocks.back().get(), i + 1, kBytes);
  }
  double best = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto start = steady_clock::now();
    std::vector<std::thread> workers;
    workers.reserve(threads);
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back(
          [&blocks, i] { std::memcpy(blocks[2 * i].get(), blocks[2 * i + 1].get(), kBytes); });
    }
    for (std::thread& worker : workers) worker.join();
    best = std::max(best, 2.0 * kBytes * threads / Seconds(steady_clock::now() - start));
  }
  return best;
}

}  // namespace

void Rates::Observe(Pass pass, PathId path, uint64_t flops, nanoseconds kernel) {
  constexpr nanoseconds kShortest = std::chrono::microseconds(200);
  if (kernel < kShortest || flops == 0) return;
  const double seen = static_cast<double>(flops) / Seconds(kernel);
  std::atomic<double>& rate = flops_[static_cast<size_t>(pass)][static_cast<size_t>(path)];
  double old = rate.load(std::memory_order_relaxed);
  // Losing a race loses one observation, which does not matter.
  rate.compare_exchange_strong(old, old == 0 ? seen : old + (seen - old) / 8,
                               std::memory_order_relaxed);
}

double Rates::FlopsPerSecond(Pass pass, PathId path) const {
  return flops_[static_cast<size_t>(pass)][static_cast<size_t>(path)].load(
      std::memory_order_relaxed);
}

double Rates::BestForwardFlopsPerSecond() const {
  double best = 0;
  for (PathId path : kAllPaths) {
    if (DeviceOf(path) == DeviceKind::kCpu) {
      best = std::max(best, FlopsPerSecond(Pass::kForward, path));
    }
  }
  return best;
}

void MeasureRates(const PathTable& paths, int threads, std::chrono::milliseconds budget,
                  Rates* rates) {
  const auto start = steady_clock::now();
  // 4 heads of 192 x 192 at head_dim 64: 38 MFLOP forward, 2 to 20 ms on a CPU. 16 heads of 4096 x
  // 4096 at head_dim 128: 137 GFLOP forward, 0.2 to 2 ms on a GPU.
  const SyntheticCall cpu_call(/*seqlen=*/192, /*num_heads=*/4, /*head_dim=*/64);
  const SyntheticCall cuda_call(/*seqlen=*/4096, /*num_heads=*/16, /*head_dim=*/128, DType::kBf16);
  const PathTable::Snapshot candidates = paths.candidates();
  for (const PathCandidate& candidate : *candidates) {
    if (candidate.backend == nullptr || !candidate.standing.empty()) continue;
    const bool cuda = DeviceOf(candidate.path) == DeviceKind::kCuda;
    const SyntheticCall& call = cuda ? cuda_call : cpu_call;
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      nanoseconds best = nanoseconds::max();
      for (int repeat = 0; repeat < 2; ++repeat) {  // the first also warms caches and threads
        // On CUDA it also loads kernels, so that it says nothing of their speed.
        if (repeat > 0 && !cuda && steady_clock::now() - start > budget) break;
        const absl::StatusOr<nanoseconds> time = call.Run(*candidate.backend, pass);
        if (!time.ok()) break;
        best = std::min(best, *time);
      }
      if (best != nanoseconds::max()) {
        rates->Observe(pass, candidate.path, call.flops(pass), best);
      }
    }
  }
  rates->set_copy_bytes_per_second(MeasureCopy(threads));
}

}  // namespace attn::server
