#include "server/rpc/stream_watch.h"

namespace attn::server {

void StreamWatch::Add(WatchedStream* stream) {
  MutexLock lock(mutex_);
  streams_.insert(stream);
}

void StreamWatch::Remove(WatchedStream* stream) {
  MutexLock lock(mutex_);
  streams_.erase(stream);
}

void StreamWatch::Sweep(TimePoint now) {
  if (idle_timeout_.count() == 0) return;
  std::vector<WatchedStream*> claimed;
  {
    MutexLock lock(mutex_);
    for (WatchedStream* stream : streams_) {
      if (stream->EndOrClaim(now - idle_timeout_)) claimed.push_back(stream);
    }
  }
  for (WatchedStream* stream : claimed) stream->EndClaimed();
}

}  // namespace attn::server
