// A thread's on-chip buffers: tiles that stay in cache while a worker computes.
#ifndef ATTN_KERNELS_CPU_SCRATCH_H_
#define ATTN_KERNELS_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace attn {

// Hands out consecutive float buffers, 64-byte aligned, from one block that the thread keeps and
// only ever grows. Contents are uninitialised. One user at a time per thread.
class Scratch {
 public:
  // The calling thread's block with room for `floats` (each buffer rounded up to 16).
  explicit Scratch(int64_t floats) {
    Block& block = ThreadBlock();
    if (block.floats < floats) {
      block.data.reset();
      block.data.reset(static_cast<float*>(
          ::operator new (static_cast<size_t>(floats) * sizeof(float), std::align_val_t{64})));
      block.floats = floats;
    }
    next_ = block.data.get();
  }
  static constexpr int64_t Rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

  float* Take(int64_t floats) {
    float* taken = next_;
    next_ += Rounded(floats);
    return taken;
  }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  struct Block {
    std::unique_ptr<float, Free> data;
    int64_t floats = 0;
  };
  static Block& ThreadBlock() {
    static thread_local Block block;
    return block;
  }

  float* next_;
};

}  // namespace attn

#endif  // ATTN_KERNELS_CPU_SCRATCH_H_
