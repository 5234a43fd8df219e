#include "client/cli/merge_results.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/text.h"
#include "kernels/api/merge.h"

namespace attn::cli {
namespace {

using client::HostTensor;
namespace v1 = client::v1;

// out has one row of `dim` per (batch, token, head); lse runs (batch, head, token).
struct Extents {
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t rows() const { return batch * tokens * heads; }
};

absl::StatusOr<Extents> CheckShapes(const Partial& part) {
  const std::vector<int64_t>& out = part.out.shape;
  const std::vector<int64_t>& lse = part.lse.shape;
  Extents extents;
  std::vector<int64_t> expected;
  if (out.size() == 4) {
    extents = {out[0], out[1], out[2], out[3]};
    expected = {out[0], out[2], out[1]};
  } else if (out.size() == 3) {
    extents = {1, out[0], out[1], out[2]};
    expected = {out[1], out[0]};
  } else {
    return absl::InvalidArgumentError(
        Cat(part.out.source, ": out has shape ", ShapeString(out),
            "; it must be [batch, seqlen, heads, dim] or [total, heads, dim]"));
  }
  if (lse != expected) {
    return absl::InvalidArgumentError(Cat(part.lse.source, ": lse has shape ", ShapeString(lse),
                                          "; to out ", ShapeString(out), " belongs ",
                                          ShapeString(expected)));
  }
  return extents;
}

absl::StatusOr<HostTensor> AsFp32(const FileTensor& tensor, std::string_view name) {
  absl::StatusOr<HostTensor> host = ToHostTensor(tensor, name, v1::DTYPE_FP32);
  if (!host.ok()) return host.status();
  if (reinterpret_cast<uintptr_t>(host->bytes.data()) % alignof(float) == 0) return host;
  // A file may hold tensors at any offset.
  HostTensor aligned = HostTensor::Allocate(v1::DTYPE_FP32, tensor.shape);
  std::memcpy(aligned.mutable_bytes().data(), host->bytes.data(), host->bytes.size());
  return aligned;
}

const float* Floats(const HostTensor& tensor) {
  return reinterpret_cast<const float*>(tensor.bytes.data());
}

}  // namespace

absl::StatusOr<Merged> MergeResults(std::span<const Partial> parts) {
  if (parts.empty()) return absl::InvalidArgumentError("there are no parts to merge");
  absl::StatusOr<Extents> extents = CheckShapes(parts.front());
  if (!extents.ok()) return extents.status();
  std::vector<HostTensor> outs;
  std::vector<std::vector<float>> lses;  // in the row order of out
  std::vector<PartialResult> partials;
  for (const Partial& part : parts) {
    if (part.out.shape != parts.front().out.shape) {
      return absl::InvalidArgumentError(
          Cat(part.out.source, ": out has shape ", ShapeString(part.out.shape), ", but that of ",
              parts.front().out.source, " has ", ShapeString(parts.front().out.shape)));
    }
    if (absl::StatusOr<Extents> same = CheckShapes(part); !same.ok()) return same.status();
    absl::StatusOr<HostTensor> out = AsFp32(part.out, "out");
    if (!out.ok()) return out.status();
    absl::StatusOr<HostTensor> lse = AsFp32(part.lse, "lse");
    if (!lse.ok()) return lse.status();
    std::vector<float> by_row(extents->rows());
    int64_t from = 0;
    for (int64_t b = 0; b < extents->batch; ++b) {
      for (int64_t h = 0; h < extents->heads; ++h) {
        for (int64_t t = 0; t < extents->tokens; ++t, ++from) {
          by_row[(b * extents->tokens + t) * extents->heads + h] = Floats(*lse)[from];
        }
      }
    }
    outs.push_back(*std::move(out));
    lses.push_back(std::move(by_row));
    partials.push_back({Floats(outs.back()), lses.back().data()});
  }
  Merged merged{HostTensor::Allocate(v1::DTYPE_FP32, parts.front().out.shape),
                HostTensor::Allocate(v1::DTYPE_FP32, parts.front().lse.shape)};
  std::vector<float> by_row(extents->rows());
  absl::Status status =
      MergePartials(partials, extents->rows(), extents->dim,
                    reinterpret_cast<float*>(merged.out.mutable_bytes().data()), by_row.data());
  if (!status.ok()) return status;
  float* lse = reinterpret_cast<float*>(merged.lse.mutable_bytes().data());
  for (int64_t b = 0; b < extents->batch; ++b) {
    for (int64_t h = 0; h < extents->heads; ++h) {
      for (int64_t t = 0; t < extents->tokens; ++t) {
        *lse++ = by_row[(b * extents->tokens + t) * extents->heads + h];
      }
    }
  }
  return merged;
}

}  // namespace attn::cli
