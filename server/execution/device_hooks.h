// What the server asks of CUDA devices, without knowing CUDA. main fills it in; without devices all
// of it is empty.
#ifndef ATTN_SERVER_EXECUTION_DEVICE_HOOKS_H_
#define ATTN_SERVER_EXECUTION_DEVICE_HOOKS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/execution/buffer_pool.h"

namespace attn::server {

struct DeviceStatus {
  int index = 0;  // as the CUDA runtime counts
  bool healthy = true;
  std::string error = "";       // what made it unhealthy
  std::string pci_bus_id = "";  // "0000:3B:00.0"; empty: not known
  int busy_lanes = 0;           // calls under way
  uint64_t memory_in_use_bytes = 0;
  uint64_t memory_retained_bytes = 0;
  uint64_t memory_limit_bytes = 0;
};

// Thread-safe, each of them.
struct DeviceHooks {
  std::function<std::vector<DeviceStatus>()> status;
  // Calls the function whenever a device turns unhealthy, on the thread that found out. Called with
  // an empty function it forgets the one before, and returns when that is not running any more.
  std::function<void(std::function<void()>)> on_unhealthy;
  // Gives back device memory that is kept for reuse.
  std::function<void()> trim;
  BufferPool::Pinning pinning;

  bool present() const { return status != nullptr; }
};

}  // namespace attn::server

#endif  // ATTN_SERVER_EXECUTION_DEVICE_HOOKS_H_
