// What the fuzzers of the wire share.
#ifndef ATTN_TESTS_FUZZ_FUZZ_WIRE_H_
#define ATTN_TESTS_FUZZ_FUZZ_WIRE_H_

#include <google/protobuf/stubs/logging.h>

#include <string>

#include "tests/fuzz/fuzz_support.h"
#include "tests/unit/wire_grpc_differential.h"

// Defined here: each fuzzer is one file.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it logs every string that is not UTF-8
  return 0;
}

namespace attn::fuzz {

// compare(message, bytes, pieces) with the one of the four types that the first byte of the input
// chooses, and the rest cut as it says. Ends the run where compare() finds a difference.
template <class A, class B, class C, class D, class Compare>
int CompareChosen(const uint8_t* data, size_t size, const Compare& compare) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto pieces = wire::CutIntoPieces(bytes, Dice(data[0]));
  switch (data[0] % 4) {
    case 0:
      Require(compare(A(), bytes, pieces));
      break;
    case 1:
      Require(compare(B(), bytes, pieces));
      break;
    case 2:
      Require(compare(C(), bytes, pieces));
      break;
    default:
      Require(compare(D(), bytes, pieces));
  }
  return 0;
}

}  // namespace attn::fuzz

#endif  // ATTN_TESTS_FUZZ_FUZZ_WIRE_H_
