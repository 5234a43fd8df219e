#include "server/rpc/canary_report.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/api/text.h"
#include "server/config/log.h"
#include "server/rpc/server.h"

namespace attn::server {
namespace {

// A round that waited longer than this for a worker is given up as late.
constexpr std::chrono::milliseconds kLeastTimeout{10'000};

constexpr char kCpu[] = "cpu";

std::string CudaLabel(int index) { return Cat("cuda:", index); }

}  // namespace

CanaryReport::CanaryReport(const ServiceContext& context)
    : metrics_(context.metrics),
      canary_(context.paths, context.executor, context.clock, CudaIndices(context.devices),
              std::max(kLeastTimeout, context.config.canary_interval),
              [this](const Canary::Result& result) { Note(result); }) {
  metrics_->AddLive("attn_canary_age_seconds", "Time since the canary last ran to its end.",
                    [this] { return std::chrono::duration<double>(canary_.age()).count(); });
  metrics_->AddLive("attn_canary_interval_seconds", "How often the canary runs.",
                    [interval = context.config.canary_interval] {
                      return std::chrono::duration<double>(interval).count();
                    });
  std::vector<std::string> devices = {kCpu};
  for (int index : CudaIndices(context.devices)) devices.push_back(CudaLabel(index));
  std::vector<Metrics::LiveSeries> series;
  for (const std::string& device : devices) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      series.push_back({{{"device", device}, {"pass", std::string(Name(pass))}},
                        [this, pass, device] { return Ok(pass, device); }});
    }
  }
  metrics_->AddLive("attn_canary_ok", "1 where the canary's last result on the device was right.",
                    std::move(series));
  timer_ = std::make_unique<Periodic>(context.config.canary_interval, [this] { canary_.Start(); });
}

std::optional<double> CanaryReport::Ok(Pass pass, const std::string& device) const {
  MutexLock lock(mutex_);
  const auto found = ok_.find({pass, device});
  if (found == ok_.end()) return std::nullopt;  // never run there
  return found->second ? 1 : 0;
}

std::vector<CanaryReport::Last> CanaryReport::last() const {
  std::vector<Last> all;
  MutexLock lock(mutex_);
  for (const auto& [key, ok] : ok_) all.push_back({key.second, key.first, ok});
  return all;
}

void CanaryReport::Note(const Canary::Result& result) {
  const bool ok = result.status.ok();
  const bool late = absl::IsDeadlineExceeded(result.status);
  metrics_->CountCanary(result.pass, result.path,
                        ok     ? CanaryResult::kOk
                        : late ? CanaryResult::kLate
                               : CanaryResult::kFailed,
                        result.latency);
  const std::string device = result.device < 0 ? kCpu : CudaLabel(result.device);
  if (!late) {  // of a late round only the age tells
    MutexLock lock(mutex_);
    if (result.path) {
      ok_[{result.pass, device}] = ok;
    } else if (ok_.empty()) {
      ok_[{result.pass, device}] = false;
    } else {
      for (auto& [key, value] : ok_) {  // no path: wherever it ran before, it does not now
        if (key.first == result.pass) value = false;
      }
    }
  }
  if (ok) return;
  log::Error("the canary failed",
             {{"pass", Name(result.pass)},
              {"path", result.path ? Name(*result.path) : std::string_view("none")},
              {"device", device},
              {"error", result.status.message()}});
}

}  // namespace attn::server
