// Where the CPU paths touch tensors: every load and store counts its bytes here.
#ifndef ATTN_KERNELS_CPU_MEMORY_H_
#define ATTN_KERNELS_CPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/api/dtype.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/counting.h"

namespace attn {

inline const std::byte* ElementAt(const void* data, DType dtype, int64_t index) {
  return static_cast<const std::byte*>(data) + index * SizeOf(dtype);
}
inline std::byte* ElementAt(void* data, DType dtype, int64_t index) {
  return static_cast<std::byte*>(data) + index * SizeOf(dtype);
}

// n elements of a tensor, widened into an on-chip row.
inline void LoadRow(TrafficCount& count, const void* source, DType dtype, int64_t n, float* row) {
  WidenRow(source, dtype, n, row);
  count.Load(n * SizeOf(dtype));
}

// Asks for `bytes` to be brought into the second-level cache. Not a load: nothing is used.
inline void PrefetchRow(const std::byte* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
}

inline void StoreRow(TrafficCount& count, const float* row, int64_t n, DType dtype,
                     void* destination) {
  NarrowRow(row, n, dtype, destination);
  count.Store(n * SizeOf(dtype));
}

inline void StoreZeros(TrafficCount& count, int64_t n, DType dtype, void* destination) {
  std::memset(destination, 0, static_cast<size_t>(n * SizeOf(dtype)));
  count.Store(n * SizeOf(dtype));
}

template <class T>
T LoadValue(TrafficCount& count, const T* source) {
  count.Load(sizeof(T));
  return *source;
}

template <class T>
void StoreValue(TrafficCount& count, T value, T* destination) {
  count.Store(sizeof(T));
  *destination = value;
}

// destination[c] += factor * row[c], fp32 memory.
inline void AccumulateRow(TrafficCount& count, const float* row, float factor, int64_t n,
                          float* destination) {
  AddScaledRow(row, factor, n, destination);
  count.Load(n * 4);
  count.Store(n * 4);
}

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_MEMORY_H_
