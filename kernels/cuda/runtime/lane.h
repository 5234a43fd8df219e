// One place on a device where a call can be under way: a stream, its timing events, and pinned
// chunks through which pageable memory travels.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_LANE_H_
#define ATTN_KERNELS_CUDA_RUNTIME_LANE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime/handles.h"
#include "kernels/cuda/runtime/memory_pool.h"

namespace attn::cuda {

// Of the counters by which thread blocks of one kernel share out work.
inline constexpr int64_t kCounterBytes = 256;

// Used by one thread at a time.
class Lane {
 public:
  // Large enough that starting a copy (some µs) is nothing beside it, small enough that filling the
  // first chunk delays little: 4 MiB take 75 µs at PCIe 5's 55 GB/s.
  static constexpr int64_t kChunkBytes = int64_t{4} << 20;
  static constexpr int kChunks = 2;
  static constexpr int64_t kPinnedBytes = 2 * kChunks * kChunkBytes;  // of one lane, both ways

  struct Chunk {
    MemoryPool::Block memory;
    Event done;  // the latest copy from or to it
    bool busy = false;
  };

  // On the current device; pinned memory comes from `pinned`.
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Driver* driver, MemoryPool* pinned);

  cudaStream_t stream() const { return stream_.get(); }
  // kCounterBytes of device memory: zero between calls, which kernels see to.
  uint32_t* counters() const { return static_cast<uint32_t*>(counters_.get()); }
  // Enqueues zeroing them, for when it is not sure that the latest call's kernels ran to their end.
  cudaError_t ZeroCounters(Driver* driver);
  std::array<Chunk, kChunks>& upload_chunks() { return upload_; }
  std::array<Chunk, kChunks>& download_chunks() { return download_; }

  // Begin of the call, begin and end of its kernels, end of the call.
  Event begin, kernels_begin, kernels_end, end;

 private:
  Stream stream_;
  DeviceBlock counters_;
  std::array<Chunk, kChunks> upload_, download_;
};

// Copies from host memory to one block of device memory, on a lane's stream. Small pieces next to
// each other on the device travel together; pageable memory goes through the lane's chunks, one
// being filled while the other travels; large pinned memory goes directly and must stay untouched
// until the stream has passed. Errors: as ToStatus().
class Uploader {
 public:
  Uploader(Driver* driver, Lane* lane) : driver_(driver), lane_(lane) {}

  absl::Status Add(std::byte* to, const void* from, int64_t bytes);
  // Sends what still waits for a fuller chunk.
  absl::Status Flush();
  uint64_t bytes() const { return bytes_; }

 private:
  absl::Status NextChunk();

  Driver* const driver_;
  Lane* const lane_;
  int chunk_ = 0;              // being filled
  std::byte* base_ = nullptr;  // device address of the chunk's first byte
  int64_t used_ = 0;           // bytes of the chunk filled
  uint64_t bytes_ = 0;
};

// Copies from device memory to host memory, likewise. Add() all pieces, then Run(), which returns
// when everything has arrived or failed. Records Lane::end after the last copy.
class Downloader {
 public:
  Downloader(Driver* driver, Lane* lane) : driver_(driver), lane_(lane) {}

  void Add(void* to, const std::byte* from, int64_t bytes);
  absl::Status Run();
  uint64_t bytes() const { return bytes_; }

 private:
  struct Piece {
    std::byte* to;
    const std::byte* from;
    int64_t bytes;
  };
  // Pieces that fit into one chunk together, or one piece that goes directly.
  struct Batch {
    size_t first, count;
    const std::byte* from;
    int64_t bytes;
    bool direct;
  };
  void MakeBatches();
  absl::Status Send(const Batch& batch, int chunk);
  absl::Status Receive(const Batch& batch, int chunk);
  absl::Status RecordEnd();

  Driver* const driver_;
  Lane* const lane_;
  std::vector<Piece> pieces_;
  std::vector<Batch> batches_;
  uint64_t bytes_ = 0;
};

// Waits for the event: looks at it for a moment, since a small call is over sooner than a thread
// wakes up, and then sleeps.
cudaError_t WaitFor(Driver* driver, cudaEvent_t event);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_LANE_H_
