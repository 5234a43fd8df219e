// safetensors files: whatever the bytes, every view lies within them, no two overlap, and what was
// read can be written and read again.
#include <algorithm>

#include "client/cli/safetensors.h"
#include "client/cli/tensor_file.h"
#include "tests/fuzz/fuzz_support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using attn::fuzz::Require;
  using namespace attn::cli;  // NOLINT: a short function of its own
  const auto bytes = std::as_bytes(std::span(data, size));
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensors(bytes);
  if (!entries.ok()) {
    Require(absl::IsInvalidArgument(entries.status()) ? "" : entries.status().ToString());
    return 0;
  }
  const std::byte* end = bytes.data();
  bool writable = true;
  for (const SafetensorsEntry& entry : *entries) {
    Require(entry.data.empty() || entry.data.data() >= end ? "" : "tensors overlap");
    if (!entry.data.empty()) end = entry.data.data() + entry.data.size();
    Require(end <= bytes.data() + size ? "" : "data outside the file");
    writable &= entry.dtype != FileDType::kOther;
    if (entry.dtype == FileDType::kOther) continue;
    const auto expected = CheckedByteSize(entry.shape, SizeOf(entry.dtype));
    Require(expected.ok() && entry.data.size() == static_cast<size_t>(*expected) ? "" : "size");
  }
  if (!writable) return 0;
  std::string again = SafetensorsPrefix(&*entries, {{"format", "pt"}});
  for (const SafetensorsEntry& entry : *entries) {
    again.append(reinterpret_cast<const char*>(entry.data.data()), entry.data.size());
  }
  const auto reread = ParseSafetensors(std::as_bytes(std::span<const char>(again)));
  Require(reread.ok() ? "" : reread.status().ToString());
  Require(reread->size() == entries->size() ? "" : "number of tensors changed");
  for (const SafetensorsEntry& entry : *entries) {
    const auto same = std::find_if(reread->begin(), reread->end(), [&](const auto& other) {
      return other.name == entry.name && other.shape == entry.shape && other.dtype == entry.dtype;
    });
    Require(same != reread->end() ? "" : "a tensor was lost: " + entry.name);
    Require(std::equal(same->data.begin(), same->data.end(), entry.data.begin(), entry.data.end())
                ? ""
                : "bytes changed");
  }
  return 0;
}
