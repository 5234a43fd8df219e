#include "server/execution/executor.h"

namespace attn::server {

Executor::Executor(int num_workers, const Clock* clock) : clock_(clock) {
  workers_.reserve(num_workers);
  for (int i = 0; i < num_workers; ++i) {
    workers_.emplace_back([this] { WorkerLoop(); });
  }
}

Executor::~Executor() { Shutdown(); }

absl::Status Executor::Refusal(const Job& job) const {
  // The deadline first: gRPC cancels a call whose deadline passes, and the caller should learn why.
  if (clock_->Now() >= job.deadline()) {
    return absl::DeadlineExceededError("the deadline passed while the call was queued");
  }
  if (job.token().cancelled()) return absl::CancelledError("cancelled while queued");
  return absl::OkStatus();
}

void Executor::Submit(Job* job) {
  absl::Status refusal;
  {
    // The token is looked at under the lock: a cancel that comes later finds the job in the queue.
    MutexLock lock(mutex_);
    refusal = stopping_ ? absl::UnavailableError("the server is shutting down") : Refusal(*job);
    if (refusal.ok()) {
      queue_.push_back(job);
      job->position_ = std::prev(queue_.end());
      job->queued_ = true;
      queued_bytes_ += job->bytes();
    }
  }
  if (refusal.ok()) {
    work_.NotifyOne();
  } else {
    job->Drop(refusal);
  }
}

void Executor::Remove(Job* job) {
  queue_.erase(job->position_);
  job->queued_ = false;
  queued_bytes_ -= job->bytes();
}

void Executor::DropIfQueued(Job* job) {
  absl::Status refusal;
  {
    MutexLock lock(mutex_);
    if (!job->queued_) return;
    refusal = Refusal(*job);
    if (refusal.ok()) return;
    Remove(job);
  }
  job->Drop(refusal);
}

void Executor::WorkerLoop() {
  while (true) {
    Job* job = nullptr;
    absl::Status refusal;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) work_.Wait(mutex_);
      if (queue_.empty()) return;
      job = queue_.front();
      Remove(job);
      refusal = Refusal(*job);
      ++running_;
    }
    if (refusal.ok()) {
      job->Run();
    } else {
      job->Drop(refusal);
    }
    MutexLock lock(mutex_);
    --running_;
  }
}

void Executor::Shutdown() {
  std::vector<Job*> waiting;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    while (!queue_.empty()) {
      waiting.push_back(queue_.front());
      Remove(queue_.front());
    }
  }
  work_.NotifyAll();
  for (Job* job : waiting) job->Drop(absl::UnavailableError("the server is shutting down"));
  for (std::thread& worker : workers_) {
    if (worker.joinable()) worker.join();
  }
}

Executor::Stats Executor::stats() const {
  MutexLock lock(mutex_);
  return {static_cast<int64_t>(queue_.size()), queued_bytes_, running_};
}

}  // namespace attn::server
