// Runs calls: a first-in first-out queue and a fixed number of workers.
#ifndef ATTN_SERVER_EXECUTION_EXECUTOR_H_
#define ATTN_SERVER_EXECUTION_EXECUTOR_H_

#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "server/execution/clock.h"

namespace attn::server {

// One piece of work. After Submit() exactly one of Run() and Drop() is called, once, and the
// executor does not touch the job after that call began; so either may end in the job's deletion.
class Job {
 public:
  virtual ~Job() = default;

  // Called on a worker thread.
  virtual void Run() = 0;
  // The job leaves the queue without having run: CANCELLED, DEADLINE_EXCEEDED or UNAVAILABLE.
  // Called on the thread that found out.
  virtual void Drop(const absl::Status& status) = 0;

  virtual const CancelToken& token() const = 0;
  virtual TimePoint deadline() const = 0;
  virtual uint64_t bytes() const = 0;  // for the gauge of queued bytes

 private:
  friend class Executor;
  std::list<Job*>::iterator position_;  // guarded by Executor::mutex_
  bool queued_ = false;                 // guarded by Executor::mutex_
};

// Thread-safe.
class Executor {
 public:
  struct Stats {
    int64_t queued_requests = 0;
    uint64_t queued_bytes = 0;
    int64_t running = 0;
  };

  Executor(int num_workers, const Clock* clock);
  // As Shutdown().
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues the job, or drops it at once where its token is cancelled, its deadline has passed, or
  // the executor is shut down.
  void Submit(Job* job) ATTN_EXCLUDES(mutex_);

  // Call after cancelling the job's token, or when its deadline has passed (gRPC says so by
  // cancelling). Where the job still waits it is dropped now, without waiting for its turn;
  // otherwise does nothing. The job must be alive.
  void DropIfQueued(Job* job) ATTN_EXCLUDES(mutex_);

  // Drops what waits with UNAVAILABLE, waits for what runs, stops the workers.
  void Shutdown() ATTN_EXCLUDES(mutex_);

  Stats stats() const ATTN_EXCLUDES(mutex_);

 private:
  void WorkerLoop() ATTN_EXCLUDES(mutex_);
  void Remove(Job* job) ATTN_REQUIRES(mutex_);
  // Why a job may not run now; OK: it may.
  absl::Status Refusal(const Job& job) const;

  const Clock* const clock_;
  mutable Mutex mutex_;
  CondVar work_;  // a job came, or stopping_
  std::list<Job*> queue_ ATTN_GUARDED_BY(mutex_);
  uint64_t queued_bytes_ ATTN_GUARDED_BY(mutex_) = 0;
  int64_t running_ ATTN_GUARDED_BY(mutex_) = 0;
  bool stopping_ ATTN_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_EXECUTOR_H_
