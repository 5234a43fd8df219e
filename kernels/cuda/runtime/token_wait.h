// Waiting for a condition variable that a caller's CancelToken, which notifies nobody, may end.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_TOKEN_WAIT_H_
#define ATTN_KERNELS_CUDA_RUNTIME_TOKEN_WAIT_H_

#include <chrono>

#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"

namespace attn::cuda {

// Waits once: until notified or, with a token, for at most 2 ms, after which the caller looks at
// its token again.
inline void WaitOnce(CondVar& changed, Mutex& mutex, const CancelToken* cancel)
    ATTN_REQUIRES(mutex) {
  if (cancel == nullptr) {
    changed.Wait(mutex);
  } else {
    changed.WaitUntil(mutex, std::chrono::steady_clock::now() + std::chrono::milliseconds(2));
  }
}

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_TOKEN_WAIT_H_
