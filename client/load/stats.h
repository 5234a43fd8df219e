// What the calls of one phase of load add up to.
#ifndef ATTN_CLIENT_LOAD_STATS_H_
#define ATTN_CLIENT_LOAD_STATS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/load/histogram.h"
#include "client/load/target.h"

namespace attn::load {

// One call that has ended. Times are nanoseconds since the phase began.
struct CallRecord {
  uint32_t entry = 0;
  int64_t intended_ns = 0;  // when it was meant to be sent; closed loop: when it was sent
  int64_t sent_ns = 0;
  int64_t done_ns = 0;
  // Whether the generator slept until intended_ns: sent_ns - intended_ns is then its own lateness.
  // Otherwise the call was due before anything could send it.
  bool paced = false;
  std::string trace_id;
  CallReply reply;
};

// Where the time of a call goes, in the order in which it passes.
enum class Stage : uint8_t {
  kWait,    // due and not yet sent: no place in flight was free, or the generator was late
  kClient,  // in the client library: making the request, reading the reply, retries
  kWire,    // the call as gRPC saw it, less the server's handler
  kParse,
  kGather,
  kQueue,
  kDeviceQueue,
  kHostToDevice,
  kKernel,
  kDeviceToHost,
  kReply,
  kOther,  // the handler's time that it ascribes to no stage
};
inline constexpr size_t kNumStages = 12;
const char* Name(Stage stage);  // "deviceQueue": as in JSON
bool IsOnServer(Stage stage);

// One stretch of time. Calls are counted where they ended, `offered` where they were meant to be
// sent.
struct Window {
  double start_seconds = 0;  // since measuring began
  int64_t offered = 0;
  int64_t ok = 0;
  int64_t failed = 0;
  double mean_ns = 0;  // latency of `ok`
  int64_t p50_ns = 0, p99_ns = 0, max_ns = 0;
};

struct PathCount {
  v1::PathClass path_class = v1::PATH_CLASS_UNSPECIFIED;
  v1::DeviceKind device_kind = v1::DEVICE_KIND_UNSPECIFIED;
  int64_t calls = 0;
  double flops = 0;
};

struct Failure {
  int64_t count = 0;
  std::string first_message;
};

struct EntryStats {
  int64_t ok = 0, failed = 0;
  Histogram latency, service;
};

// A call worth looking up in the server's logs.
struct SlowCall {
  int64_t latency_ns = 0, service_ns = 0, handler_ns = 0;
  double at_seconds = 0;  // intended send, since measuring began
  uint32_t entry = 0;
  std::string trace_id, request_id, path;
};

// Not thread-safe.
class PhaseStats {
 public:
  static constexpr size_t kSlowest = 10;

  // Calls meant to be sent before `measure_from_ns` are warm-up: not counted. Windows begin there.
  PhaseStats(size_t entries, int64_t measure_from_ns, int64_t window_ns);

  void Add(const CallRecord& record);

  // Every call that ended before `now_ns` has been added, but for stragglers that a thread was slow
  // to hand over: gives the windows that ended before it their final numbers. A straggler counts
  // in the first window still open. Returns how many windows are closed.
  size_t CloseWindows(int64_t now_ns);

  int64_t measure_from_ns() const { return measure_from_ns_; }
  int64_t window_ns() const { return window_ns_; }

  Histogram latency;  // OK calls, from the intended send
  Histogram service;  // OK calls, from the actual send
  Histogram failed_latency;
  Histogram lateness;  // of calls that the generator slept for
  int64_t ok = 0, failed = 0, cancelled = 0;
  int64_t ok_in_time = 0;  // of `ok`: ended within the measured time (see SetEnd)
  double flops_in_time = 0, bytes_in_time = 0;
  int64_t retried = 0, streamed = 0;
  std::map<std::string, Failure> failures;  // by status name
  std::map<std::string, PathCount> paths;
  std::map<std::string, int64_t> rejections;  // "flash_sm90:NO_CUDA_DEVICE"
  std::array<double, kNumStages> stage_ns{};  // sums over OK calls
  double handler_ns = 0;
  double wire_request_bytes = 0, wire_response_bytes = 0;
  std::vector<EntryStats> entries;
  std::vector<SlowCall> slowest;  // slowest first
  std::vector<Window> windows;

  // Windows and rates end here; calls that end later still count in the histograms.
  void SetEnd(int64_t end_ns) { end_ns_ = end_ns; }

 private:
  void AddOk(const CallRecord& record);
  void AddStages(const CallRecord& record);
  void AddPath(const v1::ExecutionReport& report);
  void AddSlow(const CallRecord& record);
  Window* WindowAt(int64_t time_ns);

  const int64_t measure_from_ns_;
  const int64_t window_ns_;
  int64_t end_ns_;
  size_t closed_ = 0;
  std::map<size_t, Histogram> open_;  // latencies of windows that are not closed
};

// Whether a phase was steady: in each of the last `kStableWindows` whole windows the throughput and
// the mean latency are within `tolerance` (0.1: a tenth) of their mean over these windows. With an
// open loop throughput is calls done per call offered, so that a rate that changes on purpose, or
// Poisson noise, is not taken for unsteadiness.
struct Stability {
  bool judged = false;  // false: fewer windows than that, or one without a call
  bool stable = false;
  double worst_throughput = 0, worst_latency = 0;  // largest deviation from the mean, as a share
};
inline constexpr size_t kStableWindows = 3;
Stability JudgeStability(const std::vector<Window>& windows, bool open_loop, double tolerance);

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_STATS_H_
