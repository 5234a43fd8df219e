// The memory allocator of the process: tcmalloc where it is linked (attn::allocator), else the C
// library's.
#ifndef ATTN_SERVER_EXECUTION_ALLOCATOR_H_
#define ATTN_SERVER_EXECUTION_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>

namespace attn::server {

struct AllocatorStats {
  // What the program holds, gRPC's buffers of open connections included.
  uint64_t in_use_bytes = 0;
  // Free, kept for reuse: the allocator's lists and its threads' caches. The C library counts here
  // also what it has given back to the system; tcmalloc does not.
  uint64_t retained_bytes = 0;
};

// Memory that is mapped past the allocator is in neither: large blocks of BufferPool, code, stacks.
// Zeros under sanitizers, whose allocators do not say. Thread-safe; some microseconds.
AllocatorStats ReadAllocatorStats();

// Gives free memory back to the system, except what threads cache. Thread-safe.
void ReleaseFreeMemory();

// Bounds what all threads' caches keep together. tcmalloc grants each thread 512 KiB even so, and a
// thread meets a lower bound only when it next frees something; call it before threads start.
// False: the allocator has no such bound.
bool BoundThreadCaches(size_t bytes);

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_ALLOCATOR_H_
