#include "server/rpc/recent_calls.h"

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

void RecentCalls::Add(CallRecord record) {
  if (record.error.size() > kMaxErrorBytes) record.error.resize(kMaxErrorBytes);
  std::shared_ptr<const CallRecord> entry = std::make_shared<CallRecord>(std::move(record));
  MutexLock lock(mutex_);
  ring_[next_].swap(entry);  // the record that leaves goes after the lock
  next_ = (next_ + 1) % kCapacity;
}

std::vector<std::shared_ptr<const CallRecord>> RecentCalls::Snapshot() const {
  std::vector<std::shared_ptr<const CallRecord>> all;
  all.reserve(kCapacity);
  MutexLock lock(mutex_);
  for (size_t i = 1; i <= kCapacity; ++i) {
    const auto& record = ring_[(next_ + kCapacity - i) % kCapacity];
    if (record == nullptr) break;
    all.push_back(record);
  }
  return all;
}

}  // namespace attn::server
