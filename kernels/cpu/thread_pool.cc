#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>

namespace attn {
namespace {

int CoresOfProcess() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

ThreadPool::ThreadPool(int num_workers) {
  if (num_workers <= 0) num_workers = CoresOfProcess();
  threads_.reserve(num_workers - 1);
  for (int i = 1; i < num_workers; ++i) threads_.emplace_back([this] { WorkerLoop(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::RunIndices(Job& job, int worker) {
  for (int64_t i = job.next.fetch_add(1, std::memory_order_relaxed); i < job.n;
       i = job.next.fetch_add(1, std::memory_order_relaxed)) {
    job.fn(i, worker);
  }
}

void ThreadPool::ParallelFor(int64_t n, absl::FunctionRef<void(int64_t index, int worker)> fn) {
  if (n <= 1 || threads_.empty()) {
    for (int64_t i = 0; i < n; ++i) fn(i, 0);
    return;
  }
  Job job(n, fn);
  std::list<Job*>::iterator position;
  {
    MutexLock lock(mutex_);
    position = jobs_.insert(jobs_.end(), &job);
  }
  if (n - 1 >= static_cast<int64_t>(threads_.size())) {
    work_.NotifyAll();
  } else {
    for (int64_t i = 0; i + 1 < n; ++i) work_.NotifyOne();
  }
  RunIndices(job, /*worker=*/0);
  MutexLock lock(mutex_);
  jobs_.erase(position);  // nobody joins any more
  while (job.running > 0) done_.Wait(mutex_);
}

void ThreadPool::WorkerLoop() {
  MutexLock lock(mutex_);
  while (true) {
    Job* job = nullptr;
    for (Job* candidate : jobs_) {
      if (candidate->next.load(std::memory_order_relaxed) < candidate->n) {
        job = candidate;
        break;
      }
    }
    if (job == nullptr) {
      if (stop_) return;
      work_.Wait(mutex_);
      continue;
    }
    // A thread that leaves a job finds no index left in it, so it never joins the same job twice
    // and `joined` stays within num_workers().
    const int worker = job->joined++;
    ++job->running;
    mutex_.Unlock();
    RunIndices(*job, worker);
    mutex_.Lock();
    if (--job->running == 0) done_.NotifyAll();
  }
}

}  // namespace attn
