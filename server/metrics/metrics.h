// Every metric of attnd. All series exist from the start, at 0, so that a dashboard can tell "never
// happened" from "not exported"; a hot path adds to a counter that was looked up once.
#ifndef ATTN_SERVER_METRICS_METRICS_H_
#define ATTN_SERVER_METRICS_METRICS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/dtype.h"
#include "kernels/api/path.h"
#include "kernels/api/spec.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

namespace attn::server {

enum class Method : uint8_t {
  kForward,
  kBackward,
  kForwardStream,
  kBackwardStream,
  kPlan,
  kGetServerInfo
};
inline constexpr size_t kNumMethods = 6;
std::string_view Name(Method method);  // "Forward", …

// The three stages of devices are observed for calls on CUDA devices only.
enum class Stage : uint8_t {
  kParse,
  kGather,
  kQueue,
  kDeviceQueue,
  kHostToDevice,
  kKernel,
  kDeviceToHost,
  kReply,
  kHandler
};
inline constexpr size_t kNumStages = 9;

enum class ByteLevel : uint8_t {
  kWireRequest,
  kWireResponse,
  kHostToDevice,
  kDeviceToHost,
  kCompulsory,
  kTile,
  kStandard
};
inline constexpr size_t kNumByteLevels = 7;

inline constexpr size_t kNumCodes = 17;            // gRPC's status codes, 0 to 16
std::string_view CodeName(absl::StatusCode code);  // "OK", "INVALID_ARGUMENT", …

// Thread-safe, except that Add…/Set… belong to start-up.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Counters and histograms of calls.
  void CountRequest(Method method, absl::StatusCode code);
  void CountExecution(Pass pass, PathId path, DType dtype, uint64_t flops,
                      std::chrono::nanoseconds kernel);
  void CountRejection(PathId path, Reason reason);
  void CountBytes(ByteLevel level, uint64_t bytes);
  void ObserveStage(Stage stage, Pass pass, std::chrono::nanoseconds time);

  // A gauge read when scraped, so that it is exact then. `read` must be thread-safe and must
  // outlive every scrape: see RemoveLive().
  void AddLive(const std::string& name, const std::string& help, std::function<double()> read) {
    AddLive(name, help, {{{}, std::move(read)}});
  }
  // The same with several series, each with its labels.
  using Labels = std::vector<std::pair<std::string, std::string>>;
  struct LiveSeries {
    Labels labels;
    std::function<double()> read;
  };
  void AddLive(const std::string& name, const std::string& help, std::vector<LiveSeries> series);
  // Removes all live gauges; returns when no scrape reads one any more.
  void RemoveLive();

  // What the server is.
  void SetDeviceInfo(DeviceKind kind, int index, const std::string& name, const std::string& isa);
  void SetPathAvailable(PathId path, bool available);
  void SetSelfTestPassed(PathId path, bool passed);

  // The Prometheus text format, version 0.0.4.
  std::string Scrape() const;

  // Sums for tests and the status log.
  double RequestCount(Method method, absl::StatusCode code) const;
  double ExecutionCount(Pass pass, PathId path, DType dtype) const;
  double RejectionCount(PathId path, Reason reason) const;

 private:
  struct Registry;
  using Counter = prometheus::Counter;

  static constexpr size_t kPasses = 2;
  static constexpr size_t kDTypes = 3;
  static constexpr size_t kPaths = kAllPaths.size();
  static constexpr size_t kReasons = kAllReasons.size() + 1;

  std::unique_ptr<Registry> registry_;
  std::array<std::array<Counter*, kNumCodes>, kNumMethods> requests_{};
  std::array<Counter*, kNumCodes> errors_{};
  std::array<std::array<std::array<Counter*, kDTypes>, kPaths>, kPasses> executions_{};
  std::array<std::array<Counter*, kReasons>, kPaths> rejections_{};
  std::array<std::array<Counter*, kPaths>, kPasses> flops_{};
  std::array<std::array<Counter*, kPaths>, kPasses> kernel_seconds_{};
  std::array<Counter*, kNumByteLevels> bytes_{};
  std::array<std::array<prometheus::Histogram*, kPasses>, kNumStages> stages_{};
  std::array<prometheus::Gauge*, kPaths> available_{};
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_METRICS_H_
