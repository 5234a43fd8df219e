#include "server/execution/buffer_pool.h"

#include <sys/mman.h>

#include <bit>
#include <new>
#include <utility>

#include "kernels/api/text.h"

namespace attn::server {
namespace {

constexpr size_t kMinCapacity = 4096;
constexpr size_t kMapThreshold = size_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
// The free list is searched linearly; 64 entries cost less than a cache miss to memory.
constexpr size_t kMaxFree = 64;

// Four capacities per power of two, so at most a quarter is wasted and different sizes share
// blocks.
size_t RoundUp(uint64_t bytes) {
  if (bytes <= kMinCapacity) return kMinCapacity;
  const uint64_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

std::byte* NewBlock(size_t capacity) {
  if (capacity < kMapThreshold) {
    return static_cast<std::byte*>(
        ::operator new (capacity, std::align_val_t{BufferPool::kAlignment}, std::nothrow));
  }
  void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // Fewer page faults on first use; the kernel may ignore it.
  if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

void FreeBlock(std::byte* data, size_t capacity) {
  if (capacity < kMapThreshold) {
    ::operator delete (data, std::align_val_t{BufferPool::kAlignment});
  } else {
    munmap(data, capacity);
  }
}

}  // namespace

BufferPool::Buffer& BufferPool::Buffer::operator=(Buffer&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

BufferPool::Buffer::~Buffer() {
  if (data_ != nullptr) pool_->GiveBack({data_, capacity_, pinned_});
}

BufferPool::~BufferPool() {
  MutexLock lock(mutex_);
  for (const Block& block : free_) Free(block);
}

absl::StatusOr<BufferPool::Buffer> BufferPool::Allocate(uint64_t bytes) {
  if (bytes > (uint64_t{1} << 46)) {  // more than an address space holds
    return absl::ResourceExhaustedError(Cat("no memory for a buffer of ", bytes, " bytes"));
  }
  Buffer buffer;
  buffer.pool_ = this;
  buffer.size_ = bytes;
  buffer.capacity_ = RoundUp(bytes);
  {
    MutexLock lock(mutex_);
    for (size_t i = free_.size(); i-- > 0;) {
      if (free_[i].capacity != buffer.capacity_) continue;
      buffer.data_ = free_[i].data;
      buffer.pinned_ = free_[i].pinned;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      stats_.retained_bytes -= buffer.capacity_;
      stats_.in_use_bytes += buffer.capacity_;
      ++stats_.reused;
      return buffer;
    }
  }
  buffer.data_ = NewBlock(buffer.capacity_);
  if (buffer.data_ == nullptr) {
    return absl::ResourceExhaustedError(Cat("no memory for a buffer of ", bytes, " bytes"));
  }
  buffer.pinned_ = Pin(buffer.data_, buffer.capacity_);
  MutexLock lock(mutex_);
  stats_.in_use_bytes += buffer.capacity_;
  ++stats_.fresh;
  return buffer;
}

bool BufferPool::Pin(std::byte* data, size_t capacity) const {
  return capacity >= kMapThreshold && pinning_.pin != nullptr && pinning_.pin(data, capacity);
}

void BufferPool::Free(const Block& block) const {
  if (block.pinned) pinning_.unpin(block.data);
  FreeBlock(block.data, block.capacity);
}

void BufferPool::GiveBack(Block block) {
  std::vector<Block> surplus;
  {
    MutexLock lock(mutex_);
    stats_.in_use_bytes -= block.capacity;
    stats_.retained_bytes += block.capacity;
    free_.push_back(block);
    size_t drop = 0;  // the longest unused go first
    while (drop < free_.size() &&
           (stats_.retained_bytes > max_retained_bytes_ || free_.size() - drop > kMaxFree)) {
      stats_.retained_bytes -= free_[drop].capacity;
      surplus.push_back(free_[drop++]);
    }
    free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(drop));
  }
  for (const Block& b : surplus) Free(b);
}

void BufferPool::Trim() {
  std::vector<Block> surplus;
  {
    MutexLock lock(mutex_);
    surplus.swap(free_);
    stats_.retained_bytes = 0;
  }
  for (const Block& b : surplus) Free(b);
}

BufferPool::Stats BufferPool::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

}  // namespace attn::server
