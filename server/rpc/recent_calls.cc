#include "server/rpc/recent_calls.h"

#include <algorithm>
#include <utility>

namespace attn::server {

CallShape ShapeOf(const AttentionProblem& problem) {
  return {.layout = problem.layout,
          .dtype = problem.dtype,
          .batch = static_cast<int64_t>(problem.sequences.size()),
          .seqlen_q = problem.seqlen_q,
          .seqlen_k = problem.seqlen_k,
          .num_heads = problem.num_heads,
          .num_kv_heads = problem.num_kv_heads,
          .head_dim = problem.head_dim,
          .head_dim_v = problem.head_dim_v,
          .causal = problem.window_right == 0};
}

::attention::v1::ExecutionReport CallRecord::ParseReport() const {
  ::attention::v1::ExecutionReport parsed;
  parsed.ParseFromString(report);  // our own bytes
  return parsed;
}

void RecentCalls::Add(CallRecord record) {
  if (record.error.size() > kMaxErrorBytes) record.error.resize(kMaxErrorBytes);
  MutexLock lock(mutex_);
  std::swap(ring_[next_], record);  // the one that leaves is freed after the lock
  next_ = (next_ + 1) % kCapacity;
  size_ = std::min(size_ + 1, kCapacity);
}

std::vector<CallRecord> RecentCalls::Snapshot() const {
  std::vector<CallRecord> all;
  all.reserve(kCapacity);
  MutexLock lock(mutex_);
  for (size_t i = 1; i <= size_; ++i) all.push_back(ring_[(next_ + kCapacity - i) % kCapacity]);
  return all;
}

}  // namespace attn::server
