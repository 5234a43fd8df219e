// A C interface over the CUDA paths on tensors that already lie on the device, so that a Python
// program times them in one process with other libraries, on the same tensors. For tests and
// benchmarks; not installed.
#ifndef ATTN_TESTS_GPU_DEVICE_API_H_
#define ATTN_TESTS_GPU_DEVICE_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// An attention call on contiguous tensors. Element types: 0 FP32, 1 FP16, 2 BF16.
struct AttnDeviceCall {
  const char* path;  // "flash_sm90", "flash_sm80", "standard_cuda"
  int32_t backward;  // 0: forward
  int32_t packed;    // 0: BSHD. 1: THD with cu_seqlens
  int32_t dtype;
  int32_t out_dtype;  // -1: the default
  int32_t causal;
  int32_t top_left;  // 0: bottom-right alignment
  int32_t deterministic;
  float softcap;    // 0: none
  float dropout_p;  // 0: none
  uint32_t dropout_offset;
  uint64_t dropout_seed;
  int64_t batch;               // THD: sequences
  int64_t seqlen_q, seqlen_k;  // THD: total tokens
  int64_t num_heads, num_kv_heads;
  int64_t head_dim, head_dim_v;
  double softmax_scale;               // 0: the default
  int64_t window_left, window_right;  // -1: unset
  const int64_t* cu_seqlens_q;        // THD: batch + 1 entries in host memory
  const int64_t* cu_seqlens_k;
  const uint8_t* block_mask;  // host memory, for planning; null: none
  int64_t mask_batch, mask_heads;
  int64_t block_q, block_k;
};

// What the library says about a call before it runs.
struct AttnDevicePlan {
  char kernel_id[128];
  int64_t workspace_bytes;
  uint64_t tile_loaded_bytes, tile_stored_bytes;
  uint64_t compulsory_bytes;
  uint64_t standard_bytes;  // of the standard algorithm, scores in the element type
  uint64_t flops;
  int64_t tile_q, tile_k;
};

// Device memory, aligned to 16 bytes; null where the call has no such tensor. Forward writes out
// and lse; backward reads them.
struct AttnDeviceTensors {
  const void *q, *k, *v;
  void* out;
  float* lse;
  const void* dout;
  void *dq, *dk, *dv;
  const uint8_t* block_mask;
};

struct AttnDeviceRoofline {  // per second; 0: not measured
  double copy_bytes, read_bytes, matrix_flops, upload_bytes, download_bytes;
};

// Every function that can fail writes a text of at most `error_bytes` with its final 0 to `error`.

// Checks the call as the server does and plans it for the current device. Null: the error says
// why, with every reason for which the path declines the call. The handle is for that device.
void* AttnDevicePrepare(const struct AttnDeviceCall* call, char* error, int64_t error_bytes);
void AttnDeviceDescribe(const void* handle, struct AttnDevicePlan* plan);
// Enqueues the call on a stream (a cudaStream_t). `workspace`: plan.workspace_bytes of device
// memory, aligned to 256 bytes. Runs of one handle, replays of captured ones too, must follow each
// other on the device: they share counters. 0: enqueued.
int AttnDeviceRun(const void* handle, const struct AttnDeviceTensors* tensors, void* workspace,
                  void* stream, char* error, int64_t error_bytes);
void AttnDeviceDestroy(void* handle);

// Measures the current device; nothing else should run on it. 0: measured.
int AttnDeviceMeasureRoofline(struct AttnDeviceRoofline* roofline, char* error,
                              int64_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif  // ATTN_TESTS_GPU_DEVICE_API_H_
