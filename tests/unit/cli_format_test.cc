#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "client/cli/exit_code.h"
#include "client/cli/format.h"
#include "client/cli/progress.h"

namespace attn::cli {
namespace {

using ::testing::ElementsAre;

const Style kUnicode{.unicode = true, .color = false};
const Style kAscii{.unicode = false, .color = false};

TEST(FormatTest, BytesHaveThreeDigitsAndBinaryUnits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(64.0 * (1 << 20)), "64.0 MiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.00 MiB");  // not "1024 KiB"
  EXPECT_EQ(FormatBytes(0x1p64), "16.0 EiB");
}

TEST(FormatTest, TimesHaveUnits) {
  EXPECT_EQ(FormatNanos(0, kUnicode), "0 ns");
  EXPECT_EQ(FormatNanos(850, kUnicode), "850 ns");
  EXPECT_EQ(FormatNanos(12345, kUnicode), "12.3 µs");
  EXPECT_EQ(FormatNanos(12345, kAscii), "12.3 us");
  EXPECT_EQ(FormatNanos(4.1e6, kUnicode), "4.10 ms");
  EXPECT_EQ(FormatNanos(999.7e6, kUnicode), "1.00 s");
  EXPECT_EQ(FormatNanos(123456e9, kUnicode), "123,456 s");
}

TEST(FormatTest, Counts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(1048576), "1,048,576");
  EXPECT_EQ(FormatSi(2.1e9, "FLOP"), "2.10 GFLOP");
  EXPECT_EQ(FormatSi(12, "FLOP"), "12 FLOP");
  EXPECT_EQ(FormatPercent(0.636), "63.6%");
  EXPECT_EQ(FormatRatio(11.04), "11.0");
  EXPECT_EQ(FormatRatio(1204.2), "1,204");
}

TEST(FormatTest, BarsAreAsWideAsAskedFor) {
  for (const Style& style : {kUnicode, kAscii}) {
    for (const double fraction : {-1.0, 0.0, 1e-9, 0.3, 0.5, 0.999, 1.0, 7.0, std::nan("")}) {
      EXPECT_EQ(DisplayWidth(Bar(fraction, 20, style)), 20) << fraction;
    }
  }
  EXPECT_EQ(Bar(0.5, 4, kAscii), "##  ");
  EXPECT_EQ(Bar(1e-9, 4, kAscii), "#   ");
  EXPECT_EQ(Bar(1e-9, 2, kUnicode), "▏ ");
  EXPECT_EQ(Bar(0.5625, 2, kUnicode), "█▏");
}

TEST(FormatTest, WidthCountsCodePointsAndNoEscapes) {
  EXPECT_EQ(DisplayWidth("µs × 2"), 6);
  EXPECT_EQ(DisplayWidth(Style{.unicode = true, .color = true}.Green("ok")), 2);
  EXPECT_EQ(PadLeft("µ", 3), "  µ");
}

TEST(FormatTest, WrapsAtSpaces) {
  EXPECT_THAT(Wrap("aa bb cc", 5), ElementsAre("aa bb", "cc"));
  EXPECT_THAT(Wrap("aaaaaaaa b", 5), ElementsAre("aaaaaaaa", "b"));
  EXPECT_THAT(Wrap("", 5), ElementsAre(""));
}

TEST(FormatTest, TablesAlignColumnsAndWrapTheLast) {
  Table table(2);
  table.Add({"a", "long one", "x"});
  table.Add({"bbb", "c", std::string(30, 'y') + " " + std::string(40, 'z')});
  EXPECT_EQ(table.ToString(), "  a    long one  x\n  bbb  c         " + std::string(30, 'y') +
                                  "\n                 " + std::string(40, 'z') + "\n");
}

TEST(FormatTest, Durations) {
  EXPECT_EQ(ParseDuration("500ms")->count(), 500'000'000);
  EXPECT_EQ(ParseDuration("1.5s")->count(), 1'500'000'000);
  EXPECT_EQ(ParseDuration("2m")->count(), 120'000'000'000);
  EXPECT_EQ(ParseDuration("3")->count(), 3'000'000'000);
  for (const char* bad : {"", "s", "-1s", "0s", "25h", "1 s", "1x", "nan", "1e99", "1.2.3s"}) {
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
  }
}

TEST(FormatTest, StyleFollowsTheLocaleAndTheFlags) {
  setenv("LC_ALL", "C", 1);
  EXPECT_FALSE(DetectStyle(false, ColorMode::kNever).unicode);
  setenv("LC_ALL", "de_DE.utf8", 1);
  EXPECT_TRUE(DetectStyle(false, ColorMode::kNever).unicode);
  EXPECT_FALSE(DetectStyle(true, ColorMode::kNever).unicode);
  EXPECT_TRUE(DetectStyle(false, ColorMode::kAlways).color);
  unsetenv("LC_ALL");
}

TEST(ProgressTest, SaysDirectionShareAndRate) {
  EXPECT_EQ(ProgressLine(512 << 20, uint64_t{2} << 30, 0, 0, 2),
            "sending 512 MiB of 2.00 GiB   25.0%  256 MiB/s");
  EXPECT_EQ(ProgressLine(1 << 20, 1 << 20, 0, 0, 1),
            "sending 1.00 MiB of 1.00 MiB  100.0%  waiting for the result");
  EXPECT_EQ(ProgressLine(9, 9, 1 << 20, 0, 0), "receiving 1.00 MiB");
}

TEST(ExitCodeTest, FollowsTheStatus) {
  using Code = absl::StatusCode;
  const auto call = [](Code code) { return ExitCodeForCall(absl::Status(code, "x")); };
  EXPECT_EQ(ExitCodeForCall(absl::OkStatus()), 0);
  EXPECT_EQ(call(Code::kInternal), 1);
  EXPECT_EQ(call(Code::kUnknown), 1);
  EXPECT_EQ(call(Code::kUnavailable), 3);
  EXPECT_EQ(call(Code::kInvalidArgument), 5);
  EXPECT_EQ(call(Code::kFailedPrecondition), 5);
  EXPECT_EQ(call(Code::kUnimplemented), 5);
  EXPECT_EQ(call(Code::kResourceExhausted), 6);
  EXPECT_EQ(call(Code::kDeadlineExceeded), 7);
  EXPECT_EQ(call(Code::kCancelled), 7);
  EXPECT_EQ(ExitCodeForConnect(absl::NotFoundError("ca.pem")), 2);
  EXPECT_EQ(ExitCodeForConnect(absl::DeadlineExceededError("x")), 3);
  EXPECT_EQ(ExitCodeForLocal(absl::NotFoundError("q.npy")), 2);
  EXPECT_EQ(ExitCodeForLocal(absl::ResourceExhaustedError("memory")), 6);
}

}  // namespace
}  // namespace attn::cli
