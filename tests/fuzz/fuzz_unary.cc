// Unary messages: the framing parser against protobuf's own. First byte: which message, and where
// the slices are cut.
#include "tests/fuzz/fuzz_wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attn::wire;  // NOLINT: a short function of its own
  return attn::fuzz::CompareChosen<v1::ForwardRequest, v1::BackwardRequest, v1::ForwardResponse,
                                   v1::BackwardResponse>(
      data, size, []<class Message>(const Message&, const std::string& bytes, const auto& pieces) {
        return CompareUnary<Message>(bytes, pieces);
      });
}
