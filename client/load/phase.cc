#include "client/load/phase.h"

#include <sys/resource.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "client/load/generator.h"
#include "kernels/api/text.h"

namespace attn::load {
namespace {

using std::chrono::nanoseconds;

// How often records are added up. Short enough for a live line, long enough to cost nothing.
constexpr nanoseconds kTick = std::chrono::milliseconds(50);
// Windows are closed this long after they ended, for the threads that are slow to hand over.
constexpr int64_t kStragglerNs = 200'000'000;
// What a call may take to end after an interrupt or an abort, before it is cancelled.
constexpr int64_t kStopGraceNs = 1'000'000'000;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Drives a Generator from start to end.
class Runner {
 public:
  Runner(Target* target, const PhaseOptions& options, const PhaseHooks& hooks)
      : options_(options),
        hooks_(hooks),
        end_ns_((options.warm_up + options.duration).count()),
        give_up_ns_((options.warm_up + options.duration + options.drain).count()),
        generator_(target, options, hooks.verifier),
        result_(
            PhaseStats(options.weights.size(), options.warm_up.count(), options.window.count())) {}

  absl::StatusOr<PhaseResult> Run() {
    result_.open_loop = options_.schedule != nullptr;
    result_.max_in_flight = options_.max_in_flight;
    const double cpu_before = CpuSeconds();
    generator_.StopSendingAt(end_ns_);
    result_.stats.SetEnd(end_ns_);
    if (absl::Status status = generator_.Start(); !status.ok()) return status;
    while (!generator_.ended()) {
      std::this_thread::sleep_for(kTick);
      Tick();
    }
    Collect();
    Conclude();
    result_.cpu_seconds = CpuSeconds() - cpu_before;
    result_.cpu_calls = generator_.sent();
    return std::move(result_);
  }

 private:
  void Tick() {
    const int64_t now = Collect();
    if (!stopping()) {
      if (hooks_.interrupt != nullptr && hooks_.interrupt->load()) {
        Stop(PhaseEnd::kInterrupted, now);
      } else if (generator_.calls_used_up()) {
        Stop(PhaseEnd::kCalls, now);
      } else {
        const size_t closed = result_.stats.CloseWindows(now - kStragglerNs);
        while (judged_ < closed && !stopping()) Judge(judged_++, now);
      }
    }
    if (now >= give_up_ns_) {
      generator_.StopSending();
      generator_.CancelCalls();
    }
    if (!hooks_.progress) return;
    PhaseProgress progress;
    progress.seconds = static_cast<double>(now - options_.warm_up.count()) * 1e-9;
    progress.total_seconds = std::chrono::duration<double>(options_.duration).count();
    progress.in_flight = generator_.in_flight();
    progress.stats = &result_.stats;
    hooks_.progress(progress);
  }

  // Adds up what has ended; returns a time before which all of it had.
  int64_t Collect() {
    const int64_t now = generator_.NowNs();
    std::vector<CallRecord> records = generator_.TakeRecords();
    for (const CallRecord& record : records) {
      result_.stats.Add(record);
      if (record.intended_ns < options_.warm_up.count()) continue;
      if (hooks_.record) hooks_.record(record);
    }
    return now;
  }

  bool stopping() const { return result_.end != PhaseEnd::kTime; }

  // Ends the phase before its time.
  void Stop(PhaseEnd end, int64_t now) {
    result_.end = end;
    end_ns_ = std::min(end_ns_, now);
    const bool hurry = end == PhaseEnd::kInterrupted || end == PhaseEnd::kAborted;
    give_up_ns_ = std::min(give_up_ns_, now + (hurry ? kStopGraceNs : options_.drain.count()));
    generator_.StopSendingAt(end_ns_);
    if (hurry) generator_.StopSending();
    result_.stats.SetEnd(end_ns_);
  }

  // Thresholds and stability, when a window has closed.
  void Judge(size_t index, int64_t now) {
    const std::vector<Window>& windows = result_.stats.windows;
    const Window& window = windows[index];
    const int64_t ended = window.ok + window.failed;
    const double share = ended == 0 ? 0 : static_cast<double>(window.failed) / ended;
    if (options_.abort_failed_share && share > *options_.abort_failed_share) {
      result_.abort_reason =
          Cat(window.failed, " of ", ended, " calls failed within one window, over the limit of ",
              *options_.abort_failed_share * 100, "%");
      Stop(PhaseEnd::kAborted, now);
    } else if (options_.abort_p99 && window.ok > 0 && window.p99_ns > options_.abort_p99->count()) {
      result_.abort_reason =
          Cat("p99 of a window was ", window.p99_ns * 1e-6, " ms, over the limit of ",
              options_.abort_p99->count() * 1e-6, " ms");
      Stop(PhaseEnd::kAborted, now);
    } else if (options_.until_stable) {
      const std::vector<Window> so_far(windows.begin(), windows.begin() + index + 1);
      if (JudgeStability(so_far, result_.open_loop, options_.stability_tolerance).stable) {
        Stop(PhaseEnd::kStable, now);
      }
    }
  }

  void Conclude() {
    const int64_t now = generator_.NowNs();
    if (!stopping() && generator_.calls_used_up()) result_.end = PhaseEnd::kCalls;
    // A number of calls may be over before the time is. A schedule is not: the time after its last
    // call is a gap like those between calls.
    if (result_.end == PhaseEnd::kCalls) end_ns_ = std::min(end_ns_, now);
    result_.stats.SetEnd(end_ns_);
    result_.stats.CloseWindows(std::max(now, end_ns_));
    result_.measured_seconds = std::max<int64_t>(0, end_ns_ - options_.warm_up.count()) * 1e-9;
    result_.unsent = generator_.UnsentSince(options_.warm_up.count());
    result_.offered =
        result_.stats.ok + result_.stats.failed + result_.stats.cancelled + result_.unsent;
    // Only whole windows are judged.
    std::vector<Window> whole = result_.stats.windows;
    whole.resize(std::min<size_t>(
        whole.size(),
        std::max<int64_t>(0, end_ns_ - options_.warm_up.count()) / options_.window.count()));
    if (options_.judge_stability) {
      result_.stability = JudgeStability(whole, result_.open_loop, options_.stability_tolerance);
    }
  }

  const PhaseOptions& options_;
  const PhaseHooks& hooks_;
  int64_t end_ns_;
  int64_t give_up_ns_;
  Generator generator_;
  PhaseResult result_;
  size_t judged_ = 0;
};

}  // namespace

absl::StatusOr<PhaseResult> RunPhase(Target* target, const PhaseOptions& options,
                                     const PhaseHooks& hooks) {
  return Runner(target, options, hooks).Run();
}

}  // namespace attn::load
