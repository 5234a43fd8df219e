#include "kernels/cuda/runtime/memory_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/api/text.h"
#include "kernels/cuda/runtime/token_wait.h"

namespace attn::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// A kept block may be this much larger than what is asked for, in quarters.
constexpr int64_t kSlackQuarters = 5;

}  // namespace

MemoryPool::Block& MemoryPool::Block::operator=(Block&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  return *this;
}

MemoryPool::Block::~Block() {
  if (data_ != nullptr) pool_->GiveBack({data_, capacity_});
}

MemoryPool::MemoryPool(Options options, Source source)
    : options_(std::move(options)), source_(std::move(source)) {
  MutexLock lock(mutex_);
  stats_.budget_bytes = options_.budget_bytes;
}

MemoryPool::~MemoryPool() { Trim(); }

// Eight capacities per power of two: different sizes share blocks, an eighth at most is wasted.
int64_t MemoryPool::CapacityFor(int64_t bytes) const {
  if (bytes <= options_.smallest_bytes)
    return std::min(options_.smallest_bytes, options_.budget_bytes);
  const auto floor = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1)));
  const int64_t step = std::max(floor / 8, kAlignment);
  return std::min((bytes + step - 1) / step * step, options_.budget_bytes);
}

bool MemoryPool::TakeOrReserve(int64_t* capacity, std::byte** data, std::vector<Free>* surplus) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->capacity < *capacity || it->capacity / kSlackQuarters > *capacity / 4) continue;
    if (best == free_.end() || it->capacity < best->capacity) best = it;
  }
  if (best != free_.end()) {
    *capacity = best->capacity;
    *data = best->data;
    free_.erase(best);
    stats_.retained_bytes -= *capacity;
    stats_.in_use_bytes += *capacity;
    ++stats_.reused;
    return true;
  }
  if (stats_.in_use_bytes + *capacity > options_.budget_bytes) return false;
  size_t drop = 0;  // the longest unused go first
  while (stats_.in_use_bytes + stats_.retained_bytes + *capacity > options_.budget_bytes) {
    stats_.retained_bytes -= free_[drop].capacity;
    surplus->push_back(free_[drop++]);
  }
  free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(drop));
  stats_.in_use_bytes += *capacity;
  ++stats_.fresh;
  *data = nullptr;
  return true;
}

absl::StatusOr<std::byte*> MemoryPool::Fresh(int64_t capacity) {
  absl::StatusOr<void*> data = source_.allocate(capacity);
  if (!data.ok() && absl::IsResourceExhausted(data.status())) {
    Trim();  // what is kept may be what is missing
    data = source_.allocate(capacity);
  }
  if (data.ok()) return static_cast<std::byte*>(*data);
  {
    MutexLock lock(mutex_);
    stats_.in_use_bytes -= capacity;
    --stats_.fresh;
  }
  changed_.NotifyAll();
  return data.status();
}

absl::StatusOr<MemoryPool::Block> MemoryPool::Allocate(int64_t bytes, const CancelToken* cancel) {
  Block block;
  if (bytes <= 0) return block;
  if (bytes > options_.budget_bytes) {
    return absl::ResourceExhaustedError(Cat(options_.name, ": the call needs ", bytes,
                                            " bytes; the limit is ", options_.budget_bytes));
  }
  int64_t capacity = CapacityFor(bytes);
  std::byte* data = nullptr;
  std::vector<Free> surplus;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    waiting_.push_back(ticket);
    while (true) {
      if (cancel != nullptr) status = cancel->Check();
      if (!status.ok()) break;
      if (waiting_.front() == ticket && TakeOrReserve(&capacity, &data, &surplus)) break;
      WaitOnce(changed_, mutex_, cancel);
    }
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), ticket));
  }
  changed_.NotifyAll();
  if (!status.ok()) return status;
  FreeAll(surplus);
  if (data == nullptr) {
    absl::StatusOr<std::byte*> fresh = Fresh(capacity);
    if (!fresh.ok()) return fresh.status();
    data = *fresh;
  }
  block.pool_ = this;
  block.data_ = data;
  block.size_ = bytes;
  block.capacity_ = capacity;
  return block;
}

void MemoryPool::FreeAll(const std::vector<Free>& blocks) {
  for (const Free& block : blocks) source_.free(block.data);
}

void MemoryPool::GiveBack(Free block) {
  {
    MutexLock lock(mutex_);
    stats_.in_use_bytes -= block.capacity;
    stats_.retained_bytes += block.capacity;
    free_.push_back(block);
  }
  changed_.NotifyAll();
}

void MemoryPool::Trim() {
  std::vector<Free> surplus;
  {
    MutexLock lock(mutex_);
    surplus.swap(free_);
    stats_.retained_bytes = 0;
  }
  FreeAll(surplus);
}

MemoryPool::Stats MemoryPool::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

int MemoryPool::waiting() const {
  MutexLock lock(mutex_);
  return static_cast<int>(waiting_.size());
}

}  // namespace attn::cuda
