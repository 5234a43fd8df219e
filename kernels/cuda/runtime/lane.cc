#include "kernels/cuda/runtime/lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace attn::cuda {
namespace {

// From here on a copy of its own from pinned memory beats a copy by the CPU into the chunk (some
// 10 GB/s) that it shares with others.
constexpr int64_t kDirectBytes = int64_t{128} << 10;
// Pieces further apart on the device than alignment makes them do not travel together.
constexpr int64_t kLargestGap = 256;
// A thread that sleeps wakes up some 30 to 60 µs late.
constexpr std::chrono::microseconds kLook{100};

absl::Status MakeChunk(Driver* driver, MemoryPool* pinned, Lane::Chunk* chunk) {
  absl::StatusOr<MemoryPool::Block> memory = pinned->Allocate(Lane::kChunkBytes, nullptr);
  if (!memory.ok()) return memory.status();
  absl::StatusOr<Event> done = Event::Create(driver);
  if (!done.ok()) return done.status();
  chunk->memory = *std::move(memory);
  chunk->done = *std::move(done);
  return absl::OkStatus();
}

}  // namespace

cudaError_t WaitFor(Driver* driver, cudaEvent_t event) {
  const auto until = std::chrono::steady_clock::now() + kLook;
  do {
    const cudaError_t error = driver->QueryEvent(event);
    if (error != cudaErrorNotReady) return error;
  } while (std::chrono::steady_clock::now() < until);
  return driver->SynchronizeEvent(event);
}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Driver* driver, MemoryPool* pinned) {
  auto lane = std::make_unique<Lane>();
  absl::StatusOr<Stream> stream = Stream::Create(driver);
  if (!stream.ok()) return stream.status();
  lane->stream_ = *std::move(stream);
  absl::StatusOr<DeviceBlock> counters = DeviceBlock::Create(driver, kCounterBytes);
  if (!counters.ok()) return counters.status();
  lane->counters_ = *std::move(counters);
  if (absl::Status s = ToStatus(lane->ZeroCounters(driver), "zeroing counters"); !s.ok()) return s;
  for (Event* event : {&lane->begin, &lane->kernels_begin, &lane->kernels_end, &lane->end}) {
    absl::StatusOr<Event> made = Event::Create(driver);
    if (!made.ok()) return made.status();
    *event = *std::move(made);
  }
  for (auto* chunks : {&lane->upload_, &lane->download_}) {
    for (Chunk& chunk : *chunks) {
      if (absl::Status s = MakeChunk(driver, pinned, &chunk); !s.ok()) return s;
    }
  }
  return lane;
}

cudaError_t Lane::ZeroCounters(Driver* driver) {
  return driver->Fill(counters_.get(), 0, static_cast<size_t>(kCounterBytes), stream_.get());
}

absl::Status Uploader::NextChunk() {
  chunk_ = (chunk_ + 1) % Lane::kChunks;
  Lane::Chunk& chunk = lane_->upload_chunks()[chunk_];
  if (!chunk.busy) return absl::OkStatus();
  chunk.busy = false;
  return ToStatus(WaitFor(driver_, chunk.done.get()), "copying to the device");
}

absl::Status Uploader::Flush() {
  if (used_ == 0) return absl::OkStatus();
  Lane::Chunk& chunk = lane_->upload_chunks()[chunk_];
  const auto bytes = static_cast<size_t>(used_);
  cudaError_t error = driver_->CopyToDevice(base_, chunk.memory.data(), bytes, lane_->stream());
  if (error == cudaSuccess) error = driver_->RecordEvent(chunk.done.get(), lane_->stream());
  if (error != cudaSuccess) return ToStatus(error, "copying to the device");
  chunk.busy = true;
  bytes_ += bytes;
  used_ = 0;
  return NextChunk();
}

absl::Status Uploader::Add(std::byte* to, const void* from, int64_t bytes) {
  if (bytes <= 0) return absl::OkStatus();
  if (bytes >= kDirectBytes && driver_->IsPinned(from, static_cast<size_t>(bytes))) {
    // What waits goes first: its chunk must not reach over this piece.
    if (absl::Status s = Flush(); !s.ok()) return s;
    bytes_ += static_cast<uint64_t>(bytes);
    return ToStatus(driver_->CopyToDevice(to, from, static_cast<size_t>(bytes), lane_->stream()),
                    "copying to the device");
  }
  const auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const int64_t gap = used_ > 0 ? to - (base_ + used_) : -1;
    const bool joins = gap >= 0 && gap <= kLargestGap && used_ + gap < Lane::kChunkBytes;
    if (!joins) {
      if (absl::Status s = Flush(); !s.ok()) return s;
      base_ = to;
    } else {
      used_ += gap;
    }
    const int64_t part = std::min(bytes, Lane::kChunkBytes - used_);
    std::memcpy(lane_->upload_chunks()[chunk_].memory.data() + used_, source,
                static_cast<size_t>(part));
    used_ += part;
    to += part;
    source += part;
    bytes -= part;
    if (used_ == Lane::kChunkBytes) {
      if (absl::Status s = Flush(); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

void Downloader::Add(void* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) pieces_.push_back({static_cast<std::byte*>(to), from, bytes});
}

// Cuts pieces at chunk size, then joins neighbours.
void Downloader::MakeBatches() {
  std::vector<Piece> cut;
  for (const Piece& piece : pieces_) {
    const auto bytes = static_cast<size_t>(piece.bytes);
    if (piece.bytes >= kDirectBytes && driver_->IsPinned(piece.to, bytes)) {
      batches_.push_back({cut.size(), 1, piece.from, piece.bytes, true});
      cut.push_back(piece);
      continue;
    }
    for (int64_t at = 0; at < piece.bytes; at += Lane::kChunkBytes) {
      const int64_t part = std::min(Lane::kChunkBytes, piece.bytes - at);
      const std::byte* from = piece.from + at;
      Batch* last = batches_.empty() ? nullptr : &batches_.back();
      const int64_t gap = last == nullptr ? -1 : from - (last->from + last->bytes);
      if (last != nullptr && !last->direct && gap >= 0 && gap <= kLargestGap &&
          last->bytes + gap + part <= Lane::kChunkBytes) {
        last->bytes += gap + part;
        ++last->count;
      } else {
        batches_.push_back({cut.size(), 1, from, part, false});
      }
      cut.push_back({piece.to + at, from, part});
    }
  }
  pieces_ = std::move(cut);
}

absl::Status Downloader::Send(const Batch& batch, int chunk) {
  Lane::Chunk& through = lane_->download_chunks()[chunk];
  void* to = batch.direct ? pieces_[batch.first].to : through.memory.data();
  const auto bytes = static_cast<size_t>(batch.bytes);
  bytes_ += bytes;
  cudaError_t error = driver_->CopyToHost(to, batch.from, bytes, lane_->stream());
  if (error == cudaSuccess && !batch.direct) {
    error = driver_->RecordEvent(through.done.get(), lane_->stream());
  }
  return ToStatus(error, "copying from the device");
}

absl::Status Downloader::Receive(const Batch& batch, int chunk) {
  if (batch.direct) return absl::OkStatus();  // the end of the stream says so
  Lane::Chunk& through = lane_->download_chunks()[chunk];
  if (absl::Status s = ToStatus(WaitFor(driver_, through.done.get()), "running on the device");
      !s.ok()) {
    return s;
  }
  for (size_t i = batch.first; i < batch.first + batch.count; ++i) {
    const Piece& piece = pieces_[i];
    std::memcpy(piece.to, through.memory.data() + (piece.from - batch.from),
                static_cast<size_t>(piece.bytes));
  }
  return absl::OkStatus();
}

absl::Status Downloader::RecordEnd() {
  return ToStatus(driver_->RecordEvent(lane_->end.get(), lane_->stream()), "cudaEventRecord");
}

absl::Status Downloader::Run() {
  MakeBatches();
  if (batches_.empty()) {
    if (absl::Status s = RecordEnd(); !s.ok()) return s;
  }
  // Batch b travels through chunk b mod kChunks, as soon as that chunk has been emptied.
  for (size_t next = 0; next < batches_.size() + Lane::kChunks; ++next) {
    if (next >= Lane::kChunks) {
      const size_t done = next - Lane::kChunks;
      if (absl::Status s = Receive(batches_[done], static_cast<int>(done % Lane::kChunks));
          !s.ok()) {
        return s;
      }
    }
    if (next >= batches_.size()) continue;
    if (absl::Status s = Send(batches_[next], static_cast<int>(next % Lane::kChunks)); !s.ok()) {
      return s;
    }
    if (next + 1 < batches_.size()) continue;
    if (absl::Status s = RecordEnd(); !s.ok()) return s;
  }
  return ToStatus(WaitFor(driver_, lane_->end.get()), "running on the device");
}

}  // namespace attn::cuda
