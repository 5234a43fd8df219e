// Plots as inline SVG. Colours are CSS variables of the page (--s0 … --s4, --ink, --grid), so that
// one picture serves light and dark.
#ifndef ATTN_CLIENT_CLI_LOAD_PLOT_H_
#define ATTN_CLIENT_CLI_LOAD_PLOT_H_

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attn::cli {

// Text that stands for itself in HTML, also within a quoted attribute.
std::string EscapeHtml(std::string_view text);

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // by x
  int color = 0;                                  // 0 … 4
  bool dots = false;                              // a mark at each point
};

struct PlotAxis {
  std::string title;
  std::function<std::string(double)> format;  // of a tick
  bool log = false;                           // values over 0; others are left out
  std::vector<double> ticks;                  // where they stand; empty: chosen
};

struct LinePlot {
  std::string title;
  std::string note;  // below the title
  PlotAxis x, y;
  std::vector<PlotSeries> series;
};

struct BarItem {
  std::string label;
  double value = 0;
  std::string text;  // the value, written out
  int color = 0;
};

// A figure with its title, legend and picture. Empty where no series has a point.
std::string RenderLinePlot(const LinePlot& plot);
// One bar per item, from the same zero.
std::string RenderBars(const std::string& title, const std::string& note,
                       const std::vector<BarItem>& items);
// Each row is one bar cut into shares of its sum.
struct ShareRow {
  std::string label;
  std::vector<BarItem> parts;
};
std::string RenderShares(const std::string& title, const std::string& note,
                         const std::vector<ShareRow>& rows);

// Ticks of an axis from `low` to `high` (low < high; both over 0 where `log`): multiples of 1, 2 or
// 5 times a power of ten, the first at or below `low` and the last at or above `high`.
std::vector<double> ChooseTicks(double low, double high, bool log);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_LOAD_PLOT_H_
