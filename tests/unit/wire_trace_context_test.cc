#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>

#include "proto/wire/trace_context.h"

namespace attn::wire {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kSpan[] = "00f067aa0ba902b7";

std::string Header(const std::string& version, const std::string& trace, const std::string& span,
                   const std::string& flags) {
  return version + "-" + trace + "-" + span + "-" + flags;
}

TEST(TraceContextTest, ReadsWhatTheSpecificationShows) {
  const auto context = TraceContext::Parse(Header("00", kTrace, kSpan, "01"));
  ASSERT_TRUE(context);
  EXPECT_EQ(context->trace_id(), kTrace);
  EXPECT_EQ(context->span_id(), kSpan);
  EXPECT_TRUE(context->sampled());
  EXPECT_EQ(context->ToString(), Header("00", kTrace, kSpan, "01"));
  EXPECT_FALSE(TraceContext::Parse(Header("00", kTrace, kSpan, "00"))->sampled());
  EXPECT_TRUE(TraceContext::Parse(" \t" + Header("00", kTrace, kSpan, "01") + " "));
}

TEST(TraceContextTest, OnlyKnownFlagsGoOn) {
  const auto context = TraceContext::Parse(Header("00", kTrace, kSpan, "ff"));
  ASSERT_TRUE(context);
  EXPECT_EQ(context->ToString(), Header("00", kTrace, kSpan, "03"));
}

TEST(TraceContextTest, LaterVersionsAreReadAsTheFirst) {
  for (const std::string& rest : {std::string(), std::string("-"), std::string("-what-comes")}) {
    const auto context = TraceContext::Parse(Header("cc", kTrace, kSpan, "01") + rest);
    ASSERT_TRUE(context) << rest;
    EXPECT_EQ(context->ToString(), Header("00", kTrace, kSpan, "01"));
  }
  EXPECT_FALSE(TraceContext::Parse(Header("cc", kTrace, kSpan, "01") + ".what"));
  EXPECT_FALSE(TraceContext::Parse(Header("cc", kTrace, kSpan, "01") + "0"));
}

TEST(TraceContextTest, MalformedIsIgnored) {
  const std::string zeros(32, '0');
  const std::string valid = Header("00", kTrace, kSpan, "01");
  const std::string malformed[] = {
      "",
      " ",
      "00",
      valid.substr(1),
      valid.substr(0, valid.size() - 1),
      valid + "-",                                   // version 00 ends here
      valid + "-00",                                 //
      Header("ff", kTrace, kSpan, "01"),             // never a version
      Header("0G", kTrace, kSpan, "01"),             //
      Header("0", kTrace, kSpan, "01") + "1",        //
      Header("00", zeros, kSpan, "01"),              //
      Header("00", kTrace, zeros.substr(16), "01"),  //
      Header("00", "4BF92F3577B34DA6A3CE929D0E0E4736", kSpan, "01"),
      Header("00", kTrace, "00F067AA0BA902B7", "01"),  //
      Header("00", kTrace, kSpan, "0A"),               //
      Header("00", kTrace, kSpan, "0x"),               //
      Header("00", std::string(kTrace).substr(1), std::string(kSpan) + "0", "01"),
      Header("00", std::string(31, '1') + "\n", kSpan, "01"),
      valid.substr(0, 35) + "." + valid.substr(36),
      valid.substr(0, 52) + "_" + valid.substr(53),
      valid.substr(0, 20) + std::string(1, '\0') + valid.substr(21),
  };
  for (const std::string& value : malformed) EXPECT_FALSE(TraceContext::Parse(value)) << value;
}

TEST(TraceContextTest, ChildrenStayInTheTraceAndDiffer) {
  const auto parent = TraceContext::Parse(Header("00", kTrace, kSpan, "01"));
  std::set<std::string> ids = {kSpan};
  const auto add = [&] {
    for (int i = 0; i < 1000; ++i) {
      const TraceContext child = parent->Child();
      EXPECT_EQ(child.trace_id(), kTrace);
      EXPECT_TRUE(child.sampled());
      EXPECT_TRUE(TraceContext::Parse(child.ToString())) << child.ToString();
      ids.insert(child.span_id());
    }
  };
  add();
  std::thread(add).join();
  EXPECT_EQ(ids.size(), 2001u);
}

}  // namespace
}  // namespace attn::wire
