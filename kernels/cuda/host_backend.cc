#include "kernels/cuda/host_backend.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/api/text.h"
#include "kernels/cuda/device_call.h"
#include "kernels/cuda/empty_call.h"

namespace attn::cuda {
namespace {

using std::chrono::steady_clock;

// The problem as kernels see it: itself where its rows are aligned, else a copy with the strides of
// packed copies. Axes of one element count as aligned whatever their stride, so look at the
// strides.
class Aligned {
 public:
  Aligned(const AttentionProblem& problem, Pass pass) : problem_(&problem) {
    if (!Unaligned(problem, pass)) return;
    copy_ = problem;
    UsePackedStrides(pass, &*copy_);
    problem_ = &*copy_;
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  const AttentionProblem& operator*() const { return *problem_; }

 private:
  static bool Unaligned(const AttentionProblem& p, Pass pass) {
    for (int i = 0; i < kNumStrided; ++i) {
      const StridedTensor tensor = StridedInput(p, pass, static_cast<Slot>(i));
      const int64_t strides = tensor.strides.batch | tensor.strides.token | tensor.strides.head;
      if (strides * tensor.element_bytes % kRowAlignment != 0) return true;
    }
    return false;
  }

  std::optional<AttentionProblem> copy_;
  const AttentionProblem* problem_;
};

// Only for choosing between devices: what a call keeps one busy for, roughly. Masks are left out.
double PredictSeconds(const AttentionProblem& p, Pass pass, const CallLayout& layout,
                      const Roofline& roofline) {
  constexpr double kLaunch = 20e-6;
  constexpr double kBus = 50e9;  // bytes per second, where nothing was measured
  constexpr double kMatrix = 200e12;
  double pairs = 0;
  for (const Sequence& s : p.sequences) {
    pairs += static_cast<double>(s.len_q) * static_cast<double>(s.len_k);
  }
  const double passes = pass == Pass::kForward ? 2 : 5;
  const double flops = passes * pairs * static_cast<double>(p.num_heads) *
                       static_cast<double>(p.head_dim + p.head_dim_v);
  const auto rate = [](double measured, double otherwise) {
    return measured > 0 ? measured : otherwise;
  };
  return kLaunch + flops / rate(roofline.matrix_flops_per_second, kMatrix) +
         static_cast<double>(layout.upload_bytes()) / rate(roofline.upload_bytes_per_second, kBus) +
         static_cast<double>(layout.download_bytes()) /
             rate(roofline.download_bytes_per_second, kBus);
}

bool SameKind(const Device& a, const Device& b) {
  const DeviceProperties& x = a.properties();
  const DeviceProperties& y = b.properties();
  return x.capability() == y.capability() && x.multiprocessors == y.multiprocessors &&
         x.memory_bytes == y.memory_bytes && x.l2_bytes == y.l2_bytes &&
         x.shared_bytes == y.shared_bytes && a.memory_limit_bytes() == b.memory_limit_bytes();
}

}  // namespace

HostBackend::HostBackend(std::shared_ptr<const DevicePath> path, std::shared_ptr<DeviceSet> devices)
    : path_(std::move(path)), devices_(std::move(devices)) {
  const size_t count = devices_->devices().size();
  for (size_t i = 0; i < count; ++i) {
    const Device& device = *devices_->devices()[i];
    auto kind = std::find_if(kinds_.begin(), kinds_.end(),
                             [&device](const Kind& k) { return SameKind(*k.device, device); });
    if (kind == kinds_.end()) {
      kinds_.push_back({&device, std::vector<bool>(count, false)});
      kind = std::prev(kinds_.end());
    }
    kind->members[i] = true;
  }
}

std::vector<Rejection> HostBackend::RejectionsOn(const Device& device,
                                                 const AttentionProblem& problem,
                                                 const AttentionProblem& aligned, Pass pass) const {
  std::vector<Rejection> rejections;
  path_->AppendRejections(aligned, pass, device.properties(), &rejections);
  if (!rejections.empty() || IsEmpty(problem)) return rejections;
  const int64_t workspace = path_->WorkspaceBytes(aligned, pass, device.properties());
  const int64_t needed = CallLayout(problem, pass, workspace, nullptr).total_bytes();
  if (needed > device.memory_limit_bytes()) {
    rejections.push_back({path(), Reason::kWorkspaceLimit,
                          Cat("tensors and workspace ", needed, " bytes > ",
                              device.memory_limit_bytes(), " bytes of device memory")});
  }
  return rejections;
}

const HostBackend::Kind& HostBackend::BestKind(const AttentionProblem& problem,
                                               const AttentionProblem& aligned, Pass pass,
                                               std::vector<Rejection>* rejections) const {
  const Kind* best = nullptr;
  for (const Kind& kind : kinds_) {
    std::vector<Rejection> reasons = RejectionsOn(*kind.device, problem, aligned, pass);
    if (best != nullptr && reasons.size() >= rejections->size()) continue;
    best = &kind;
    *rejections = std::move(reasons);
    if (rejections->empty()) break;
  }
  return *best;
}

void HostBackend::AppendRejections(const AttentionProblem& problem, Pass pass,
                                   std::vector<Rejection>* rejections) const {
  const Aligned aligned(problem, pass);
  std::vector<Rejection> reasons;
  BestKind(problem, *aligned, pass, &reasons);
  std::move(reasons.begin(), reasons.end(), std::back_inserter(*rejections));
}

std::string HostBackend::KernelId(const AttentionProblem& problem, Pass pass) const {
  const Aligned aligned(problem, pass);
  std::vector<Rejection> reasons;
  return path_->KernelId(*aligned, pass,
                         BestKind(problem, *aligned, pass, &reasons).device->properties());
}

int64_t HostBackend::WorkspaceBytes(const AttentionProblem& problem, Pass pass) const {
  if (IsEmpty(problem)) return 0;
  const Aligned aligned(problem, pass);
  std::vector<Rejection> reasons;
  return path_->WorkspaceBytes(*aligned, pass,
                               BestKind(problem, *aligned, pass, &reasons).device->properties());
}

TileModel HostBackend::Model(const AttentionProblem& problem, Pass pass) const {
  if (IsEmpty(problem)) return {};
  const Aligned aligned(problem, pass);
  std::vector<Rejection> reasons;
  return path_->Model(*aligned, pass,
                      BestKind(problem, *aligned, pass, &reasons).device->properties());
}

absl::Status HostBackend::Forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                                  const RunContext& context) const {
  if (!IsEmpty(problem)) return Run(problem, Pass::kForward, Collect(problem, tensors), context);
  if (context.device_times != nullptr) *context.device_times = {};
  AnswerEmptyForward(problem, tensors);
  return absl::OkStatus();
}

absl::Status HostBackend::Backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                                   const RunContext& context) const {
  if (!IsEmpty(problem)) return Run(problem, Pass::kBackward, Collect(problem, tensors), context);
  if (context.device_times != nullptr) *context.device_times = {};
  AnswerEmptyBackward(problem, tensors);
  return absl::OkStatus();
}

absl::Status HostBackend::Run(const AttentionProblem& problem, Pass pass,
                              const HostTensors& tensors, const RunContext& context) const {
  const Aligned aligned(problem, pass);
  std::vector<Rejection> reasons;
  const Kind& kind = BestKind(problem, *aligned, pass, &reasons);
  if (!reasons.empty()) return absl::FailedPreconditionError(Sentence(reasons.front()));
  std::vector<bool> eligible = kind.members;
  for (const Kind& other : kinds_) {
    if (&other == &kind || !RejectionsOn(*other.device, problem, *aligned, pass).empty()) continue;
    for (size_t i = 0; i < eligible.size(); ++i) eligible[i] = eligible[i] || other.members[i];
  }
  if (context.device_index >= 0) {
    for (size_t i = 0; i < eligible.size(); ++i) {
      const DeviceProperties& device = devices_->devices()[i]->properties();
      eligible[i] = eligible[i] && device.index == context.device_index;
    }
  }
  const CallLayout planned(problem, pass, 0, &tensors);
  const auto start = steady_clock::now();
  absl::StatusOr<DeviceSet::Lease> lease = devices_->Acquire(
      eligible, PredictSeconds(problem, pass, planned, kind.device->roofline()), context.cancel);
  if (!lease.ok()) return lease.status();
  const int64_t workspace = path_->WorkspaceBytes(*aligned, pass, lease->device()->properties());
  const CallLayout layout(problem, pass, workspace, &tensors);
  DeviceCall call(devices_.get(), *path_, *aligned, pass, layout, tensors, workspace,
                  devices_->poison() || context.poison);
  absl::Status status = call.Run(*lease, start, context.cancel);
  if (context.device_times != nullptr) *context.device_times = call.times();
  return status;
}

}  // namespace attn::cuda
