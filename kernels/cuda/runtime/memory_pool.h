// Device or pinned memory, reused from call to call: no allocation once the sizes have been seen.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_MEMORY_POOL_H_
#define ATTN_KERNELS_CUDA_RUNTIME_MEMORY_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"

namespace attn::cuda {

// Thread-safe. Why not cudaMallocAsync: its pools grow without a budget that calls can wait for,
// and its memory belongs to a stream's order, while here a block's user waits for the stream
// anyway.
class MemoryPool {
 public:
  // Where memory comes from. Called without a lock held. An allocation is aligned to 256 bytes.
  struct Source {
    std::function<absl::StatusOr<void*>(int64_t bytes)> allocate;
    std::function<void(void* data)> free;
  };
  struct Options {
    std::string name;            // in messages: "memory of CUDA device 0"
    int64_t budget_bytes = 0;    // of blocks in use and kept, together
    int64_t smallest_bytes = 0;  // capacity of the smallest block
  };

  // Given back to the pool when destroyed. Move-only. The pool must outlive it.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept;
    ~Block();
    std::byte* data() const { return data_; }
    int64_t size() const { return size_; }  // as asked for

   private:
    friend class MemoryPool;
    MemoryPool* pool_ = nullptr;
    std::byte* data_ = nullptr;
    int64_t size_ = 0;
    int64_t capacity_ = 0;
  };

  struct Stats {
    int64_t budget_bytes = 0;
    int64_t in_use_bytes = 0;
    int64_t retained_bytes = 0;  // kept for reuse
    int64_t reused = 0;          // allocations served from what was kept
    int64_t fresh = 0;
  };

  MemoryPool(Options options, Source source);
  // All blocks must have been given back.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least `bytes`, contents unspecified; 0 bytes gives an empty block. Waits, first come first
  // served, until the budget has room. Errors: RESOURCE_EXHAUSTED (more than the budget, or the
  // source has no memory; names both numbers), CANCELLED and DEADLINE_EXCEEDED while waiting
  // (`cancel` may be null), others of the source.
  absl::StatusOr<Block> Allocate(int64_t bytes, const CancelToken* cancel) ATTN_EXCLUDES(mutex_);

  // Frees what is kept for reuse.
  void Trim() ATTN_EXCLUDES(mutex_);

  Stats stats() const ATTN_EXCLUDES(mutex_);
  int waiting() const ATTN_EXCLUDES(mutex_);  // calls in Allocate() now

 private:
  struct Free {
    std::byte* data;
    int64_t capacity;
  };
  int64_t CapacityFor(int64_t bytes) const;
  // Takes the best kept block, or reserves room for a fresh one (*data null); *surplus must then be
  // freed first. False: no room yet.
  bool TakeOrReserve(int64_t* capacity, std::byte** data, std::vector<Free>* surplus)
      ATTN_REQUIRES(mutex_);
  absl::StatusOr<std::byte*> Fresh(int64_t capacity) ATTN_EXCLUDES(mutex_);
  void FreeAll(const std::vector<Free>& blocks);
  void GiveBack(Free block) ATTN_EXCLUDES(mutex_);

  const Options options_;
  const Source source_;
  mutable Mutex mutex_;
  CondVar changed_;  // room came, or the head of the queue left
  uint64_t next_ticket_ ATTN_GUARDED_BY(mutex_) = 0;
  std::vector<uint64_t> waiting_ ATTN_GUARDED_BY(mutex_);  // tickets, in order of arrival
  std::vector<Free> free_ ATTN_GUARDED_BY(mutex_);         // least recently given back first
  Stats stats_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_MEMORY_POOL_H_
