#include "server/rpc/server_metrics.h"

#include <string>
#include <utility>
#include <vector>

#include "kernels/api/text.h"
#include "server/execution/allocator.h"
#include "server/rpc/server.h"

namespace attn::server {
namespace {

// What the hooks tell of each CUDA device.
void AddDeviceMetrics(const ServiceContext& context, Metrics* metrics) {
  const auto sum = [&context](auto value) {
    return [&context, value]() -> std::optional<double> {
      double sum = 0;
      if (!context.device_hooks.present()) return sum;
      for (const DeviceStatus& device : context.device_hooks.status()) sum += value(device);
      return sum;
    };
  };
  metrics->AddLive(
      "attn_devices", "CUDA devices of this server, by health.",
      {{{{"health", "healthy"}}, sum([](const DeviceStatus& d) { return d.healthy ? 1 : 0; })},
       {{{"health", "unhealthy"}}, sum([](const DeviceStatus& d) { return d.healthy ? 0 : 1; })}});
  const auto add = [&](const char* name, const char* help, auto value) {
    std::vector<Metrics::LiveSeries> series;
    for (int index : CudaIndices(context.devices)) {
      series.push_back({{{"index", Cat(index)}}, sum([index, value](const DeviceStatus& d) {
                          return d.index == index ? static_cast<double>(value(d)) : 0.0;
                        })});
    }
    if (!series.empty()) metrics->AddLive(name, help, std::move(series));
  };
  add("attn_device_busy_lanes", "Calls under way on the device.",
      [](const DeviceStatus& d) { return d.busy_lanes; });
  add("attn_device_memory_in_use_bytes", "Device memory that calls hold now.",
      [](const DeviceStatus& d) { return d.memory_in_use_bytes; });
  add("attn_device_memory_retained_bytes", "Device memory kept for reuse.",
      [](const DeviceStatus& d) { return d.memory_retained_bytes; });
  add("attn_device_memory_limit_bytes", "Device memory that calls may hold together.",
      [](const DeviceStatus& d) { return d.memory_limit_bytes; });
}

void AddSensors(const ServiceContext& context, const std::shared_ptr<const DeviceSensors>& sensors,
                Metrics* metrics) {
  if (sensors == nullptr || !context.device_hooks.present()) return;
  std::vector<SensedDevice> devices;
  for (const DeviceStatus& device : context.device_hooks.status()) {
    if (!device.pci_bus_id.empty()) devices.push_back({device.index, device.pci_bus_id});
  }
  AddSensorMetrics(sensors, devices, metrics);
}

}  // namespace

void AddServerMetrics(const ServiceContext& context, const ServingState& state,
                      const std::shared_ptr<const DeviceSensors>& sensors, Metrics* metrics) {
  const auto add = [metrics](const char* name, const char* help, auto read) {
    metrics->AddLive(name, help, [read] { return static_cast<double>(read()); });
  };
  const ServiceContext* c = &context;
  add("attn_inflight_requests", "Calls admitted and not yet done.",
      [c] { return c->admission->stats().requests; });
  add("attn_inflight_requests_limit", "Calls that are admitted at once at most.",
      [c] { return c->config.max_inflight_requests; });
  add("attn_inflight_bytes", "Tensor and scratch bytes that admitted calls may hold.",
      [c] { return c->admission->stats().bytes; });
  add("attn_inflight_bytes_limit", "Such bytes that are admitted at once at most.",
      [c] { return c->config.max_inflight_bytes; });
  add("attn_queued_requests", "Calls waiting for a worker.",
      [c] { return c->executor->stats().queued_requests; });
  add("attn_queued_bytes", "Bytes that waiting calls may hold.",
      [c] { return c->executor->stats().queued_bytes; });
  add("attn_executor_running", "Workers that are busy with a call.",
      [c] { return c->executor->stats().running; });
  add("attn_executor_workers", "Calls that run at the same time at most.",
      [c] { return c->config.executor_workers; });
  add("attn_buffer_pool_retained_bytes", "Memory kept for reuse.",
      [c] { return c->buffers->stats().retained_bytes; });
  add("attn_buffer_pool_in_use_bytes", "Memory that calls hold now.",
      [c] { return c->buffers->stats().in_use_bytes; });
  add("attn_process_allocator_in_use_bytes", "Heap memory that the process holds.",
      [] { return ReadAllocatorStats().in_use_bytes; });
  add("attn_process_allocator_retained_bytes", "Freed heap memory that is kept for reuse.",
      [] { return ReadAllocatorStats().retained_bytes; });
  add("attn_healthy", "1 where health checks answer SERVING.",
      [&state] { return state.serving() ? 1 : 0; });
  add("attn_uptime_seconds", "Time since the server was made.",
      [c] { return std::chrono::duration<double>(c->clock->Now() - c->started).count(); });
  AddDeviceMetrics(context, metrics);
  AddSensors(context, sensors, metrics);
}

}  // namespace attn::server
