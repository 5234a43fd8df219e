#include "client/cli/plan_view.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/cli/report_view.h"
#include "client/cli/scores_picture.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

// Everything that the sections of the page draw from.
struct Page {
  const Problem& problem;
  v1::Pass pass;
  const v1::PlanResponse& plan;
  const v1::GetServerInfoResponse& info;
  const Style& style;
  Extent extent;

  bool flash() const { return plan.path_class() == v1::PATH_CLASS_FLASH; }
  bool chosen() const { return !plan.path().empty(); }
};

std::string TrimmedLine(std::string line) {
  line.resize(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string Bytes(uint64_t bytes) { return FormatBytes(static_cast<double>(bytes)); }

std::string Head(const Page& page) {
  const Style& style = page.style;
  std::string text;
  for (const std::string& line :
       Wrap(Cat(page.pass == v1::PASS_BACKWARD ? "backward: " : "forward: ",
                Summary(page.problem, style)),
            kPageWidth)) {
    text += style.Bold(line) + "\n";
  }
  text += Rule(style) + "\n";
  if (page.chosen()) {
    text += Cat(PadRight("path", 12),
                page.flash() ? style.Green(page.plan.path()) : style.Yellow(page.plan.path()),
                "  (", ClassName(page.plan.path_class()), ", ", DeviceName(page.plan.device_kind()),
                ")\n", PadRight("kernel", 12), page.plan.kernel(), "\n", PadRight("workspace", 12),
                Bytes(page.plan.workspace_bytes()), "\n");
  } else {
    text += Cat(PadRight("path", 12), style.Red("none"), ": the policy cannot be met, the call ",
                "would be refused\n");
  }
  Table rejected(0);
  AddRejections(PadRight("not taken", 10), page.plan.rejections(), style, &rejected);
  if (rejected.empty())
    return text + PadRight("not taken", 12) + "none: this is the fastest path\n";
  return text + rejected.ToString();
}

// What stands beside the picture.
std::vector<std::string> Legend(const Page& page, int width) {
  const Style& style = page.style;
  const ScoreGlyphs glyphs(style);
  std::vector<std::string> lines;
  const auto add = [&](const std::string& mark, const std::string& text) {
    const int indent = mark.empty() ? 0 : 2;
    bool first = true;
    for (const std::string& line : Wrap(text, width - indent)) {
      lines.push_back(Cat(indent == 0                   ? ""
                          : std::exchange(first, false) ? mark + " "
                                                        : "  ",
                          line));
    }
  };
  add("", Cat(FormatCount(page.plan.score_entries_per_head()), " scores, ",
              FormatBytes(4.0 * static_cast<double>(page.plan.score_entries_per_head())),
              " per head in fp32"));
  if (page.flash() && page.plan.tile_q() > 0) {
    add(style.Cyan(glyphs.tile),
        Cat("the tile on chip: ", page.plan.tile_q(), " ", style.Times(), " ", page.plan.tile_k(),
            ", with its q, k, v and out ", FormatCount(page.plan.on_chip_elements()), " elements"));
    add(glyphs.done, "done and forgotten; each row keeps its maximum and sum");
    add(glyphs.full, "visible, computed in turn, never stored");
  } else if (page.chosen()) {
    add(glyphs.full, "visible; every score is written to memory and read back");
  } else {
    add(glyphs.full, "visible");
  }
  add(glyphs.part, "partly visible");
  const double entries = static_cast<double>(page.plan.score_entries_per_head());
  const Visibility visibility(page.problem, page.extent);
  bool hides = visibility.has_block_mask();
  for (const int64_t row : {int64_t{0}, page.extent.queries - 1}) {
    if (entries == 0) break;
    const Visibility::Range keys = visibility.Keys(row);
    hides = hides || keys.begin > 0 || keys.end < page.extent.keys;
  }
  if (hides) add("", "blank: hidden, so skipped tile by tile");
  return lines;
}

std::string Matrix(const Page& page) {
  const Style& style = page.style;
  const bool tiled = page.flash();
  const std::vector<std::string> picture =
      DrawScores(Visibility(page.problem, page.extent), page.extent,
                 tiled ? static_cast<int64_t>(page.plan.tile_q()) : 0,
                 tiled ? static_cast<int64_t>(page.plan.tile_k()) : 0, style);
  const int picture_width = DisplayWidth(picture.front());
  const std::string rows_label = FormatCount(static_cast<uint64_t>(page.extent.queries));
  const int left = std::max(8, DisplayWidth(rows_label) + 1);
  const std::vector<std::string> legend =
      Legend(page, std::min(36, kPageWidth - left - picture_width - 2));
  std::string text = style.Bold(Cat("scores of one head, queries ", style.Times(), " keys")) + "\n";
  text += Cat(std::string(left + 1, ' '), FormatCount(static_cast<uint64_t>(page.extent.keys)),
              " keys ", style.Arrow(), "\n");
  for (size_t i = 0; i < std::max(picture.size(), legend.size()); ++i) {
    std::string label;
    if (i == 1) label = rows_label;
    if (i == 2) label = "queries";
    text += TrimmedLine(Cat(PadRight(label, left),
                            PadRight(i < picture.size() ? picture[i] : "", picture_width), "  ",
                            i < legend.size() ? legend[i] : ""));
  }
  return text;
}

// Boxes that widen downwards: small and fast memory above, large and slow below.
std::string Levels(const Page& page) {
  const Style& style = page.style;
  const v1::Traffic& traffic = page.plan.traffic();
  struct Level {
    std::string name;
    std::string first, second;
  };
  const bool cuda = page.plan.device_kind() == v1::DEVICE_KIND_CUDA;
  const std::vector<Level> levels = {
      {cuda ? "on chip" : "cache", Cat(Bytes(traffic.tile_bytes()), " asked for, tile by tile"),
       Cat(FormatCount(page.plan.on_chip_elements()), " elements fit at a time")},
      {cuda ? "memory (HBM)" : "memory (DRAM)",
       Cat(Bytes(traffic.compulsory_bytes()), " at least:"),
       "every input read once, every output written once"},
      {"the wire",
       Cat(Bytes(traffic.wire_request_bytes()), " in, ", Bytes(traffic.wire_response_bytes()),
           " out"),
       "over the network, once per call"}};
  const std::string_view h = style.unicode ? "─" : "-";
  const std::string_view v = style.unicode ? "│" : "|";
  const auto glyph = [&](std::string_view unicode) {
    return std::string(style.unicode ? unicode : std::string_view("+"));
  };
  const auto line = [&](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += h;
    return text;
  };
  constexpr int kWidths[] = {11, 17, 23};  // inner widths
  constexpr int kTextAt = 29;
  std::string text = style.Bold("memory levels, fastest first") + "\n";
  text += Cat("        ", glyph("┌"), line(kWidths[0]), glyph("┐"), "\n");
  for (int i = 0; i < 3; ++i) {
    const std::string indent(8 - 3 * i, ' ');
    const int slack = kWidths[i] - DisplayWidth(levels[i].name);
    const std::string box = Cat(indent, v, std::string(slack / 2, ' '), levels[i].name,
                                std::string(slack - slack / 2, ' '), v);
    text += TrimmedLine(PadRight(box, kTextAt) + levels[i].first);
    const std::string floor =
        i == 2 ? Cat(indent, glyph("└"), line(kWidths[2]), glyph("┘"))
               : Cat(std::string(5 - 3 * i, ' '), glyph("┌"), line(2), glyph("┴"), line(kWidths[i]),
                     glyph("┴"), line(2), glyph("┐"));
    text += TrimmedLine(PadRight(floor, kTextAt) + levels[i].second);
  }
  return text;
}

std::string BytesMoved(const Page& page) {
  const Style& style = page.style;
  const v1::Traffic& traffic = page.plan.traffic();
  const double most = static_cast<double>(std::max(
      {traffic.standard_bytes(), traffic.tile_bytes(), traffic.compulsory_bytes(), uint64_t{1}}));
  std::string text = style.Bold("bytes moved") + "\n";
  const auto add = [&](const std::string& name, uint64_t bytes, const std::string& note, bool own) {
    const std::string bar = Bar(static_cast<double>(bytes) / most, 34, style);
    text += TrimmedLine(Cat("  ", PadRight(name, 10), own ? style.Green(bar) : bar, " ",
                            PadLeft(Bytes(bytes), 9), "  ", note));
  };
  add("standard", traffic.standard_bytes(), "", false);
  if (page.flash()) {
    const double ratio = static_cast<double>(traffic.standard_bytes()) /
                         static_cast<double>(std::max<uint64_t>(1, traffic.tile_bytes()));
    add("flash", traffic.tile_bytes(),
        ratio >= 1 ? Cat(FormatRatio(ratio), style.Times(), " less") : "", true);
  } else if (page.chosen()) {
    add("this path", traffic.tile_bytes(), "", true);
  }
  add("least", traffic.compulsory_bytes(), "inputs, outputs once", false);
  return text;
}

std::string Elements(const Page& page) {
  const Style& style = page.style;
  const double standard = page.plan.standard_elements_per_head();
  const double flash = page.plan.flash_elements_per_head();
  if (!(standard > 0) || !(flash > 0)) return "";
  const std::string_view two = style.Squared();
  const bool square = page.extent.queries == page.extent.keys;
  const std::string n = FormatCount(static_cast<uint64_t>(page.extent.queries));
  const std::string title = Cat(
      "elements read and written per head, forward: N = ", n,
      square ? "" : Cat(", L = ", FormatCount(static_cast<uint64_t>(page.extent.keys)), " keys"),
      ", d = ", page.problem.inputs.q.shape.back(),
      ", M = ", FormatCount(page.plan.on_chip_elements()), " on chip");
  const std::string standard_formula = square ? Cat("2N", two, " + 4Nd") : "2NL + 2(N+L)d";
  const std::string flash_formula =
      square ? Cat("4Nd + 2N", two, "d", two, "/M") : Cat("2(N+L)d + 2NLd", two, "/M");
  const double most = std::max(standard, flash);
  std::string text;
  for (const std::string& line : Wrap(title, kPageWidth)) text += style.Bold(line) + "\n";
  const auto add = [&](const std::string& name, const std::string& formula, double elements,
                       const std::string& note, bool own) {
    const std::string bar = Bar(elements / most, 20, style);
    text += TrimmedLine(
        Cat("  ", PadRight(name, 10), PadRight(formula, 19), own ? style.Green(bar) : bar, " ",
            PadLeft(FormatCount(static_cast<uint64_t>(elements + 0.5)), 14), "  ", note));
  };
  add("standard", standard_formula, standard, "", false);
  add("flash", flash_formula, flash,
      standard >= flash ? Cat(FormatRatio(standard / flash), style.Times(), " less") : "", true);
  return text;
}

// The measured copy rate of the device that the plan is for; 0: not measured.
double CopyBytesPerSecond(const Page& page) {
  for (const v1::DeviceInfo& device : page.info.devices()) {
    if (device.kind() == page.plan.device_kind()) return device.copy_gb_per_s() * 1e9;
  }
  return 0;
}

// Whether the call computes or waits. Empty where either time is unknown.
std::string Verdict(double compute, double memory, const Style& style) {
  if (!(compute > 0) || !(memory > 0)) return "";
  if (compute >= memory) {
    return Cat("; computing takes ", FormatRatio(compute / memory), style.Times(),
               " as long as moving the bytes: compute-bound, nothing waits");
  }
  return Cat("; moving the bytes takes ", FormatRatio(memory / compute), style.Times(),
             " as long as computing: memory-bound, ", FormatPercent(1 - compute / memory),
             " of the time is waiting");
}

std::string Times(const Page& page) {
  const Style& style = page.style;
  const double compute = static_cast<double>(page.plan.predicted_compute_ns());
  const double memory = static_cast<double>(page.plan.predicted_memory_ns());
  std::string text = style.Bold("time, from the rates this server measured") + "\n";
  if (!(compute > 0) && !(memory > 0)) {
    return Cat(text, "  not predicted: no rates measured yet for this path\n");
  }
  const double rate = CopyBytesPerSecond(page);
  const double standard =
      rate > 0 ? static_cast<double>(page.plan.traffic().standard_bytes()) / rate * 1e9 : 0;
  const double bus = static_cast<double>(page.plan.predicted_transfer_ns());
  const double most = std::max({compute, memory, standard, bus});
  const auto add = [&](const std::string& name, double nanos, const std::string& note) {
    text += TrimmedLine(Cat("  ", PadRight(name, 20), Bar(nanos / most, 24, style), " ",
                            PadLeft(nanos > 0 ? FormatNanos(nanos, style) : "-", 9), "  ", note));
  };
  const std::string unmeasured = "not measured yet";
  add("computing", compute,
      compute > 0 ? FormatSi(static_cast<double>(page.plan.flops()), "FLOP") : unmeasured);
  add("moving bytes", memory, memory > 0 ? "" : unmeasured);
  if (page.flash() && standard > 0) add("moving, if standard", standard, "");
  if (bus > 0) add("over the bus", bus, "to the device and back; not in the prediction");
  for (const std::string& line :
       Wrap(Cat("predicted ", FormatNanos(static_cast<double>(page.plan.predicted_ns()), style),
                Verdict(compute, memory, style)),
            kPageWidth - 2)) {
    text += Cat("  ", line, "\n");
  }
  return text;
}

std::string Advice(const Page& page) {
  if (page.plan.advice().empty()) return "";
  std::string text = "\n" + page.style.Bold("to get the fastest flash path") + "\n";
  for (const std::string& advice : page.plan.advice()) {
    const std::vector<std::string> lines = Wrap(advice, kPageWidth - 4);
    for (size_t i = 0; i < lines.size(); ++i) {
      text += Cat(i == 0 ? Cat("  ", page.style.Dot(), " ") : "    ", lines[i], "\n");
    }
  }
  return text;
}

}  // namespace

std::string RenderPlan(const Problem& problem, v1::Pass pass, const v1::PlanResponse& plan,
                       const v1::GetServerInfoResponse& info, const Style& style) {
  const Page page{problem, pass, plan, info, style, LargestSequence(problem)};
  const std::string head = Cat(Head(page), "\n", Matrix(page), "\n");
  if (!page.chosen()) return Cat(head, Advice(page).substr(page.plan.advice().empty() ? 0 : 1));
  const std::string elements = Elements(page);
  return Cat(head, Levels(page), "\n", BytesMoved(page), "\n", elements,
             elements.empty() ? "" : "\n", Times(page), Advice(page));
}

}  // namespace attn::cli
