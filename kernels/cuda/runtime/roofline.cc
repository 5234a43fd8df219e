// One large copy, one large read, products, and copies over the bus.
#include "kernels/cuda/runtime/roofline.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>

#include "kernels/cuda/runtime/cublas.h"
#include "kernels/cuda/runtime/roofline_kernels.h"

namespace attn::cuda {
namespace {

struct FreeDevice {
  void operator()(void* data) const { cudaFree(data); }
};
struct FreeHost {
  void operator()(void* data) const { cudaFreeHost(data); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};

class Bench {
 public:
  absl::Status Prepare(const DeviceProperties& device) {
    // Four times the second-level cache, so that nothing is served from it, within 256 MiB each.
    bytes_ = std::clamp<int64_t>(4 * device.l2_bytes, int64_t{64} << 20, int64_t{256} << 20);
    bytes_ = std::min(bytes_, device.memory_bytes / 16);
    device_ = device.index;
    multiprocessors_ = device.multiprocessors;
    if (absl::Status s = ToStatus(cudaSetDevice(device.index), "cudaSetDevice"); !s.ok()) return s;
    void *a = nullptr, *b = nullptr, *host = nullptr;
    if (absl::Status s = ToStatus(cudaMalloc(&a, bytes_), "measuring the device"); !s.ok())
      return s;
    a_.reset(a);
    if (absl::Status s = ToStatus(cudaMalloc(&b, bytes_), "measuring the device"); !s.ok())
      return s;
    b_.reset(b);
    if (absl::Status s = ToStatus(cudaMallocHost(&host, kHostBytes), "measuring the bus"); !s.ok())
      return s;
    host_.reset(host);
    cudaStream_t stream = nullptr;
    if (absl::Status s =
            ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        !s.ok()) {
      return s;
    }
    stream_.reset(stream);
    for (auto* event : {&begin_, &end_}) {
      cudaEvent_t made = nullptr;
      if (absl::Status s = ToStatus(cudaEventCreate(&made), "cudaEventCreate"); !s.ok()) return s;
      event->reset(made);
    }
    LaunchRandom(a_.get(), bytes_ / 4, stream);
    return ToStatus(cudaGetLastError(), "measuring the device");
  }

  // Work per second of the best of four runs; the first also warms up.
  template <typename Run>
  absl::Status Measure(double work, double* rate, Run run) {
    float best = 0;
    for (int repeat = 0; repeat < 4; ++repeat) {
      cudaEventRecord(begin_.get(), stream_.get());
      run();
      cudaEventRecord(end_.get(), stream_.get());
      if (absl::Status s = ToStatus(cudaGetLastError(), "measuring the device"); !s.ok()) return s;
      if (absl::Status s = ToStatus(cudaEventSynchronize(end_.get()), "measuring the device");
          !s.ok())
        return s;
      float milliseconds = 0;
      cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get());
      if (milliseconds > 0 && (best == 0 || milliseconds < best)) best = milliseconds;
    }
    *rate = best > 0 ? work / (static_cast<double>(best) * 1e-3) : 0;
    return absl::OkStatus();
  }

  absl::Status All(Roofline* r) {
    const double bytes = static_cast<double>(bytes_);
    cudaStream_t stream = stream_.get();
    absl::Status s = Measure(2 * bytes, &r->copy_bytes_per_second, [&] {
      cudaMemcpyAsync(b_.get(), a_.get(), bytes_, cudaMemcpyDeviceToDevice, stream);
    });
    if (!s.ok()) return s;
    const int64_t words = bytes_ / 16;
    // The loop takes whole steps of four only.
    const int blocks = 8 * multiprocessors_;
    const int64_t step = static_cast<int64_t>(blocks) * kRooflineThreads * 4;
    s = Measure(static_cast<double>(words / step * step) * 16, &r->read_bytes_per_second,
                [&] { LaunchRead(a_.get(), words, blocks, b_.get(), stream); });
    if (!s.ok()) return s;
    constexpr int kRounds = 4096;
    constexpr double kFlopsPerWarp = kRooflineChains * 2.0 * 16 * 8 * 16 * kRounds;
    const int matrix_blocks = 4 * multiprocessors_;
    s = Measure(kFlopsPerWarp * (kRooflineThreads / 32) * matrix_blocks,
                &r->matrix_flops_per_second,
                [&] { LaunchMatrix(kRounds, matrix_blocks, b_.get(), stream); });
    if (!s.ok()) return s;
    s = MeasureCublas(&r->matrix_flops_per_second);
    if (!s.ok()) return s;
    s = Measure(static_cast<double>(kHostBytes), &r->upload_bytes_per_second, [&] {
      cudaMemcpyAsync(b_.get(), host_.get(), kHostBytes, cudaMemcpyHostToDevice, stream);
    });
    if (!s.ok()) return s;
    return Measure(static_cast<double>(kHostBytes), &r->download_bytes_per_second, [&] {
      cudaMemcpyAsync(host_.get(), b_.get(), kHostBytes, cudaMemcpyDeviceToHost, stream);
    });
  }

 private:
  // cuBLAS knows instructions that mma.sync does not reach, from 9.0 on twice as fast.
  absl::Status MeasureCublas(double* rate) {
    constexpr int64_t kSide = 4096;
    constexpr int64_t kMatrixBytes = kSide * kSide * 2;
    const Cublas* cublas = Cublas::Get();
    if (cublas == nullptr || bytes_ < 2 * kMatrixBytes) return absl::OkStatus();
    auto* a = static_cast<std::byte*>(a_.get());
    auto* b = static_cast<std::byte*>(b_.get());
    absl::StatusOr<CublasHandle> handle =
        cublas->Handle(device_, stream_.get(), b + kMatrixBytes, kMatrixBytes);
    if (!handle.ok()) return handle.status();
    const BlasProduct product = {.m = kSide,
                                 .n = kSide,
                                 .k = kSide,
                                 .type = CUDA_R_16BF,
                                 .c_type = CUDA_R_16BF,
                                 .a = a,
                                 .lda = kSide,
                                 .b = a + kMatrixBytes,
                                 .ldb = kSide,
                                 .c = b,
                                 .ldc = kSide};
    absl::Status status;
    double measured = 0;
    absl::Status s = Measure(2.0 * kSide * kSide * kSide * kProducts, &measured, [&] {
      for (int i = 0; i < kProducts && status.ok(); ++i) status = handle->Run(product);
    });
    if (!status.ok()) return status;
    *rate = std::max(*rate, measured);
    return s;
  }

  static constexpr int kProducts = 8;  // one alone is over in 0.2 ms
  static constexpr size_t kHostBytes = size_t{16} << 20;
  int64_t bytes_ = 0;
  int device_ = 0;
  int multiprocessors_ = 0;
  std::unique_ptr<void, FreeDevice> a_, b_;
  std::unique_ptr<void, FreeHost> host_;
  std::unique_ptr<CUevent_st, DestroyEvent> begin_, end_;
  std::unique_ptr<CUstream_st, DestroyStream> stream_;
};

}  // namespace

absl::Status MeasureRoofline(const DeviceProperties& device, Roofline* roofline) {
  *roofline = {};
  Bench bench;
  absl::Status status = bench.Prepare(device);
  if (status.ok()) status = bench.All(roofline);
  if (!status.ok()) cudaGetLastError();
  return status;
}

}  // namespace attn::cuda
