// CUDA devices of this host, and CUDA errors as Status.
#ifndef ATTN_KERNELS_CUDA_RUNTIME_DEVICE_H_
#define ATTN_KERNELS_CUDA_RUNTIME_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace attn::cuda {

struct DeviceProperties {
  int index = 0;             // as the CUDA runtime counts
  std::string name;          // "NVIDIA H200"
  std::string pci_bus_id;    // "0000:3B:00.0"; empty: not known
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int shared_bytes = 0;  // shared memory one thread block may opt in to

  int capability() const { return major * 10 + minor; }  // 90
};

// Every device of the host. Empty where there is no driver or no device; *why then says which, in
// words. Never fails: a host without a GPU is an ordinary host. Thread-safe.
std::vector<DeviceProperties> FindDevices(std::string* why = nullptr);

// OK, or INTERNAL: "WHAT: cudaErrorName: explanation". RESOURCE_EXHAUSTED for
// cudaErrorMemoryAllocation.
absl::Status ToStatus(cudaError_t error, std::string_view what);

// The CUDA error that ToStatus() made this status of; cudaSuccess where it was not.
cudaError_t CudaErrorOf(const absl::Status& status);

// Whether the error leaves the context unusable, so that every later call of this process on that
// device fails: illegal address, launch failure, ECC, … Source: CUDA Runtime API, "Error Handling".
bool IsSticky(cudaError_t error);

}  // namespace attn::cuda

#endif  // ATTN_KERNELS_CUDA_RUNTIME_DEVICE_H_
