#include "kernels/cuda/device_call.h"

#include <utility>

#include "kernels/api/text.h"

namespace attn::cuda {
namespace {

uint64_t ToNanoseconds(float milliseconds) {
  return milliseconds > 0 ? static_cast<uint64_t>(static_cast<double>(milliseconds) * 1e6) : 0;
}

}  // namespace

absl::Status DeviceCall::Run(const DeviceSet::Lease& lease,
                             std::chrono::steady_clock::time_point queued,
                             const CancelToken* cancel) {
  device_ = lease.device();
  lane_ = lease.lane();
  times_.device_index = device_->properties().index;
  absl::StatusOr<MemoryPool::Block> memory =
      device_->memory().Allocate(layout_.total_bytes(), cancel);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  times_.queue_ns = static_cast<uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now() - queued).count());
  if (!device_->healthy()) {
    return absl::UnavailableError(
        Cat("CUDA device ", times_.device_index, " failed while the call waited for its memory"));
  }
  devices_->driver()->TakeError();  // of an earlier call of this thread: not this call's
  absl::Status status = Enqueue(cancel);
  if (status.ok()) status = Download();
  if (status.ok()) status = ReadTimes();
  return status.ok() ? status : Fail(std::move(status));
}

absl::Status DeviceCall::Enqueue(const CancelToken* cancel) {
  if (absl::Status s = Record(lane_->begin); !s.ok()) return s;
  if (absl::Status s = Upload(); !s.ok()) return s;
  if (absl::Status s = Record(lane_->kernels_begin); !s.ok()) return s;
  // Staging large tensors takes a while: the last moment at which giving up saves anything.
  if (cancel != nullptr) {
    if (absl::Status s = cancel->Check(); !s.ok()) return s;
  }
  if (absl::Status s = Pack(); !s.ok()) return s;
  if (poison_) {
    if (absl::Status s = Poison(); !s.ok()) return s;
  }
  if (absl::Status s = Launch(); !s.ok()) return s;
  return Record(lane_->kernels_end);
}

absl::Status DeviceCall::Upload() {
  Uploader uploader(devices_->driver(), lane_);
  for (const CallLayout::Upload& upload : layout_.uploads()) {
    const void* from = upload.from;
    if (upload.slot == kSlotSequences) {
      sequences_ = MakeSequences(problem_);
      from = sequences_.data();
    }
    if (absl::Status s = uploader.Add(memory_.data() + upload.offset, from, upload.bytes);
        !s.ok()) {
      return s;
    }
  }
  absl::Status status = uploader.Flush();
  times_.host_to_device_bytes = uploader.bytes();
  return status;
}

absl::Status DeviceCall::Pack() {
  for (const CallLayout::Packing& packing : layout_.packings()) {
    const PackJob job = {.source = memory_.data() + layout_.uploaded(packing.slot),
                         .destination = memory_.data() + packing.offset,
                         .from = packing.from};
    if (absl::Status s = ToStatus(devices_->driver()->Pack(job, lane_->stream()),
                                  "aligning the rows of an input");
        !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceCall::Poison() {
  const int64_t begin = layout_.outputs_offset();
  return ToStatus(
      devices_->driver()->Fill(memory_.data() + begin, 0xFF,
                               static_cast<size_t>(layout_.total_bytes() - begin), lane_->stream()),
      "poisoning the outputs");
}

const void* DeviceCall::Input(Slot slot) const {
  const int64_t offset = layout_.input(slot);
  return offset < 0 ? nullptr : memory_.data() + offset;
}

void* DeviceCall::Output(OutputSlot slot) const {
  const CallLayout::Output& output = layout_.output(slot);
  return output.bytes == 0 ? nullptr : memory_.data() + output.offset;
}

AttentionProblem DeviceCall::OnDevice() const {
  AttentionProblem p = problem_;
  if (p.alibi) p.alibi->slopes = static_cast<const float*>(Input(kSlotAlibi));
  if (p.bias) p.bias->data = Input(kSlotBias);
  if (p.has_sinks) p.sinks = static_cast<const float*>(Input(kSlotSinks));
  if (p.block_mask) p.block_mask->data = static_cast<const uint8_t*>(Input(kSlotBlockMask));
  return p;
}

absl::Status DeviceCall::Launch() {
  const cuda::Launch launch = {
      .device = &device_->properties(),
      .stream = lane_->stream(),
      .workspace = workspace_bytes_ == 0 ? nullptr : memory_.data() + layout_.workspace_offset(),
      .workspace_bytes = workspace_bytes_,
      .sequences = static_cast<const DeviceSequence*>(Input(kSlotSequences)),
      .counters = lane_->counters()};
  const AttentionProblem problem = OnDevice();
  absl::Status status;
  if (pass_ == Pass::kForward) {
    status = path_.Forward(problem,
                           {.q = Input(kSlotQ),
                            .k = Input(kSlotK),
                            .v = Input(kSlotV),
                            .out = Output(kOutputOut),
                            .lse = static_cast<float*>(Output(kOutputLse))},
                           launch);
  } else {
    status = path_.Backward(problem,
                            {.q = Input(kSlotQ),
                             .k = Input(kSlotK),
                             .v = Input(kSlotV),
                             .out = Input(kSlotOut),
                             .lse = static_cast<const float*>(Input(kSlotLse)),
                             .dout = Input(kSlotDout),
                             .dlse = static_cast<const float*>(Input(kSlotDlse)),
                             .dq = Output(kOutputOut),
                             .dk = Output(kOutputLse),
                             .dv = Output(kOutputDv),
                             .dbias = static_cast<float*>(Output(kOutputDbias)),
                             .dsink = static_cast<float*>(Output(kOutputDsink))},
                            launch);
  }
  if (!status.ok()) return status;
  // What a path forgot to look at.
  return ToStatus(devices_->driver()->TakeError(), "launching kernels");
}

absl::Status DeviceCall::Download() {
  Downloader downloader(devices_->driver(), lane_);
  for (int i = 0; i < kNumOutputs; ++i) {
    const CallLayout::Output& output = layout_.output(static_cast<OutputSlot>(i));
    downloader.Add(tensors_.outputs[i], memory_.data() + output.offset, output.bytes);
  }
  absl::Status status = downloader.Run();
  times_.device_to_host_bytes = downloader.bytes();
  return status;
}

absl::Status DeviceCall::ReadTimes() {
  Driver* driver = devices_->driver();
  const auto between = [driver](const Event& begin, const Event& end, uint64_t* ns) {
    float milliseconds = 0;
    const cudaError_t error = driver->Elapsed(&milliseconds, begin.get(), end.get());
    *ns = ToNanoseconds(milliseconds);
    return ToStatus(error, "cudaEventElapsedTime");
  };
  absl::Status status = between(lane_->begin, lane_->kernels_begin, &times_.host_to_device_ns);
  if (status.ok()) status = between(lane_->kernels_begin, lane_->kernels_end, &times_.kernel_ns);
  if (status.ok()) status = between(lane_->kernels_end, lane_->end, &times_.device_to_host_ns);
  return status;
}

absl::Status DeviceCall::Record(const Event& event) {
  return ToStatus(devices_->driver()->RecordEvent(event.get(), lane_->stream()), "cudaEventRecord");
}

absl::Status DeviceCall::Fail(absl::Status status) {
  // Also after a cancellation: copies into the block may be under way, and copies out of the
  // caller's memory. An error that leaves the context unusable is seen here, whoever caused it.
  Driver* driver = devices_->driver();
  const cudaError_t seen = driver->SynchronizeStream(lane_->stream());
  driver->TakeError();
  for (auto* chunks : {&lane_->upload_chunks(), &lane_->download_chunks()}) {
    for (Lane::Chunk& chunk : *chunks) chunk.busy = false;
  }
  if (CudaErrorOf(status) != cudaSuccess || seen != cudaSuccess) {
    if (CudaErrorOf(status) == cudaSuccess) status = ToStatus(seen, "running attention");
    const cudaError_t error = CudaErrorOf(status);
    status = absl::Status(status.code(), Cat("CUDA device ", device_->properties().index, ": ",
                                             std::string(status.message())));
    if (IsSticky(error) || IsSticky(seen)) devices_->MarkUnhealthy(device_, status);
  }
  // A kernel that ran left the counters zero, and one that was not launched never touched them:
  // but the lane's next call must not depend on what went wrong in this one.
  if (device_->healthy()) {
    if (const cudaError_t error = lane_->ZeroCounters(driver); error != cudaSuccess) {
      driver->TakeError();
      devices_->MarkUnhealthy(device_, ToStatus(error, "zeroing counters"));
    }
  }
  return status;
}

}  // namespace attn::cuda
