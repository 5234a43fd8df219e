#include <gtest/gtest.h>

#include <cstdio>

#include "tests/exactness/check.h"
#include "tests/exactness/paths.h"

int main(int argc, char** argv) {
  if (attn::exactness::Paths().empty()) {
    std::printf("skipped: this host has no device for the paths of this program\n");
    return 77;  // CTest's SKIP_RETURN_CODE
  }
  ::testing::InitGoogleTest(&argc, argv);
  attn::exactness::PrintRatiosAtEnd();
  return RUN_ALL_TESTS();
}
