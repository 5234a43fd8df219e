#include "server/execution/rates.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
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

// The shorter of two runs, of which the first also warms caches and threads; without may_repeat()
// that of the first. None: the path does not run the call.
template <class MayRepeat>
std::optional<nanoseconds> Best(const SyntheticCall& call, const Backend& backend, Pass pass,
                                const MayRepeat& may_repeat) {
  std::optional<nanoseconds> best;
  for (int run = 0; run < 2 && (run == 0 || may_repeat()); ++run) {
    const absl::StatusOr<nanoseconds> time = call.Run(backend, pass);
    if (!time.ok()) break;
    best = std::min(best.value_or(*time), *time);
  }
  return best;
}

// What takes less time says more about overhead than about rates.
constexpr nanoseconds kShortest = std::chrono::microseconds(200);

}  // namespace

void Rates::Observe(Pass pass, PathId path, uint64_t flops, nanoseconds kernel) {
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
  // head_dim 64: 38 MFLOP forward, 0.6 and 9.7 GFLOP. Between a small host and a large one lie
  // three orders of magnitude: the first that takes long enough counts.
  const SyntheticCall cpu_calls[] = {
      SyntheticCall(/*seqlen=*/192, /*num_heads=*/4, /*head_dim=*/64), SyntheticCall(384, 16, 64),
      SyntheticCall(768, 64, 64)};
  // 137 GFLOP forward, 0.2 to 2 ms on a GPU.
  const SyntheticCall cuda_calls[] = {SyntheticCall(4096, 16, 128, DType::kBf16)};
  const PathTable::Snapshot candidates = paths.candidates();
  for (const PathCandidate& candidate : *candidates) {
    if (candidate.backend == nullptr || !candidate.standing.empty()) continue;
    const bool cuda = DeviceOf(candidate.path) == DeviceKind::kCuda;
    const std::span<const SyntheticCall> calls =
        cuda ? std::span<const SyntheticCall>(cuda_calls) : cpu_calls;
    // On CUDA the first run also loads kernels, so that it says nothing of their speed.
    const auto may_repeat = [&] { return cuda || steady_clock::now() - start <= budget; };
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const SyntheticCall& call : calls) {
        const std::optional<nanoseconds> best = Best(call, *candidate.backend, pass, may_repeat);
        if (!best) break;
        rates->Observe(pass, candidate.path, call.flops(pass), *best);
        if (*best >= kShortest) break;
      }
    }
  }
  rates->set_copy_bytes_per_second(MeasureCopy(threads));
}

}  // namespace attn::server
