#include "server/execution/allocator.h"

#include <malloc.h>

// Weak, so that one library serves programs with and without tcmalloc (gperftools'
// malloc_extension_c.h).
extern "C" {
int MallocExtension_GetNumericProperty(const char* property, size_t* value) __attribute__((weak));
int MallocExtension_SetNumericProperty(const char* property, size_t value) __attribute__((weak));
void MallocExtension_ReleaseFreeMemory() __attribute__((weak));
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ATTN_SANITIZER_ALLOCATOR 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define ATTN_SANITIZER_ALLOCATOR 1
#endif
#endif

namespace attn::server {
namespace {

constexpr const char* kRetained[] = {
    "tcmalloc.pageheap_free_bytes", "tcmalloc.central_cache_free_bytes",
    "tcmalloc.transfer_cache_free_bytes", "tcmalloc.thread_cache_free_bytes"};

uint64_t Property(const char* name) {
  size_t value = 0;
  return MallocExtension_GetNumericProperty(name, &value) != 0 ? value : 0;
}

}  // namespace

AllocatorStats ReadAllocatorStats() {
  AllocatorStats stats;
  if (MallocExtension_GetNumericProperty != nullptr) {
    stats.in_use_bytes = Property("generic.current_allocated_bytes");
    for (const char* part : kRetained) stats.retained_bytes += Property(part);
    return stats;
  }
#ifndef ATTN_SANITIZER_ALLOCATOR
  const struct mallinfo2 info = mallinfo2();
  stats.in_use_bytes = info.uordblks + info.hblkhd;
  stats.retained_bytes = info.fordblks;
#endif
  return stats;
}

void ReleaseFreeMemory() {
  if (MallocExtension_ReleaseFreeMemory != nullptr) {
    MallocExtension_ReleaseFreeMemory();
    return;
  }
#ifndef ATTN_SANITIZER_ALLOCATOR
  malloc_trim(0);
#endif
}

bool BoundThreadCaches(size_t bytes) {
  return MallocExtension_SetNumericProperty != nullptr &&
         MallocExtension_SetNumericProperty("tcmalloc.max_total_thread_cache_bytes", bytes) != 0;
}

}  // namespace attn::server
