#include "client/cli/progress.h"

#include <cstdio>

#include "client/cli/text.h"

namespace attn::cli {

std::string ProgressLine(uint64_t sent, uint64_t sent_total, uint64_t received,
                         uint64_t received_total, double seconds) {
  const bool receiving = received > 0;
  const double bytes = static_cast<double>(receiving ? received : sent);
  const double total = static_cast<double>(receiving ? received_total : sent_total);
  std::string text = Cat(receiving ? "receiving " : "sending ", FormatBytes(bytes));
  if (total > 0) {
    text += Cat(" of ", FormatBytes(total), "  ", PadLeft(FormatPercent(bytes / total), 6));
  }
  if (!receiving && sent_total > 0 && sent >= sent_total) return text + "  waiting for the result";
  if (seconds > 0) text += Cat("  ", FormatBytes(bytes / seconds), "/s");
  return text;
}

bool StatusLine::due() const {
  return shown_ && (in_place_ || Clock::now() - last_line_ >= std::chrono::seconds(1));
}

void StatusLine::Show(const std::string& line) {
  if (!due()) return;
  last_line_ = Clock::now();
  if (in_place_) {
    std::fprintf(stderr, "\r%s", PadRight(line, width_).c_str());
    width_ = DisplayWidth(line);
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void StatusLine::Clear() {
  if (shown_ && in_place_ && width_ > 0) {
    std::fprintf(stderr, "\r%s\r", std::string(width_, ' ').c_str());
    std::fflush(stderr);
    width_ = 0;
  }
}

void ProgressMeter::Update(uint64_t sent, uint64_t sent_total, uint64_t received,
                           uint64_t received_total) {
  if (!line_.shown()) return;
  const Clock::time_point now = Clock::now();
  if ((received > 0) != receiving_) {
    receiving_ = received > 0;
    start_ = now;
  }
  if (!line_.due()) return;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  line_.Show(ProgressLine(sent, sent_total, received, received_total, seconds));
}

}  // namespace attn::cli
