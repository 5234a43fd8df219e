#include "client/cli/load_plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

// Units of the view box. Small, so that text stays readable where a phone scales it down.
constexpr double kWidth = 480, kHeight = 280;
constexpr double kLeft = 62, kRight = 14, kTop = 10, kBottom = 44;

std::string Figure(const std::string& title, const std::string& note, const std::string& legend,
                   const std::string& body) {
  return Cat("<figure><figcaption><h3>", EscapeHtml(title), "</h3>",
             note.empty() ? "" : Cat("<p>", EscapeHtml(note), "</p>"), legend, "</figcaption>",
             body, "</figure>\n");
}

std::string LegendItem(int color, const std::string& name) {
  return Cat("<span class=\"key k", color, "\">", EscapeHtml(name), "</span> ");
}

std::string Coordinate(double value) { return absl::StrFormat("%.1f", value); }

bool Drawable(double value, bool log) { return std::isfinite(value) && (!log || value > 0); }

// Maps values of an axis to the picture.
class Scale {
 public:
  Scale(const PlotAxis& axis, double low, double high, double from, double to)
      : log_(axis.log), from_(from), to_(to) {
    if (!(high > low)) high = log_ ? low * 2 : low + 1;
    ticks_ = axis.ticks.empty() ? ChooseTicks(low, high, log_) : axis.ticks;
    low_ = Map(std::min(low, ticks_.front()));
    high_ = Map(std::max(high, ticks_.back()));
  }
  double At(double value) const {
    return from_ + (Map(value) - low_) / (high_ - low_) * (to_ - from_);
  }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  double Map(double value) const { return log_ ? std::log10(value) : value; }

  const bool log_;
  const double from_, to_;
  std::vector<double> ticks_;
  double low_ = 0, high_ = 1;
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void Add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

std::string Axes(const LinePlot& plot, const Scale& x, const Scale& y) {
  std::string svg = "<g class=\"grid\">";
  std::string labels = "<g class=\"ticks\">";
  for (const double tick : y.ticks()) {
    const std::string at = Coordinate(y.At(tick));
    svg += Cat("<line x1=\"", kLeft, "\" x2=\"", kWidth - kRight, "\" y1=\"", at, "\" y2=\"", at,
               "\"/>");
    labels += Cat("<text x=\"", kLeft - 6, "\" y=\"", Coordinate(y.At(tick) + 4),
                  "\" text-anchor=\"end\">", EscapeHtml(plot.y.format(tick)), "</text>");
  }
  for (const double tick : x.ticks()) {
    const std::string at = Coordinate(x.At(tick));
    svg += Cat("<line x1=\"", at, "\" x2=\"", at, "\" y1=\"", kTop, "\" y2=\"", kHeight - kBottom,
               "\"/>");
    // The outermost label stays within the picture.
    const char* anchor = x.At(tick) > kWidth - kRight - 18 ? "end" : "middle";
    labels += Cat("<text x=\"", at, "\" y=\"", kHeight - kBottom + 16, "\" text-anchor=\"", anchor,
                  "\">", EscapeHtml(plot.x.format(tick)), "</text>");
  }
  labels += Cat("<text x=\"", (kLeft + kWidth - kRight) / 2, "\" y=\"", kHeight - 6,
                "\" text-anchor=\"middle\">", EscapeHtml(plot.x.title), "</text></g>");
  return Cat(svg, "</g>", labels);
}

std::string Draw(const LinePlot& plot, const PlotSeries& series, const Scale& x, const Scale& y) {
  std::string path, marks;
  for (const auto& [px, py] : series.points) {
    if (!Drawable(px, plot.x.log) || !Drawable(py, plot.y.log)) continue;
    const std::string cx = Coordinate(x.At(px)), cy = Coordinate(y.At(py));
    path += Cat(path.empty() ? "M" : "L", cx, " ", cy);
    if (series.dots) {
      marks += Cat("<circle cx=\"", cx, "\" cy=\"", cy, "\" r=\"3.5\"><title>",
                   EscapeHtml(Cat(series.name, ": ", plot.y.format(py), " at ", plot.x.format(px))),
                   "</title></circle>");
    }
  }
  return Cat("<g class=\"series c", series.color, "\"><path d=\"", path, "\"/>", marks, "</g>");
}

std::string Svg(double height, const std::string& title, const std::string& body) {
  return Cat("<svg viewBox=\"0 0 ", kWidth, " ", height, "\" role=\"img\" aria-label=\"",
             EscapeHtml(title), "\">", body, "</svg>");
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::vector<double> ChooseTicks(double low, double high, bool log) {
  static constexpr double kSteps[] = {1, 2, 5};
  std::vector<double> ticks;
  if (!log) {
    const double rough = (high - low) / 5;
    const double decade = std::pow(10.0, std::floor(std::log10(rough)));
    double step = 10 * decade;
    for (const double factor : {5.0, 2.0, 1.0}) {
      if (decade * factor >= rough * 0.8) step = decade * factor;
    }
    const double first = std::floor(low / step), last = std::ceil(high / step);
    for (double i = first; i <= last && ticks.size() < 64; ++i) ticks.push_back(i * step);
    return ticks;
  }
  const int first = static_cast<int>(std::floor(std::log10(low)));
  const int last = static_cast<int>(std::ceil(std::log10(high)));
  const bool decades = last - first > 3;
  for (int exponent = first; exponent <= last; ++exponent) {
    for (const double factor : kSteps) {
      if (decades && factor != 1) continue;
      ticks.push_back(factor * std::pow(10.0, exponent));
    }
  }
  // Of those outside only the nearest on each side stays.
  while (ticks.size() > 2 && ticks[1] <= low) ticks.erase(ticks.begin());
  while (ticks.size() > 2 && ticks[ticks.size() - 2] >= high) ticks.pop_back();
  return ticks;
}

std::string RenderLinePlot(const LinePlot& plot) {
  Range xs, ys;
  for (const PlotSeries& series : plot.series) {
    for (const auto& [x, y] : series.points) {
      if (!Drawable(x, plot.x.log) || !Drawable(y, plot.y.log)) continue;
      xs.Add(x);
      ys.Add(y);
    }
  }
  if (xs.empty()) return "";
  if (!plot.y.log) ys.Add(0);
  const Scale x(plot.x, xs.low, xs.high, kLeft, kWidth - kRight);
  const Scale y(plot.y, ys.low, ys.high, kHeight - kBottom, kTop);
  std::string body = Axes(plot, x, y);
  std::string legend = "<p class=\"legend\">";
  for (const PlotSeries& series : plot.series) {
    body += Draw(plot, series, x, y);
    legend += LegendItem(series.color, series.name);
  }
  return Figure(plot.title, plot.note, legend + "</p>", Svg(kHeight, plot.title, body));
}

std::string RenderBars(const std::string& title, const std::string& note,
                       const std::vector<BarItem>& items) {
  double most = 0;
  for (const BarItem& item : items) most = std::max(most, item.value);
  if (most <= 0) return "";
  constexpr double kRow = 26, kLabel = 150, kText = 112;
  std::string body;
  double top = 4;
  for (const BarItem& item : items) {
    const double width = std::max(1.0, item.value / most * (kWidth - kLabel - kText - 8));
    body +=
        Cat("<text class=\"label\" x=\"", kLabel - 8, "\" y=\"", top + 16,
            "\" text-anchor=\"end\">", EscapeHtml(item.label), "</text><rect class=\"f", item.color,
            "\" x=\"", kLabel, "\" y=\"", top + 3, "\" width=\"", Coordinate(width),
            "\" height=\"17\" rx=\"2\"/><text class=\"label\" x=\"", Coordinate(kLabel + width + 6),
            "\" y=\"", top + 16, "\">", EscapeHtml(item.text), "</text>");
    top += kRow;
  }
  return Figure(title, note, "", Svg(top + 4, title, body));
}

std::string RenderShares(const std::string& title, const std::string& note,
                         const std::vector<ShareRow>& rows) {
  constexpr double kRow = 34, kLabel = 74;
  std::string body, legend = "<p class=\"legend\">";
  double top = 4;
  for (const ShareRow& row : rows) {
    double sum = 0;
    for (const BarItem& part : row.parts) sum += part.value;
    if (sum <= 0) continue;
    body += Cat("<text class=\"label\" x=\"", kLabel - 8, "\" y=\"", top + 19,
                "\" text-anchor=\"end\">", EscapeHtml(row.label), "</text>");
    double left = kLabel;
    for (const BarItem& part : row.parts) {
      const double width = part.value / sum * (kWidth - kLabel - kRight);
      body += Cat("<rect class=\"f", part.color, "\" x=\"", Coordinate(left), "\" y=\"", top + 3,
                  "\" width=\"", Coordinate(width), "\" height=\"24\"><title>",
                  EscapeHtml(Cat(part.label, ": ", part.text)), "</title></rect>");
      if (width > 60) {
        body += Cat("<text class=\"onbar\" x=\"", Coordinate(left + width / 2), "\" y=\"", top + 19,
                    "\" text-anchor=\"middle\">", EscapeHtml(part.text), "</text>");
      }
      left += width;
    }
    top += kRow;
  }
  if (body.empty()) return "";
  for (const BarItem& part : rows.front().parts) legend += LegendItem(part.color, part.label);
  return Figure(title, note, legend + "</p>", Svg(top + 4, title, body));
}

}  // namespace attn::cli
