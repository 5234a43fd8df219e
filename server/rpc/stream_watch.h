// Ends streams whose caller has gone silent, so that they do not hold admitted memory for ever.
#ifndef ATTN_SERVER_RPC_STREAM_WATCH_H_
#define ATTN_SERVER_RPC_STREAM_WATCH_H_

#include <chrono>
#include <unordered_set>
#include <vector>

#include "kernels/api/mutex.h"
#include "server/execution/clock.h"

namespace attn::server {

// A stream, as the watch sees it.
class WatchedStream {
 public:
  virtual ~WatchedStream() = default;

  // Called under the watch's lock, which Remove() takes too. Where the stream has been waiting for
  // its caller since before `limit`, ends it or claims it; true: claimed, EndClaimed() must follow.
  // A claimed stream stays alive until EndClaimed().
  virtual bool EndOrClaim(TimePoint limit) = 0;
  // Called without the lock.
  virtual void EndClaimed() = 0;
};

// Thread-safe.
class StreamWatch {
 public:
  explicit StreamWatch(std::chrono::milliseconds idle_timeout) : idle_timeout_(idle_timeout) {}

  // `stream` must be removed before it is deleted.
  void Add(WatchedStream* stream) ATTN_EXCLUDES(mutex_);
  void Remove(WatchedStream* stream) ATTN_EXCLUDES(mutex_);

  // Ends what has been idle for longer than the time-out. Call now and then, not from a thread of
  // gRPC's, which may run callbacks inside calls of ours.
  void Sweep(TimePoint now) ATTN_EXCLUDES(mutex_);

 private:
  const std::chrono::milliseconds idle_timeout_;  // 0: none
  Mutex mutex_;
  std::unordered_set<WatchedStream*> streams_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_STREAM_WATCH_H_
