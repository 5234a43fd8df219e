// .npy files: whatever the bytes, a view lies within them, and what was read can be written and
// read again.
#include "client/cli/npy.h"
#include "client/cli/tensor_file.h"
#include "tests/fuzz/fuzz_support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using attn::fuzz::Require;
  using namespace attn::cli;  // NOLINT: a short function of its own
  const auto bytes = std::as_bytes(std::span(data, size));
  const absl::StatusOr<NpyView> view = ParseNpy(bytes);
  if (!view.ok()) {
    Require(absl::IsInvalidArgument(view.status()) ? "" : view.status().ToString());
    return 0;
  }
  const auto expected = CheckedByteSize(view->shape, SizeOf(view->dtype));
  Require(expected.ok() ? "" : "accepted shape has no size");
  Require(view->data.size() == static_cast<size_t>(*expected) ? "" : "data size");
  Require(view->data.empty() || (view->data.data() >= bytes.data() &&
                                 view->data.data() + view->data.size() <= bytes.data() + size)
              ? ""
              : "data outside the file");
  if (view->dtype == FileDType::kOther) return 0;
  std::string again = NpyPrefix(view->dtype, view->shape);
  Require(again.size() % 64 == 0 ? "" : "written data are not aligned");
  again.append(reinterpret_cast<const char*>(view->data.data()), view->data.size());
  const auto reread = ParseNpy(std::as_bytes(std::span<const char>(again)));
  Require(reread.ok() ? "" : reread.status().ToString());
  Require(reread->shape == view->shape ? "" : "shape changed");
  Require(SizeOf(reread->dtype) == SizeOf(view->dtype) ? "" : "dtype changed");
  return 0;
}
