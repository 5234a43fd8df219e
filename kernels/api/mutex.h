// std::mutex with clang thread-safety annotations, and the annotations themselves. absl::Mutex is
// not used in our code: the distributions' absl is not instrumented for TSan. Source of the
// attribute names: clang, "Thread Safety Analysis".
#ifndef ATTN_KERNELS_API_MUTEX_H_
#define ATTN_KERNELS_API_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define ATTN_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define ATTN_THREAD_ANNOTATION(x)
#endif
#define ATTN_CAPABILITY(x) ATTN_THREAD_ANNOTATION(capability(x))
#define ATTN_SCOPED_CAPABILITY ATTN_THREAD_ANNOTATION(scoped_lockable)
#define ATTN_GUARDED_BY(x) ATTN_THREAD_ANNOTATION(guarded_by(x))
#define ATTN_REQUIRES(...) ATTN_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define ATTN_EXCLUDES(...) ATTN_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ATTN_ACQUIRE(...) ATTN_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define ATTN_RELEASE(...) ATTN_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

namespace attn {

class ATTN_CAPABILITY("mutex") Mutex {
 public:
  void Lock() ATTN_ACQUIRE() { mutex_.lock(); }
  void Unlock() ATTN_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ATTN_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ATTN_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() ATTN_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class CondVar {
 public:
  void Wait(Mutex& mutex) ATTN_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }
  // False on timeout.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point deadline)
      ATTN_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool signalled = cv_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace attn

#endif  // ATTN_KERNELS_API_MUTEX_H_
