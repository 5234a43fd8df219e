#include <gtest/gtest.h>

#include <chrono>

#include "kernels/api/backend.h"

namespace attn {
namespace {

using std::chrono::steady_clock;

TEST(CancelTokenTest, OkUntilCancelled) {
  CancelToken token;
  EXPECT_TRUE(token.Check().ok());
  EXPECT_FALSE(token.expired());
  token.Cancel();
  EXPECT_EQ(token.Check().code(), absl::StatusCode::kCancelled);
}

TEST(CancelTokenTest, DeadlineInThePast) {
  CancelToken token(steady_clock::now() - std::chrono::milliseconds(1));
  EXPECT_EQ(token.Check().code(), absl::StatusCode::kDeadlineExceeded);
  token.Cancel();  // a caller that has gone is told so, whatever the clock says
  EXPECT_EQ(token.Check().code(), absl::StatusCode::kCancelled);
}

TEST(CancelTokenTest, DeadlineInTheFuture) {
  CancelToken token(steady_clock::now() + std::chrono::hours(1));
  EXPECT_TRUE(token.Check().ok());
}

}  // namespace
}  // namespace attn
