// A clock and a backend that tests of the server control.
#ifndef ATTN_TESTS_UNIT_SERVER_FAKES_H_
#define ATTN_TESTS_UNIT_SERVER_FAKES_H_

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "server/execution/clock.h"

namespace attn::server {

class FakeClock : public Clock {
 public:
  TimePoint Now() const override {
    MutexLock lock(mutex_);
    return now_;
  }
  void Advance(std::chrono::nanoseconds by) {
    MutexLock lock(mutex_);
    now_ += by;
  }

 private:
  mutable Mutex mutex_;
  TimePoint now_ ATTN_GUARDED_BY(mutex_) = TimePoint(std::chrono::hours(1));
};

// A gate that threads wait at, and that says how many do.
class Gate {
 public:
  void Open() {
    MutexLock lock(mutex_);
    open_ = true;
    changed_.NotifyAll();
  }
  // Waits for the gate to open, or for the token to be cancelled.
  void Wait(const CancelToken* cancel = nullptr) {
    MutexLock lock(mutex_);
    ++waiting_;
    changed_.NotifyAll();
    while (!open_ && !(cancel != nullptr && !cancel->Check().ok())) {
      // A token has no condition variable: look at it every millisecond.
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + std::chrono::milliseconds(1));
    }
    --waiting_;
  }
  void AwaitWaiting(int n) {
    MutexLock lock(mutex_);
    while (waiting_ < n) changed_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ ATTN_GUARDED_BY(mutex_) = false;
  int waiting_ ATTN_GUARDED_BY(mutex_) = 0;
};

// Writes zeros. With a gate, each call waits at it first.
class FakeBackend : public Backend {
 public:
  explicit FakeBackend(PathId path, Gate* gate = nullptr, int64_t workspace_bytes = 0)
      : path_(path), gate_(gate), workspace_bytes_(workspace_bytes) {}

  PathId path() const override { return path_; }
  void AppendRejections(const AttentionProblem& p, Pass, std::vector<Rejection>* r) const override {
    if (ClassOf(path_) == PathClass::kFlash && p.head_dim > 256) {
      r->push_back({path_, Reason::kHeadDimUnsupported,
                    "head_dim " + std::to_string(p.head_dim) + " > 256"});
    }
  }
  std::string KernelId(const AttentionProblem&, Pass) const override { return "fake_kernel"; }
  int64_t WorkspaceBytes(const AttentionProblem&, Pass) const override { return workspace_bytes_; }
  TileModel Model(const AttentionProblem&, Pass) const override {
    return {.tile_q = 64,
            .tile_k = 64,
            .on_chip_elements = 4096,
            .loaded_bytes = 100,
            .stored_bytes = 10};
  }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const RunContext& context) const override {
    if (gate_ != nullptr) gate_->Wait(context.cancel);
    if (context.cancel != nullptr) {
      if (absl::Status s = context.cancel->Check(); !s.ok()) return s;
    }
    std::memset(t.out, 0, static_cast<size_t>(OutElements(p) * SizeOf(p.out_dtype)));
    std::memset(t.lse, 0, static_cast<size_t>(LseElements(p)) * 4);
    return absl::OkStatus();
  }
  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& t,
                        const RunContext&) const override {
    const auto element = static_cast<size_t>(SizeOf(p.out_dtype));
    std::memset(t.dq, 0, static_cast<size_t>(DqElements(p)) * element);
    std::memset(t.dk, 0, static_cast<size_t>(DkElements(p)) * element);
    std::memset(t.dv, 0, static_cast<size_t>(DvElements(p)) * element);
    return absl::OkStatus();
  }

 private:
  const PathId path_;
  Gate* const gate_;
  const int64_t workspace_bytes_;
};

}  // namespace attn::server

#endif  // ATTN_TESTS_UNIT_SERVER_FAKES_H_
