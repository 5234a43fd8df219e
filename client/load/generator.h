// The threads that send calls. Internal to RunPhase().
#ifndef ATTN_CLIENT_LOAD_GENERATOR_H_
#define ATTN_CLIENT_LOAD_GENERATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <semaphore>
#include <thread>
#include <vector>

#include "client/load/phase.h"
#include "kernels/api/mutex.h"

namespace attn::load {

// Each thread makes one call at a time.
//
// Closed loop: it sends the next when that has ended.
//
// Open loop: one thread at a time leads. The leader takes the next arrival, sleeps until it is due,
// hands the lead to the thread that became idle last, and makes the call itself. Where no thread is
// idle the lead lies vacant until one is; arrivals that have become due meanwhile are then sent at
// once, in order, with the times they were meant for. So nobody queues work, and no thread wakes
// but to send.
class Generator {
 public:
  // `verifier` may be null.
  Generator(Target* target, const PhaseOptions& options, Verifier* verifier);
  // Stops and waits for the calls in flight, which are cancelled.
  ~Generator();

  // Times count from here. Errors: RESOURCE_EXHAUSTED: so many threads cannot be had.
  absl::Status Start();

  int64_t NowNs() const;
  // No call is sent that would begin, or that was due, after this; called at most once more, with
  // an earlier time.
  void StopSendingAt(int64_t time_ns) { stop_sending_ns_.store(time_ns); }
  // Sends nothing more, whatever is due.
  void StopSending() { stopped_.store(true); }
  void CancelCalls() { cancel_.store(true); }

  // What has ended since the last call of it.
  std::vector<CallRecord> TakeRecords();
  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  bool ended() const { return live_.load() == 0; }
  bool calls_used_up() const { return calls_used_up_.load(); }
  // Open loop, when ended: calls that were due since `from_ns` and never sent.
  int64_t UnsentSince(int64_t from_ns);
  int64_t sent() const { return sent_.load(); }

 private:
  struct Worker {
    std::thread thread;
    std::binary_semaphore wake{0};
  };

  void RunWorker(Worker* self, uint64_t seed);
  void RunClosed(uint64_t seed);
  void RunOpen(Worker* self);
  // False: nothing more is to be sent.
  bool Lead(Arrival* arrival, bool* paced);
  bool BecomeLeader(Worker* self);
  void PassLead();
  void EndLead();
  // Sleeps until the time, or until there is nothing more to send (false).
  bool SleepUntil(int64_t time_ns) const;
  bool MaySend(int64_t due_ns) const;
  // Counts a call against max_calls.
  bool TakeCall(int64_t intended_ns);
  void Send(uint32_t entry, int64_t intended_ns, bool paced);

  Target* const target_;
  const PhaseOptions& options_;
  Verifier* const verifier_;
  const int64_t measure_from_ns_;
  std::chrono::steady_clock::time_point start_;
  std::vector<std::unique_ptr<Worker>> workers_;

  std::atomic<int64_t> stop_sending_ns_;
  std::atomic<bool> stopped_{false}, cancel_{false}, calls_used_up_{false};
  std::atomic<int64_t> live_{0}, in_flight_{0}, measured_{0}, sent_{0};

  Mutex records_mutex_;
  std::vector<CallRecord> records_ ATTN_GUARDED_BY(records_mutex_);

  Mutex lead_mutex_;
  bool led_ ATTN_GUARDED_BY(lead_mutex_) = false;    // some thread leads
  bool ended_ ATTN_GUARDED_BY(lead_mutex_) = false;  // nothing more is to be sent
  std::vector<Worker*> idle_ ATTN_GUARDED_BY(lead_mutex_);
  // Only the leader touches these; EndLead() publishes them to UnsentSince().
  WeightedPicker picker_;
  std::optional<Arrival> unsent_;
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_GENERATOR_H_
