// Structures that NVML fills in. Source: NVML API Reference Guide, "Device Structs".
#ifndef ATTN_SERVER_METRICS_NVML_ABI_H_
#define ATTN_SERVER_METRICS_NVML_ABI_H_

namespace attn::server {

struct NvmlMemory {                      // bytes
  unsigned long long total, free, used;  // NOLINT(google-runtime-int): the library's own types
};
struct NvmlUtilization {
  unsigned int gpu, memory;  // percent
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_NVML_ABI_H_
