// A thread that does a small thing again and again.
#ifndef ATTN_SERVER_EXECUTION_PERIODIC_H_
#define ATTN_SERVER_EXECUTION_PERIODIC_H_

#include <chrono>
#include <functional>
#include <thread>

#include "kernels/api/mutex.h"

namespace attn::server {

// Calls `tick` every `period` until destroyed.
class Periodic {
 public:
  Periodic(std::chrono::milliseconds period, std::function<void()> tick)
      : thread_([this, period, tick = std::move(tick)] { Loop(period, tick); }) {}
  ~Periodic() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    stop_.NotifyAll();
    thread_.join();
  }
  Periodic(const Periodic&) = delete;
  Periodic& operator=(const Periodic&) = delete;

 private:
  void Loop(std::chrono::milliseconds period, const std::function<void()>& tick) {
    while (Sleep(period)) tick();
  }
  // False: time to stop.
  bool Sleep(std::chrono::milliseconds period) ATTN_EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + period;
    MutexLock lock(mutex_);
    while (!stopping_ && stop_.WaitUntil(mutex_, until)) {
    }
    return !stopping_;
  }

  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ATTN_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_PERIODIC_H_
