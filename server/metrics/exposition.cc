// The part of Metrics that a scrape reads.
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <sstream>

#include "kernels/api/text.h"
#include "server/metrics/metrics.h"
#include "server/metrics/registry.h"

namespace attn::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using PromLabels = std::vector<ClientMetric::Label>;

constexpr std::array<std::string_view, kNumStages> kStageNames = {
    "parse",  "gather",         "queue", "device_queue", "host_to_device",
    "kernel", "device_to_host", "reply", "handler"};
constexpr std::array<std::string_view, kNumByteLevels> kLevelNames = {
    "wire_request", "wire_response", "host_to_device", "device_to_host",
    "compulsory",   "tile",          "standard"};
constexpr std::array<std::string_view, kNumRefusals> kRefusalNames = {"full", "too_large",
                                                                      "draining"};
constexpr std::array kPassList = {Pass::kForward, Pass::kBackward};
constexpr std::array kDTypeList = {DType::kFp32, DType::kFp16, DType::kBf16};

std::string Str(std::string_view text) { return std::string(text); }

template <typename T>
constexpr size_t Index(T value) {
  return static_cast<size_t>(value);
}

// Series of one family. Labels come in the order of their names, as prometheus-cpp's registry has
// them.
class Family {
 public:
  Family(const char* name, const char* help, MetricType type) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }

  void Add(PromLabels labels, double value) {
    ClientMetric& metric = family_.metric.emplace_back();
    metric.label = std::move(labels);
    if (family_.type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
  }

  void Add(PromLabels labels, const HistogramCells& cells) {
    ClientMetric& metric = family_.metric.emplace_back();
    metric.label = std::move(labels);
    prometheus::ClientMetric::Histogram& histogram = metric.histogram;
    uint64_t count = 0;
    for (size_t i = 0; i < cells.bounds().size(); ++i) {
      count += cells.count(i);
      histogram.bucket.push_back({count, cells.bounds()[i]});
    }
    histogram.sample_count = count + cells.count(cells.bounds().size());
    histogram.sample_sum = cells.sum();
  }

  MetricFamily&& Take() && { return std::move(family_); }

 private:
  MetricFamily family_;
};

}  // namespace

// Reads the cells, family by family.
struct Metrics::Collector {
  const Metrics& m;
  std::vector<MetricFamily>* out;

  void Finish(Family&& family) { out->push_back(std::move(family).Take()); }

  void Calls() {
    Family requests("attn_requests_total", "Calls answered, by method and status code.",
                    MetricType::Counter);
    Family errors("attn_errors_total",
                  "Calls answered with a code other than OK, over all methods.",
                  MetricType::Counter);
    for (size_t code = 0; code < kNumCodes; ++code) {
      const std::string name = Str(CodeName(static_cast<absl::StatusCode>(code)));
      double all = 0;
      for (size_t method = 0; method < kNumMethods; ++method) {
        const double value = m.requests_[method][code].value();
        all += value;
        requests.Add({{"code", name}, {"method", Str(Name(static_cast<Method>(method)))}}, value);
      }
      if (code != 0) errors.Add({{"code", name}}, all);
    }
    Finish(std::move(requests));
    Finish(std::move(errors));
    Family refusals("attn_admission_refusals_total", "Calls that were not admitted, by cause.",
                    MetricType::Counter);
    for (size_t i = 0; i < kNumRefusals; ++i) {
      refusals.Add({{"cause", Str(kRefusalNames[i])}}, m.refusals_[i].value());
    }
    Finish(std::move(refusals));
  }

  void Executions() {
    using Member = Sum ExecutionCells::*;
    const auto family = [this](const char* name, const char* help, Member member) {
      Family f(name, help, MetricType::Counter);
      for (Pass pass : kPassList) {
        for (PathId path : kAllPaths) {
          const char* flash = CountsAsFlash(path, m.has_cuda_) ? "true" : "false";
          for (DType dtype : kDTypeList) {
            const auto& cells = m.executions_[Index(pass)][Index(path)][Index(dtype)];
            for (size_t range = 0; range < kHeadDims; ++range) {
              f.Add({{"dtype", Str(LowerName(dtype))},
                     {"flash", flash},
                     {"head_dim", Str(HeadDimLabel(range))},
                     {"pass", Str(Name(pass))},
                     {"path", Str(Name(path))}},
                    (cells[range].*member).value());
            }
          }
        }
      }
      Finish(std::move(f));
    };
    family("attn_executions_total",
           "Attention calls run to the end. flash: a fused path, on hosts with CUDA one of CUDA.",
           &ExecutionCells::calls);
    family("attn_flops_total", "Floating-point operations of visible entries.",
           &ExecutionCells::flops);
    family("attn_kernel_seconds_total", "Time spent running attention.",
           &ExecutionCells::kernel_seconds);
    family("attn_roofline_seconds_total",
           "Time that the same work takes at best at the device's rates measured at start-up.",
           &ExecutionCells::roofline_seconds);
  }

  void Reasons() {
    Family rejections("attn_rejections_total", "Reasons for which a faster path was not taken.",
                      MetricType::Counter);
    for (PathId path : kAllPaths) {
      for (Reason reason : kAllReasons) {
        rejections.Add({{"path", Str(Name(path))}, {"reason", Str(Name(reason))}},
                       m.rejections_[Index(path)][Index(reason)].value());
      }
    }
    Finish(std::move(rejections));
    Family fallbacks("attn_fallbacks_total",
                     "Calls that ran without flash, by why the last flash path did not take them.",
                     MetricType::Counter);
    for (Pass pass : kPassList) {
      const auto add = [&](size_t index, std::string_view reason) {
        fallbacks.Add({{"pass", Str(Name(pass))}, {"reason", Str(reason)}},
                      m.fallbacks_[Index(pass)][index].value());
      };
      for (Reason reason : kAllReasons) add(Index(reason), Name(reason));
      add(0, "UNKNOWN");
    }
    Finish(std::move(fallbacks));
  }

  void Bytes() {
    Family bytes("attn_bytes_total",
                 "Bytes moved, by memory level; compulsory, tile and standard are models.",
                 MetricType::Counter);
    for (size_t level = 0; level < kNumByteLevels; ++level) {
      for (Pass pass : kPassList) {
        for (PathId path : kAllPaths) {
          bytes.Add({{"level", Str(kLevelNames[level])},
                     {"pass", Str(Name(pass))},
                     {"path", Str(Name(path))}},
                    m.bytes_[level][Index(pass)][Index(path)].value());
        }
      }
    }
    Finish(std::move(bytes));
  }

  void Histograms() {
    Family stages("attn_stage_seconds", "Time of each stage of a call that the server can see.",
                  MetricType::Histogram);
    for (size_t stage = 0; stage < kNumStages; ++stage) {
      for (Pass pass : kPassList) {
        stages.Add({{"pass", Str(Name(pass))}, {"stage", Str(kStageNames[stage])}},
                   m.stages_[stage][Index(pass)]);
      }
    }
    Finish(std::move(stages));
    Family batches("attn_batch_requests", "Requests that ran together as one.",
                   MetricType::Histogram);
    Family canary("attn_canary_seconds",
                  "Time of the canary's calls, the wait for a worker included.",
                  MetricType::Histogram);
    for (Pass pass : kPassList) {
      batches.Add({{"pass", Str(Name(pass))}}, m.batches_[Index(pass)]);
      canary.Add({{"pass", Str(Name(pass))}}, m.canary_seconds_[Index(pass)]);
    }
    Finish(std::move(batches));
    Finish(std::move(canary));
  }

  void Canary() {
    Family runs("attn_canary_runs_total", "Calls that the server made of itself, by result.",
                MetricType::Counter);
    for (Pass pass : kPassList) {
      for (size_t path = 0; path <= kPaths; ++path) {
        for (size_t result = 0; result < kNumCanaryResults; ++result) {
          runs.Add({{"pass", Str(Name(pass))},
                    {"path", path < kPaths ? Str(Name(kAllPaths[path])) : "none"},
                    {"result", Str(Name(static_cast<CanaryResult>(result)))}},
                   m.canary_runs_[Index(pass)][path][result].value());
        }
      }
    }
    Finish(std::move(runs));
  }

  void Devices() {
    if (m.devices_.empty()) return;
    using Member = Sum DeviceCells::*;
    const auto family = [this](const char* name, const char* help, Member member) {
      Family f(name, help, MetricType::Counter);
      for (const auto& device : m.devices_) {
        f.Add({{"index", Cat(device->index)}, {"kind", Str(Name(device->kind))}},
              ((*device).*member).value());
      }
      Finish(std::move(f));
    };
    family("attn_device_calls_total", "Calls run on the device.", &DeviceCells::calls);
    family("attn_device_flops_total", "Floating-point operations of calls on the device.",
           &DeviceCells::flops);
    family("attn_device_compulsory_bytes_total",
           "Inputs read once and outputs written once of calls on the device.",
           &DeviceCells::bytes);
    family("attn_device_kernel_seconds_total",
           "Time of attention on the device; calls that overlap each count.",
           &DeviceCells::kernel_seconds);
    family("attn_device_roofline_seconds_total",
           "Time that these calls take at best at the device's rates measured at start-up.",
           &DeviceCells::roofline_seconds);
  }

  void Live() {
    MutexLock lock(m.registry_->mutex);
    for (const Registry::Live& live : m.registry_->live) {
      Family family(live.name.c_str(), live.help.c_str(), MetricType::Gauge);
      bool any = false;
      for (const LiveSeries& series : live.series) {
        const std::optional<double> value = series.read();
        if (!value) continue;
        PromLabels labels;
        for (const auto& [name, text] : series.labels) labels.push_back({name, text});
        family.Add(std::move(labels), *value);
        any = true;
      }
      if (any) Finish(std::move(family));
    }
  }
};

std::string Metrics::Scrape() const {
  std::vector<MetricFamily> families = registry_->registry.Collect();
  Collector collect{*this, &families};
  collect.Calls();
  collect.Executions();
  collect.Reasons();
  collect.Bytes();
  collect.Histograms();
  collect.Canary();
  collect.Devices();
  collect.Live();
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

}  // namespace attn::server
