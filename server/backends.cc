#include "server/backends.h"

#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "kernels/api/text.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/simd.h"
#include "server/config/log.h"
#ifdef ATTN_HAVE_CUDA
#include "kernels/cuda/backends.h"
#include "kernels/cuda/runtime/device_set.h"
#include "server/metrics/nvml.h"
#endif

namespace attn::server {
namespace {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (absl::StartsWith(line, "model name") && colon != std::string::npos) {
      return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
    }
  }
  return "CPU";
}

void AddCpu(ThreadPool* pool, Backends* all) {
  all->backends.push_back(MakeFlashCpuBackend(pool));
  all->backends.push_back(MakeStandardCpuBackend(pool));
  ::attention::v1::DeviceInfo& cpu = all->devices.emplace_back();
  cpu.set_kind(::attention::v1::DEVICE_KIND_CPU);
  cpu.set_name(CpuName());
  cpu.set_memory_bytes(AvailableMemoryBytes());
  cpu.set_cores(static_cast<uint32_t>(pool->num_workers()));
  cpu.set_isa(std::string(Name(ChosenSimdTarget())));
}

#ifdef ATTN_HAVE_CUDA

::attention::v1::DeviceInfo InfoOf(const cuda::Device& device) {
  const cuda::DeviceProperties& properties = device.properties();
  const cuda::Roofline& roofline = device.roofline();
  ::attention::v1::DeviceInfo info;
  info.set_kind(::attention::v1::DEVICE_KIND_CUDA);
  info.set_index(properties.index);
  info.set_name(properties.name);
  info.set_memory_bytes(static_cast<uint64_t>(properties.memory_bytes));
  info.set_cores(static_cast<uint32_t>(properties.multiprocessors));
  info.set_isa(Cat("sm_", properties.capability()));
  info.set_matrix_tflops(roofline.matrix_flops_per_second * 1e-12);
  info.set_copy_gb_per_s(roofline.copy_bytes_per_second * 1e-9);
  info.set_read_gb_per_s(roofline.read_bytes_per_second * 1e-9);
  info.set_host_to_device_gb_per_s(roofline.upload_bytes_per_second * 1e-9);
  info.set_device_to_host_gb_per_s(roofline.download_bytes_per_second * 1e-9);
  return info;
}

void LogDevice(const ::attention::v1::DeviceInfo& info, const cuda::Device& device) {
  log::Info("CUDA device", {{"index", info.index()},
                            {"name", info.name()},
                            {"isa", info.isa()},
                            {"memory_limit_bytes", device.memory_limit_bytes()},
                            {"matrix_tflops", info.matrix_tflops()},
                            {"copy_gb_per_s", info.copy_gb_per_s()},
                            {"host_to_device_gb_per_s", info.host_to_device_gb_per_s()},
                            {"device_to_host_gb_per_s", info.device_to_host_gb_per_s()}});
}

DeviceHooks HooksOf(const std::shared_ptr<cuda::DeviceSet>& set) {
  DeviceHooks hooks;
  hooks.status = [set] {
    std::vector<DeviceStatus> all;
    const std::vector<cuda::DeviceSet::Health> health = set->health();
    for (size_t i = 0; i < health.size(); ++i) {
      const cuda::DeviceSet::Stats stats = set->stats(*set->devices()[i]);
      all.push_back({.index = health[i].index,
                     .healthy = health[i].healthy,
                     .error = health[i].error,
                     .pci_bus_id = set->devices()[i]->properties().pci_bus_id,
                     .busy_lanes = stats.busy_lanes,
                     .memory_in_use_bytes = static_cast<uint64_t>(stats.memory.in_use_bytes),
                     .memory_retained_bytes = static_cast<uint64_t>(stats.memory.retained_bytes),
                     .memory_limit_bytes = static_cast<uint64_t>(stats.memory.budget_bytes)});
    }
    return all;
  };
  hooks.on_unhealthy = [set](std::function<void()> callback) {
    if (!callback) {
      set->set_on_unhealthy(nullptr);
      return;
    }
    set->set_on_unhealthy([callback](const cuda::DeviceSet::Health& health) {
      log::Error("a CUDA device takes no more calls",
                 {{"index", health.index}, {"error", health.error}});
      callback();
    });
  };
  hooks.trim = [set] { set->Trim(); };
  hooks.pinning = {.pin = cuda::PinHostMemory, .unpin = cuda::UnpinHostMemory};
  return hooks;
}

absl::Status AddCuda(const Config& config, Backends* all) {
  absl::StatusOr<std::optional<std::vector<int>>> indices = ParseCudaDevices(config.cuda_devices);
  if (!indices.ok()) return indices.status();
  absl::StatusOr<std::shared_ptr<cuda::DeviceSet>> set = cuda::DeviceSet::Create(
      {.indices = *indices,
       .memory_limit_bytes = static_cast<int64_t>(config.device_memory_limit_bytes),
       .lanes = config.device_lanes},
      cuda::CudaDriver());
  if (!set.ok()) {
    return absl::Status(set.status().code(), Cat("--cuda-devices ", config.cuda_devices, ": ",
                                                 std::string(set.status().message())));
  }
  const std::string& why = (*set)->why_empty();
  if ((*set)->empty()) {
    const bool disabled = *indices && (*indices)->empty();
    for (const auto& path : cuda::MakeDevicePaths()) {
      all->absent.push_back({path->path(),
                             disabled ? Reason::kDisabledByConfig : Reason::kNoCudaDevice,
                             disabled ? "--cuda-devices none" : why});
    }
    log::Info("no CUDA device", {{"reason", why}});
    return absl::OkStatus();
  }
  if (!why.empty()) log::Error("a CUDA device is left out", {{"error", why}});
  for (const auto& device : (*set)->devices()) {
    LogDevice(all->devices.emplace_back(InfoOf(*device)), *device);
    all->lanes += config.device_lanes;
  }
  all->backends = cuda::MakeCudaBackends(*set);
  all->hooks = HooksOf(*set);
  absl::StatusOr<std::shared_ptr<const DeviceSensors>> sensors = OpenNvml();
  if (sensors.ok()) {
    all->sensors = *std::move(sensors);
  } else {
    log::Warn("no clocks, power and temperature of devices in the metrics",
              {{"reason", sensors.status().message()}});
  }
  return absl::OkStatus();
}

#else

absl::Status AddCuda(const Config& config, Backends*) {
  if (config.cuda_devices == "all" || config.cuda_devices == "none") return absl::OkStatus();
  return absl::InvalidArgumentError(Cat("--cuda-devices ", config.cuda_devices,
                                        ": this binary has no CUDA paths; build with "
                                        "-DATTN_BUILD_CUDA=ON"));
}

#endif

}  // namespace

absl::StatusOr<Backends> MakeBackends(const Config& config, ThreadPool* pool) {
  Backends all;
  if (absl::Status s = AddCuda(config, &all); !s.ok()) return s;
  AddCpu(pool, &all);
  return all;
}

}  // namespace attn::server
