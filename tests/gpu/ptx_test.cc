// Wrappers of instructions that no kernel exercises yet. Skipped where there is no device of
// compute capability 9.0.
#ifdef ATTN_HAVE_SM90

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/sm90/tensor_map.h"
#include "tests/gpu/ptx_kernels.h"

namespace attn::cuda {
namespace {

class PtxGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    const std::vector<DeviceProperties> devices = FindDevices(&why);
    if (devices.empty()) GTEST_SKIP() << "no CUDA device: " << why;
    const int capability = devices.front().capability();
    if (capability < 90) GTEST_SKIP() << "compute capability " << capability << ", not 90";
  }
  void TearDown() override { cudaFree(memory_); }

  // Device memory that holds `values`, until the test ends.
  template <class T>
  T* Upload(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    EXPECT_EQ(cudaMalloc(&memory_, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory_, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return static_cast<T*>(memory_);
  }
  template <class T>
  std::vector<T> Download(size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(cudaMemcpy(values.data(), memory_, count * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  void* memory_ = nullptr;
};

TEST_F(PtxGpuTest, BulkReductionAddsEveryBlocksShare) {
  constexpr int kBlocks = 300, kGuard = 64;
  float* const to = Upload(std::vector<float>(kReduceElements + kGuard, 0.5f));
  ASSERT_EQ(LaunchReduceAddFp32(to, kBlocks), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> sums = Download<float>(kReduceElements + kGuard);
  for (int i = 0; i < kReduceElements + kGuard; ++i) {
    const int added = i < kReduceElements ? kBlocks * (kBlocks + 1) / 2 * (i % 7) : 0;
    ASSERT_EQ(sums[i], 0.5f + static_cast<float>(added)) << i;  // exact in fp32
  }
}

TEST_F(PtxGpuTest, TensorReductionAddsABoxAndNothingOutsideTheTensor) {
  // Tokens end within the box, and so do the 72 elements of a head.
  constexpr int64_t kBatch = 2, kTokens = 20, kHeads = 3, kDim = 72;
  constexpr int kBlocks = 5, kC0 = 64, kHead = 1, kToken = 8, kLast = 1;
  constexpr uint16_t kOne = 0x3F80;  // BF16
  uint16_t* const to = Upload(std::vector<uint16_t>(kBatch * kTokens * kHeads * kDim, kOne));
  CUtensorMap map;
  const absl::Status status = sm90::EncodeTensorMap(
      {.element_bytes = 2,
       .batch = kBatch,
       .tokens = kTokens,
       .heads = kHeads,
       .dim = kDim,
       .strides = {.batch = kTokens * kHeads * kDim, .token = kHeads * kDim, .head = kDim}},
      to, DType::kBf16, {.heads = 1, .tokens = kReduceRows}, &map);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(LaunchReduceAddBox(map, kC0, kHead, kToken, kLast, kBlocks), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> sums = Download<uint16_t>(kBatch * kTokens * kHeads * kDim);
  size_t at = 0;
  for (int b = 0; b < kBatch; ++b) {
    for (int token = 0; token < kTokens; ++token) {
      for (int head = 0; head < kHeads; ++head) {
        for (int d = 0; d < kDim; ++d, ++at) {
          const bool in_box = b == kLast && head == kHead && token >= kToken && d >= kC0;
          const float want = in_box ? 1.0f + kBlocks * (1 + token - kToken) : 1.0f;
          const uint32_t bits = uint32_t{sums[at]} << 16;
          ASSERT_EQ(__builtin_bit_cast(float, bits), want)  // exact in BF16
              << "batch " << b << " token " << token << " head " << head << " element " << d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attn::cuda

#endif  // ATTN_HAVE_SM90
