// A CUDA path that computes on the CPU, over FakeDriver's memory, and checks what it is handed.
#ifndef ATTN_TESTS_UNIT_CUDA_FAKE_PATH_H_
#define ATTN_TESTS_UNIT_CUDA_FAKE_PATH_H_

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/api/text.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/device_path.h"
#include "kernels/cuda/runtime/lane.h"
#include "tests/unit/cuda_fake_driver.h"

namespace attn::cuda {

class FakePath : public DevicePath {
 public:
  FakePath(FakeDriver* driver, const Backend* cpu) : driver_(driver), cpu_(cpu) {}

  // Called on the launching thread before the work is enqueued; its error is the path's.
  void set_on_launch(std::function<absl::Status(const cuda::Launch&)> on_launch) {
    on_launch_ = std::move(on_launch);
  }
  // Adds this much to the scratch memory.
  void set_extra_workspace(int64_t bytes) { extra_workspace_ = bytes; }
  // Takes only devices of this major version; 0: all.
  void set_major(int major) { major_ = major; }
  // Leaves the first element of out as it finds it.
  void set_forgets_an_element(bool forgets) { forgets_ = forgets; }

  PathId path() const override { return PathId::kFlashSm80; }
  void AppendRejections(const AttentionProblem& p, Pass pass, const DeviceProperties& device,
                        std::vector<Rejection>* rejections) const override {
    if (major_ != 0 && device.major != major_) {
      rejections->push_back({path(), Reason::kArchUnsupported, Cat("sm_", device.capability())});
    }
    for (int i = 0; i < kNumStrided; ++i) {
      const StridedTensor tensor = StridedInput(p, pass, static_cast<Slot>(i));
      const Strides& s = tensor.strides;
      if ((s.batch | s.token | s.head) * tensor.element_bytes % 16 != 0) {
        rejections->push_back({path(), Reason::kAlignment, Cat("input ", i)});
      }
    }
    cpu_->AppendRejections(p, pass, rejections);
  }
  std::string KernelId(const AttentionProblem&, Pass,
                       const DeviceProperties& device) const override {
    return Cat("fake_sm", device.capability());
  }
  int64_t WorkspaceBytes(const AttentionProblem& p, Pass pass,
                         const DeviceProperties&) const override {
    return cpu_->WorkspaceBytes(p, pass) + extra_workspace_;
  }
  TileModel Model(const AttentionProblem& p, Pass pass, const DeviceProperties&) const override {
    return cpu_->Model(p, pass);
  }
  absl::Status Forward(const AttentionProblem& p, const ForwardTensors& t,
                       const cuda::Launch& launch) const override {
    if (absl::Status s = Check(p, Pass::kForward, launch); !s.ok()) return s;
    for (const void* data : {t.q, t.k, t.v, static_cast<const void*>(t.out)}) {
      if (absl::Status s = CheckPointer(data, launch); !s.ok()) return s;
    }
    driver_->Enqueue(launch.stream, [this, p, t, launch] {
      float first = 0;
      if (forgets_) std::memcpy(&first, t.out, sizeof(first));
      const absl::Status s = cpu_->Forward(p, t, Context(launch));
      if (!s.ok()) std::abort();
      if (forgets_) std::memcpy(t.out, &first, sizeof(first));
    });
    return absl::OkStatus();
  }
  absl::Status Backward(const AttentionProblem& p, const BackwardTensors& t,
                        const cuda::Launch& launch) const override {
    if (absl::Status s = Check(p, Pass::kBackward, launch); !s.ok()) return s;
    for (const void* data : {t.q, t.k, t.v, t.out, t.dout, static_cast<const void*>(t.dq)}) {
      if (absl::Status s = CheckPointer(data, launch); !s.ok()) return s;
    }
    driver_->Enqueue(launch.stream, [this, p, t, launch] {
      const absl::Status s = cpu_->Backward(p, t, Context(launch));
      if (!s.ok()) std::abort();
    });
    return absl::OkStatus();
  }

 private:
  static RunContext Context(const cuda::Launch& launch) {
    return {.workspace = {launch.workspace, static_cast<size_t>(launch.workspace_bytes)}};
  }
  absl::Status CheckPointer(const void* data, const cuda::Launch& launch) const {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0)
      return absl::InternalError("unaligned pointer");
    if (!driver_->OwnsRange(launch.stream, data, 1)) {
      return absl::InternalError("not a pointer to this device's memory");
    }
    return absl::OkStatus();
  }
  absl::Status Check(const AttentionProblem& p, Pass pass, const cuda::Launch& launch) const {
    if (on_launch_) {
      if (absl::Status s = on_launch_(launch); !s.ok()) return s;
    }
    std::vector<Rejection> rejections;
    AppendRejections(p, pass, *launch.device, &rejections);
    if (!rejections.empty()) return absl::InternalError(Sentence(rejections.front()));
    if (launch.workspace_bytes < WorkspaceBytes(p, pass, *launch.device)) {
      return absl::InternalError("too little scratch memory");
    }
    if (!driver_->OwnsRange(launch.stream, launch.counters, kCounterBytes)) {
      return absl::InternalError("the counters are not in this device's memory");
    }
    driver_->Enqueue(launch.stream, [counters = launch.counters] {
      for (size_t i = 0; i < kCounterBytes / sizeof(*counters); ++i) {
        if (counters[i] != 0) std::abort();
      }
    });
    if ((launch.sequences == nullptr) != UniformSequences(p)) {
      return absl::InternalError("sequences are there where they are uniform, or the reverse");
    }
    if (p.alibi) {
      if (absl::Status s = CheckPointer(p.alibi->slopes, launch); !s.ok()) return s;
    }
    if (p.bias) {
      if (absl::Status s = CheckPointer(p.bias->data, launch); !s.ok()) return s;
    }
    if (p.has_sinks) {
      if (absl::Status s = CheckPointer(p.sinks, launch); !s.ok()) return s;
    }
    if (p.block_mask) {
      if (absl::Status s = CheckPointer(p.block_mask->data, launch); !s.ok()) return s;
    }
    if (launch.sequences == nullptr) return absl::OkStatus();
    if (absl::Status s = CheckPointer(launch.sequences, launch); !s.ok()) return s;
    driver_->Enqueue(launch.stream, [want = MakeSequences(p), got = launch.sequences] {
      if (std::memcmp(want.data(), got, want.size() * sizeof(want[0])) != 0) std::abort();
    });
    return absl::OkStatus();
  }

  FakeDriver* const driver_;
  const Backend* const cpu_;
  std::function<absl::Status(const cuda::Launch&)> on_launch_;
  int64_t extra_workspace_ = 0;
  int major_ = 0;
  bool forgets_ = false;
};

}  // namespace attn::cuda

#endif  // ATTN_TESTS_UNIT_CUDA_FAKE_PATH_H_
