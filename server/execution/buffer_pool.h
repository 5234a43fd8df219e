// Memory for tensors: aligned, uninitialised, reused from call to call.
#ifndef ATTN_SERVER_EXECUTION_BUFFER_POOL_H_
#define ATTN_SERVER_EXECUTION_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/mutex.h"

namespace attn::server {

// Why a pool: fresh pages cost about as much as copying into them, and memory that comes and goes
// by the gigabyte keeps the allocator's heap large. Blocks of 1 MiB and more are mapped, so what
// the pool gives up goes back to the system. Thread-safe.
class BufferPool {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
  // The next multiple of kAlignment: where what follows `bytes` in one block may begin.
  static constexpr uint64_t AlignUp(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // A block, given back to the pool when destroyed. Move-only. The pool must outlive it.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();
    std::byte* data() const { return data_; }
    size_t size() const { return size_; }  // as asked for
    std::span<std::byte> span() const { return {data_, size_}; }

   private:
    friend class BufferPool;
    BufferPool* pool_ = nullptr;
    std::byte* data_ = nullptr;
    size_t size_ = 0;
    size_t capacity_ = 0;
    bool pinned_ = false;
  };

  // Page-locks memory for copies to and from devices, and lets it go again. Null: not wanted. pin()
  // returns false where that fails; the memory is then used as it is.
  struct Pinning {
    bool (*pin)(void* data, size_t bytes) = nullptr;
    void (*unpin)(void* data) = nullptr;
  };

  struct Stats {
    uint64_t retained_bytes = 0;  // kept for reuse
    uint64_t in_use_bytes = 0;
    uint64_t reused = 0;  // allocations served from what was kept
    uint64_t fresh = 0;
  };

  explicit BufferPool(uint64_t max_retained_bytes) : BufferPool(max_retained_bytes, Pinning()) {}
  // Blocks of 1 MiB and more are pinned; smaller ones are copied faster than they are pinned.
  BufferPool(uint64_t max_retained_bytes, const Pinning& pinning)
      : max_retained_bytes_(max_retained_bytes), pinning_(pinning) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // At least `bytes`, 64-byte aligned, contents unspecified. 0 bytes gives a valid empty buffer.
  // Errors: RESOURCE_EXHAUSTED where the system has no memory (names the size).
  absl::StatusOr<Buffer> Allocate(uint64_t bytes) ATTN_EXCLUDES(mutex_);

  // Gives back to the system what is kept for reuse.
  void Trim() ATTN_EXCLUDES(mutex_);

  Stats stats() const ATTN_EXCLUDES(mutex_);

 private:
  struct Block {
    std::byte* data;
    size_t capacity;
    bool pinned;
  };
  // Pins the block where that is wanted and worth it.
  bool Pin(std::byte* data, size_t capacity) const;
  void Free(const Block& block) const;
  void GiveBack(Block block) ATTN_EXCLUDES(mutex_);

  const uint64_t max_retained_bytes_;
  const Pinning pinning_;
  mutable Mutex mutex_;
  std::vector<Block> free_ ATTN_GUARDED_BY(mutex_);  // least recently given back first
  Stats stats_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_BUFFER_POOL_H_
