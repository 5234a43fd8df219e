// Stream messages: the framing parser against protobuf's own. First byte: which message, and where
// the slices are cut.
#include "tests/fuzz/fuzz_wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attn::wire;  // NOLINT: a short function of its own
  return attn::fuzz::CompareChosen<v1::ForwardStreamRequest, v1::BackwardStreamRequest,
                                   v1::ForwardStreamResponse, v1::BackwardStreamResponse>(
      data, size, []<class Message>(const Message&, const std::string& bytes, const auto& pieces) {
        return CompareStream<Message>(bytes, pieces);
      });
}
