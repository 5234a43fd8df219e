// Merging partial results as attn's tensors have them.
#ifndef ATTN_CLIENT_CLI_MERGE_RESULTS_H_
#define ATTN_CLIENT_CLI_MERGE_RESULTS_H_

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/tensor_io.h"
#include "client/lib/client.h"

namespace attn::cli {

// One partial result. out: [batch, seqlen, heads, dim] with lse [batch, heads, seqlen], or (THD)
// out [total, heads, dim] with lse [heads, total].
struct Partial {
  FileTensor out;  // F32; F16, BF16 or F64 are widened or rounded to it
  FileTensor lse;  // F32, or F64 rounded to it
};

struct Merged {
  client::HostTensor out, lse;  // FP32, shaped like the parts
};

// Errors: INVALID_ARGUMENT: no parts; shapes that do not belong together or differ between parts;
// an lse that is NaN or +inf. Messages name the file.
absl::StatusOr<Merged> MergeResults(std::span<const Partial> parts);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_MERGE_RESULTS_H_
