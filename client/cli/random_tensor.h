// Made-up tensors: the same seed gives the same values, whatever the machine's core count.
#ifndef ATTN_CLIENT_CLI_RANDOM_TENSOR_H_
#define ATTN_CLIENT_CLI_RANDOM_TENSOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/lib/client.h"

namespace attn::cli {

// One stream of numbers per tensor, so that a tensor does not change when another one does.
enum class RandomStream : uint32_t { kQ, kK, kV, kDout, kDlse, kBias, kAlibi, kSinks, kBlockMask };

// Gaussian values (mean 0, deviation 1; Philox4x32-10 counted by element, Box-Muller), rounded to
// dtype. UINT8: 0 or 1, evenly. Errors: INVALID_ARGUMENT where an extent is negative or the tensor
// is over 2^62 bytes.
absl::StatusOr<client::HostTensor> RandomTensor(client::v1::DType dtype, std::vector<int64_t> shape,
                                                uint64_t seed, RandomStream stream);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_RANDOM_TENSOR_H_
