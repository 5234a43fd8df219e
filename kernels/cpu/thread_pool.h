// The worker threads that all CPU paths share.
#ifndef ATTN_KERNELS_CPU_THREAD_POOL_H_
#define ATTN_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/api/mutex.h"

namespace attn {

// A fixed set of threads that run loops. One pool serves several calling threads at once: each call
// is a job of its own, and idle workers join whichever job still has work. Thread-safe.
class ThreadPool {
 public:
  // `num_workers` counts the calling thread, so num_workers - 1 threads are started. 0: one per
  // core that this process may run on.
  explicit ThreadPool(int num_workers = 0);
  // No ParallelFor() may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_workers() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls fn(index, worker) once for each index in [0, n), handed out in increasing order to
  // whoever is free, and returns when all have returned. `worker` is in [0, num_workers()) and is
  // never in use twice at the same time within one call; the calling thread is worker 0. With n = 1
  // or one worker, everything runs on the calling thread and no other is woken. fn must not call
  // ParallelFor() of the same pool and must not throw.
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t index, int worker)> fn);

 private:
  struct Job {
    Job(int64_t n, absl::FunctionRef<void(int64_t, int)> fn) : n(n), fn(fn) {}
    const int64_t n;
    const absl::FunctionRef<void(int64_t, int)> fn;
    std::atomic<int64_t> next{0};
    // Both guarded by the pool's mutex_.
    int joined = 1;   // workers that ever took part, the caller included
    int running = 0;  // pool threads inside the job now
  };

  static void RunIndices(Job& job, int worker);
  void WorkerLoop();

  Mutex mutex_;
  CondVar work_;  // a job came, or stop_
  CondVar done_;  // a pool thread left a job
  std::list<Job*> jobs_ ATTN_GUARDED_BY(mutex_);
  bool stop_ ATTN_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_THREAD_POOL_H_
