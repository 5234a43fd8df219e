// Unary messages: the framing parser against protobuf's own. First byte: which message, and where
// the slices are cut.
#include <google/protobuf/stubs/logging.h>

#include "tests/fuzz/fuzz_support.h"
#include "tests/unit/wire_grpc_differential.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it logs every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attn::wire;  // NOLINT: a short function of its own
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto pieces = CutIntoPieces(bytes, attn::fuzz::Dice(data[0]));
  switch (data[0] % 4) {
    case 0:
      attn::fuzz::Require(CompareUnary<v1::ForwardRequest>(bytes, pieces));
      break;
    case 1:
      attn::fuzz::Require(CompareUnary<v1::BackwardRequest>(bytes, pieces));
      break;
    case 2:
      attn::fuzz::Require(CompareUnary<v1::ForwardResponse>(bytes, pieces));
      break;
    default:
      attn::fuzz::Require(CompareUnary<v1::BackwardResponse>(bytes, pieces));
  }
  return 0;
}
