// Every metric of attnd. All series exist from the start, at 0, so that a dashboard can tell "never
// happened" from "not exported"; only what a host may lack (sensors of GPUs) is absent where it is.
// server/README.md lists them.
#ifndef ATTN_SERVER_METRICS_METRICS_H_
#define ATTN_SERVER_METRICS_METRICS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/dtype.h"
#include "kernels/api/path.h"
#include "kernels/api/spec.h"
#include "server/metrics/cells.h"

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

// Why a call was not admitted: the server is full for now, the call is too large for it at any
// time, or the server is draining.
enum class Refusal : uint8_t { kFull, kTooLarge, kDraining };
inline constexpr size_t kNumRefusals = 3;

enum class CanaryResult : uint8_t { kOk, kFailed, kLate };
inline constexpr size_t kNumCanaryResults = 3;
std::string_view Name(CanaryResult result);  // "ok", "failed", "late"

inline constexpr size_t kNumCodes = 17;            // gRPC's status codes, 0 to 16
std::string_view CodeName(absl::StatusCode code);  // "OK", "INVALID_ARGUMENT", …

// head_dim as a label: the range it is in, "33-64". Few values, whatever callers send.
inline constexpr std::array<int64_t, 5> kHeadDimBounds = {32, 64, 128, 256, 512};
size_t HeadDimRange(int64_t head_dim);        // index; over the last bound: the last
std::string_view HeadDimLabel(size_t range);  // "1-32", "33-64", …

// What "flash is on" means here: a fused path ran; on a host with CUDA paths, one of those.
bool CountsAsFlash(PathId path, bool has_cuda);

// Why a call that ran on another path was not on flash: the first reason against the last flash
// path that could still have taken it. nullopt: nothing says why, which must not happen.
std::optional<Reason> FallbackReason(std::span<const Rejection> rejections, bool has_cuda);

// A call that ran to the end.
struct Execution {
  Pass pass = Pass::kForward;
  PathId path = PathId::kFlashCpu;
  DType dtype = DType::kFp32;  // of q
  int64_t head_dim = 0;        // of q
  int device = -1;             // CUDA: its index, -1 where none was needed. CPU: not read
  int64_t batch = 1;           // requests that ran as one
  double flops = 0;
  double compulsory_bytes = 0, tile_bytes = 0, standard_bytes = 0;
  std::chrono::nanoseconds kernel{0};
  double roofline_seconds = 0;  // at the device's measured rates; 0: there are none
  std::span<const Rejection> rejections = {};
};

// Thread-safe, except that Add…/Set… belong to start-up; SetPathAvailable() may come at any time.
class Metrics {
 public:
  explicit Metrics(bool has_cuda = false);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Counters and histograms of calls.
  void CountRequest(Method method, absl::StatusCode code);
  void CountExecution(const Execution& execution);
  void CountRejection(PathId path, Reason reason);
  void CountRefusal(Refusal refusal);
  void CountBytes(ByteLevel level, Pass pass, PathId path, uint64_t bytes);
  void ObserveStage(Stage stage, Pass pass, std::chrono::nanoseconds time);

  // The canary. `path`: nullopt where none could be chosen.
  void CountCanary(Pass pass, std::optional<PathId> path, CanaryResult result,
                   std::chrono::nanoseconds latency);

  // A gauge read when scraped, so that it is exact then; a series whose function returns nullopt is
  // left out. `read` must be thread-safe and must outlive every scrape: see RemoveLive().
  using Read = std::function<std::optional<double>()>;
  void AddLive(const std::string& name, const std::string& help, Read read) {
    AddLive(name, help, {{{}, std::move(read)}});
  }
  // The same with several series, each with its labels.
  using Labels = std::vector<std::pair<std::string, std::string>>;
  struct LiveSeries {
    Labels labels;
    Read read;
  };
  void AddLive(const std::string& name, const std::string& help, std::vector<LiveSeries> series);
  // Removes all live gauges; returns when no scrape reads one any more.
  void RemoveLive();

  // What the server is. SetDeviceInfo() also makes the series of the device's work; rates are those
  // measured at start-up, 0: none.
  void SetDeviceInfo(DeviceKind kind, int index, const std::string& name, const std::string& isa,
                     double flops_per_second, double bytes_per_second);
  void SetPathAvailable(PathId path, bool available);
  void SetSelfTestPassed(PathId path, bool passed);

  // The Prometheus text format, version 0.0.4.
  std::string Scrape() const;

  // Sums for tests, the status page and the status log.
  double RequestCount(Method method, absl::StatusCode code) const;
  double ExecutionCount(Pass pass, PathId path, DType dtype) const;
  double RejectionCount(PathId path, Reason reason) const;
  double FallbackCount(Pass pass, std::optional<Reason> reason) const;
  // Of all executions so far, by count and by FLOPs.
  struct FlashTotals {
    double calls = 0, flash_calls = 0, flops = 0, flash_flops = 0;
  };
  FlashTotals flash_totals() const;
  // What calls of one pass on one path came to.
  struct Work {
    double calls = 0, flops = 0, kernel_seconds = 0, roofline_seconds = 0;
  };
  Work work(Pass pass, PathId path) const;
  double bytes(ByteLevel level, Pass pass, PathId path) const;
  const HistogramCells& stage(Stage stage, Pass pass) const;
  double CanaryCount(CanaryResult result) const;  // of both passes and all paths
  bool has_cuda() const { return has_cuda_; }

 private:
  struct Registry;
  struct DeviceCells;
  struct Collector;

  static constexpr size_t kPasses = 2;
  static constexpr size_t kDTypes = 3;
  static constexpr size_t kPaths = kAllPaths.size();
  static constexpr size_t kReasons = kAllReasons.size() + 1;  // 0: not known
  static constexpr size_t kHeadDims = kHeadDimBounds.size();

  struct ExecutionCells {
    Sum calls, flops, kernel_seconds, roofline_seconds;
  };
  template <typename T>
  using ByPass = std::array<T, kPasses>;
  template <typename T>
  using ByPath = std::array<T, kPaths>;

  const bool has_cuda_;
  std::array<std::array<Sum, kNumCodes>, kNumMethods> requests_;
  ByPass<ByPath<std::array<std::array<ExecutionCells, kHeadDims>, kDTypes>>> executions_;
  ByPath<std::array<Sum, kReasons>> rejections_;
  ByPass<std::array<Sum, kReasons>> fallbacks_;
  std::array<Sum, kNumRefusals> refusals_;
  std::array<ByPass<ByPath<Sum>>, kNumByteLevels> bytes_;
  std::array<ByPass<HistogramCells>, kNumStages> stages_;
  ByPass<HistogramCells> batches_;
  ByPass<HistogramCells> canary_seconds_;
  // The path after the last: none.
  ByPass<std::array<std::array<Sum, kNumCanaryResults>, kPaths + 1>> canary_runs_;
  std::vector<std::unique_ptr<DeviceCells>> devices_;
  const std::unique_ptr<Registry> registry_;  // what changes rarely, and live gauges
};

}  // namespace attn::server

#endif  // ATTN_SERVER_METRICS_METRICS_H_
