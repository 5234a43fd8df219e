#include "client/cli/file_io.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "client/cli/text.h"

namespace attn::cli {
namespace {

// As much as one read() or write() call takes; Linux stops at 2 GiB - 4 KiB.
constexpr size_t kMaxPieceBytes = size_t{1} << 30;

absl::Status ErrnoStatus(const std::string& path) {
  const std::string message = Cat(path, ": ", std::strerror(errno));
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case EISDIR:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  int Close() { return close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

struct FreeDeleter {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Buffer = std::unique_ptr<std::byte, FreeDeleter>;

Buffer AllocateAligned(size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
  return Buffer(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
}

}  // namespace

absl::StatusOr<FileBytes> ReadFile(const std::string& path) {
  FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(path);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(path);
  if (S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(Cat(path, ": is a directory"));
  }
  // One byte more than the size, so that the read which finds the end needs no larger buffer.
  size_t capacity = S_ISREG(info.st_mode) ? static_cast<size_t>(info.st_size) + 1 : 64 * 1024;
  Buffer buffer = AllocateAligned(capacity);
  size_t size = 0;
  while (buffer != nullptr) {
    if (size == capacity) {
      Buffer larger = AllocateAligned(capacity * 2);
      if (larger != nullptr) std::memcpy(larger.get(), buffer.get(), size);
      buffer = std::move(larger);
      capacity *= 2;
      continue;
    }
    const ssize_t count =
        read(fd.get(), buffer.get() + size, std::min(capacity - size, kMaxPieceBytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus(path);
    if (count == 0) break;
    size += count;
  }
  if (buffer == nullptr) {
    return absl::ResourceExhaustedError(Cat(path, ": no memory for ", capacity, " bytes"));
  }
  const std::byte* data = buffer.get();
  return FileBytes{std::shared_ptr<const void>(buffer.release(), std::free), {data, size}};
}

absl::Status WriteFile(const std::string& path,
                       std::span<const std::span<const std::byte>> pieces) {
  const std::string temporary = Cat(path, ".partial-", getpid());
  FileDescriptor fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (fd.get() < 0) return ErrnoStatus(path);
  for (std::span<const std::byte> piece : pieces) {
    while (!piece.empty()) {
      const ssize_t count = write(fd.get(), piece.data(), std::min(piece.size(), kMaxPieceBytes));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        const absl::Status status = ErrnoStatus(path);
        unlink(temporary.c_str());
        return status;
      }
      piece = piece.subspan(count);
    }
  }
  // close() reports what a network file system could not write.
  if (fd.Close() != 0 || rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status = ErrnoStatus(path);
    unlink(temporary.c_str());
    return status;
  }
  return absl::OkStatus();
}

}  // namespace attn::cli
