#include <gtest/gtest.h>

#include <string>

#include "server/rpc/call_plan.h"
#include "server/rpc/service_context.h"

namespace attn::server {
namespace {

std::shared_ptr<const CallPlan> PlanOf(int64_t sequences) {
  auto plan = std::make_shared<CallPlan>();
  plan->problem.sequences.resize(static_cast<size_t>(sequences));
  return plan;
}

TEST(CallPlanCacheTest, GivesBackThePlanOfTheSameBytesAndPass) {
  CallPlanCache cache;
  EXPECT_EQ(cache.Find(Pass::kForward, "a"), nullptr);
  const auto a = PlanOf(1), b = PlanOf(1);
  cache.Add(Pass::kForward, "a", a);
  cache.Add(Pass::kBackward, "a", b);
  EXPECT_EQ(cache.Find(Pass::kForward, "a"), a);
  EXPECT_EQ(cache.Find(Pass::kBackward, "a"), b);
  EXPECT_EQ(cache.Find(Pass::kForward, "ab"), nullptr);
  EXPECT_EQ(cache.Find(Pass::kForward, ""), nullptr);
}

TEST(CallPlanCacheTest, IsBoundedAndKeepsWhatIsUsed) {
  CallPlanCache cache;
  const auto used = PlanOf(1);
  cache.Add(Pass::kForward, "used", used);
  for (int i = 0; i < 1000; ++i) {
    cache.Add(Pass::kForward, std::to_string(i), PlanOf(1));
    EXPECT_EQ(cache.Find(Pass::kForward, "used"), used);
    EXPECT_LE(cache.size(), 2 * CallPlanCache::kGeneration);
  }
  EXPECT_EQ(cache.Find(Pass::kForward, "0"), nullptr);
  EXPECT_NE(cache.Find(Pass::kForward, "999"), nullptr);
}

TEST(CallPlanCacheTest, KeepsNoLargePlans) {
  CallPlanCache cache;
  const std::string header(CallPlanCache::kMaxHeaderBytes + 1, 'h');
  cache.Add(Pass::kForward, header, PlanOf(1));
  cache.Add(Pass::kForward, "many", PlanOf(CallPlanCache::kMaxSequences + 1));
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.Find(Pass::kForward, header), nullptr);
}

}  // namespace
}  // namespace attn::server
