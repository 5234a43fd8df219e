#include "kernels/cuda/runtime/device.h"

#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "kernels/api/text.h"

namespace attn::cuda {
namespace {

constexpr char kPayload[] = "attn/cuda_error";

std::string_view ErrorName(cudaError_t error) { return cudaGetErrorName(error); }

bool ReadProperties(int index, DeviceProperties* device) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  device->index = index;
  device->name = properties.name;
  char pci_bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), index) == cudaSuccess) {
    device->pci_bus_id = pci_bus_id;
  } else {
    cudaGetLastError();
  }
  device->major = properties.major;
  device->minor = properties.minor;
  device->multiprocessors = properties.multiProcessorCount;
  device->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  device->l2_bytes = properties.l2CacheSize;
  device->shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  return true;
}

}  // namespace

std::vector<DeviceProperties> FindDevices(std::string* why) {
  std::vector<DeviceProperties> devices;
  int count = 0;
  // Without a driver a statically linked runtime answers cudaErrorInsufficientDriver, and other
  // set-ups other errors: all of them mean that there is nothing to run on.
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    if (why != nullptr) *why = Cat(ErrorName(error), ": ", cudaGetErrorString(error));
    return devices;
  }
  for (int index = 0; index < count; ++index) {
    DeviceProperties device;
    if (ReadProperties(index, &device)) devices.push_back(std::move(device));
  }
  if (why != nullptr && devices.empty()) {
    *why = count == 0 ? "the driver reports no device"
                      : Cat("none of ", count, " devices answers cudaGetDeviceProperties");
  }
  return devices;
}

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = Cat(what, ": ", ErrorName(error), ": ", cudaGetErrorString(error));
  absl::Status status = error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                                           : absl::InternalError(message);
  status.SetPayload(kPayload, absl::Cord(Cat(static_cast<int>(error))));
  return status;
}

cudaError_t CudaErrorOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  int value = 0;
  if (!payload || !absl::SimpleAtoi(std::string(*payload), &value)) return cudaSuccess;
  return static_cast<cudaError_t>(value);
}

bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorContextIsDestroyed:
    case cudaErrorCudartUnloading:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown:
#if CUDART_VERSION >= 12080
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
      return true;
    default:
      return false;
  }
}

}  // namespace attn::cuda
