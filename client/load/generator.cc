#include "client/load/generator.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <limits>
#include <system_error>
#include <utility>

#include "kernels/api/text.h"

namespace attn::load {
namespace {

// How long a sleep goes on without looking whether it is still wanted.
constexpr int64_t kSleepSliceNs = 20'000'000;

}  // namespace

Generator::Generator(Target* target, const PhaseOptions& options, Verifier* verifier)
    : target_(target),
      options_(options),
      verifier_(verifier),
      measure_from_ns_(options.warm_up.count()),
      start_(std::chrono::steady_clock::now()),
      stop_sending_ns_(std::numeric_limits<int64_t>::max()),
      picker_(options.weights, options.seed) {}

Generator::~Generator() {
  StopSending();
  CancelCalls();
  for (const auto& worker : workers_) worker->thread.join();
}

absl::Status Generator::Start() {
  start_ = std::chrono::steady_clock::now();
  const int threads = std::max(1, options_.max_in_flight);
  live_.store(threads);
  Random seeds(options_.seed);
  for (int i = 0; i < threads; ++i) {
    workers_.push_back(std::make_unique<Worker>());
    Worker* const self = workers_.back().get();
    const uint64_t seed = seeds.Bits();
    try {
      self->thread = std::thread([this, self, seed] { RunWorker(self, seed); });
    } catch (const std::system_error& error) {
      workers_.pop_back();
      return absl::ResourceExhaustedError(
          Cat("cannot start ", threads, " threads, one per call in flight: ", error.what()));
    }
  }
  return absl::OkStatus();
}

void Generator::RunWorker(Worker* self, uint64_t seed) {
  // The default slack lets the kernel wake a sleeper 50 us late.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  if (options_.schedule == nullptr) {
    RunClosed(seed);
  } else {
    RunOpen(self);
  }
  live_.fetch_sub(1);
}

int64_t Generator::NowNs() const {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
}

bool Generator::MaySend(int64_t due_ns) const {
  return !stopped_.load(std::memory_order_relaxed) &&
         due_ns < stop_sending_ns_.load(std::memory_order_relaxed);
}

bool Generator::TakeCall(int64_t intended_ns) {
  if (!options_.max_calls || intended_ns < measure_from_ns_) return true;
  if (measured_.fetch_add(1) < *options_.max_calls) return true;
  calls_used_up_.store(true);
  return false;
}

void Generator::Send(uint32_t entry, int64_t intended_ns, bool paced) {
  CallRecord record;
  record.entry = entry;
  record.paced = paced;
  const int64_t number = sent_.fetch_add(1, std::memory_order_relaxed);
  TraceContext trace = MakeTraceContext();
  CallRequest request;
  request.entry = entry;
  request.traceparent = std::move(trace.traceparent);
  request.keep_results =
      verifier_ != nullptr && options_.verify_every > 0 && number % options_.verify_every == 0;
  request.cancel = &cancel_;
  record.trace_id = std::move(trace.trace_id);
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  record.intended_ns = intended_ns;
  record.sent_ns = options_.schedule == nullptr ? intended_ns : NowNs();
  record.reply = target_->Call(request);
  record.done_ns = NowNs();
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  if (!record.reply.results.empty()) {
    verifier_->Offer(entry, std::move(record.reply.results), record.trace_id);
    record.reply.results.clear();
  }
  MutexLock lock(records_mutex_);
  records_.push_back(std::move(record));
}

std::vector<CallRecord> Generator::TakeRecords() {
  std::vector<CallRecord> taken;
  MutexLock lock(records_mutex_);
  taken.reserve(records_.capacity());
  taken.swap(records_);
  return taken;
}

void Generator::RunClosed(uint64_t seed) {
  WeightedPicker picker(options_.weights, seed);
  for (;;) {
    const int64_t now = NowNs();
    if (!MaySend(now) || !TakeCall(now)) return;
    Send(picker.Next(), now, /*paced=*/false);
  }
}

void Generator::RunOpen(Worker* self) {
  while (BecomeLeader(self)) {
    Arrival arrival;
    bool paced = false;
    if (!Lead(&arrival, &paced)) {
      EndLead();
      return;
    }
    const uint32_t entry = arrival.entry ? *arrival.entry : picker_.Next();
    PassLead();
    Send(entry, arrival.time_ns, paced);
  }
}

bool Generator::BecomeLeader(Worker* self) {
  {
    MutexLock lock(lead_mutex_);
    if (ended_) return false;
    if (!led_) {
      led_ = true;
      return true;
    }
    idle_.push_back(self);
  }
  self->wake.acquire();
  MutexLock lock(lead_mutex_);
  return !ended_;
}

bool Generator::Lead(Arrival* arrival, bool* paced) {
  if (!options_.schedule->Next(arrival)) return false;
  if (NowNs() < arrival->time_ns) {
    *paced = true;
    if (!SleepUntil(arrival->time_ns)) {
      unsent_ = *arrival;
      return false;
    }
  }
  if (!MaySend(arrival->time_ns)) {
    unsent_ = *arrival;
    return false;
  }
  return TakeCall(arrival->time_ns);
}

void Generator::PassLead() {
  Worker* next = nullptr;
  {
    MutexLock lock(lead_mutex_);
    if (idle_.empty()) {
      led_ = false;
      return;
    }
    next = idle_.back();
    idle_.pop_back();
  }
  next->wake.release();
}

void Generator::EndLead() {
  std::vector<Worker*> idle;
  {
    MutexLock lock(lead_mutex_);
    ended_ = true;
    idle.swap(idle_);
  }
  for (Worker* worker : idle) worker->wake.release();
}

bool Generator::SleepUntil(int64_t time_ns) const {
  for (;;) {
    const int64_t now = NowNs();
    if (now >= time_ns) return true;
    if (!MaySend(now)) return false;
    const auto wake = start_ + std::chrono::nanoseconds(std::min(time_ns, now + kSleepSliceNs));
    const int64_t ns = std::chrono::nanoseconds(wake.time_since_epoch()).count();
    // steady_clock is CLOCK_MONOTONIC; an absolute time does not drift when the thread is late.
    const timespec until = {ns / 1'000'000'000, ns % 1'000'000'000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
  }
}

int64_t Generator::UnsentSince(int64_t from_ns) {
  if (options_.schedule == nullptr || calls_used_up_.load()) return 0;
  const int64_t until_ns = std::min(NowNs(), stop_sending_ns_.load());
  MutexLock lock(lead_mutex_);
  int64_t unsent = 0;
  const auto count = [&](const Arrival& arrival) {
    if (arrival.time_ns >= until_ns) return false;
    if (arrival.time_ns >= from_ns) ++unsent;
    return true;
  };
  if (unsent_ && !count(*unsent_)) return unsent;
  Arrival arrival;
  while (options_.schedule->Next(&arrival) && count(arrival)) {
  }
  return unsent;
}

}  // namespace attn::load
