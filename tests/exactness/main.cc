#include <gtest/gtest.h>

#include "tests/exactness/check.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  attn::exactness::PrintRatiosAtEnd();
  return RUN_ALL_TESTS();
}
