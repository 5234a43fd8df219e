// Behind the bench histogram-error: what the load tester's histogram answers against the exact
// percentiles of the same values.
//   attn_load_histogram [--values N] [--recorded FILE]...
// FILE holds one value a line, in seconds. Prints a table; the last line is the largest error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "client/load/histogram.h"
#include "client/load/schedule.h"

namespace attn::bench {
namespace {

using load::Histogram;

constexpr double kPercents[] = {0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 99.99, 99.999, 100};

// The largest relative error over all percentiles; also every value alone in its bucket is looked
// at, which is what bounds the error at any percentile.
double Compare(const std::string& name, std::vector<int64_t> values) {
  Histogram histogram;
  for (const int64_t value : values) histogram.Record(value);
  std::sort(values.begin(), values.end());
  double worst = 0, at = 0;
  for (const double percent : kPercents) {
    const auto wanted =
        static_cast<int64_t>(std::ceil(percent / 100 * static_cast<double>(values.size())));
    const int64_t rank = std::clamp<int64_t>(wanted, 1, static_cast<int64_t>(values.size()));
    const auto exact = static_cast<double>(values[rank - 1]);
    const auto answered = static_cast<double>(histogram.ValueAt(percent / 100));
    const double error = exact > 0 ? std::abs(answered - exact) / exact : std::abs(answered);
    if (error > worst) {
      worst = error;
      at = percent;
    }
  }
  double bound = 0;
  for (const Histogram::Bucket& bucket : histogram.Buckets()) {
    const double middle =
        std::floor((static_cast<double>(bucket.lower) + static_cast<double>(bucket.upper)) / 2);
    const auto lower = static_cast<double>(std::max<int64_t>(1, bucket.lower));
    bound = std::max({bound, (middle - static_cast<double>(bucket.lower)) / lower,
                      (static_cast<double>(bucket.upper) - middle) /
                          std::max(1.0, static_cast<double>(bucket.upper))});
  }
  const auto percentile = [&](double q) {
    return static_cast<double>(histogram.ValueAt(q)) * 1e-6;
  };
  std::printf("%-12s %9zu %12.6f %12.6f %12.6f %10.4f%% %8g %10.4f%%\n", name.c_str(),
              values.size(), percentile(0.5), percentile(0.99), percentile(0.9999), worst * 100, at,
              bound * 100);
  return std::max(worst, bound);
}

std::vector<int64_t> ReadSeconds(const std::string& path) {
  std::vector<int64_t> values;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    values.push_back(std::llround(std::strtod(line.c_str(), nullptr) * 1e9));
  }
  return values;
}

int Run(int64_t count, const std::vector<std::string>& recorded) {
  load::Random random(1);
  std::vector<int64_t> uniform, exponential, heavy, two, edges;
  for (int64_t i = 0; i < count; ++i) {
    uniform.push_back(static_cast<int64_t>(random.Uniform() * 1e9));
    exponential.push_back(static_cast<int64_t>(random.Exponential() * 3e6));
    heavy.push_back(static_cast<int64_t>(1e5 * std::pow(1 - random.Uniform(), -1.5)));
    two.push_back(random.Uniform() < 0.98 ? 1'000'000 + i % 1000 : 2'000'000'000 + i);
    // Around the powers of two, where buckets change their width.
    edges.push_back(std::max<int64_t>(
        1, (int64_t{1} << (random.Bits() % 62)) + static_cast<int64_t>(random.Bits() % 7) - 3));
  }
  std::printf("%-12s %9s %12s %12s %12s %11s %8s %11s\n", "values", "count", "p50 ms", "p99 ms",
              "p99.99 ms", "error", "at p", "any p");
  double worst = 0;
  for (auto& [name, values] : {std::pair("uniform", &uniform),
                               {"exponential", &exponential},
                               {"heavy tail", &heavy},
                               {"two peaks", &two},
                               {"edges", &edges}}) {
    worst = std::max(worst, Compare(name, std::move(*values)));
  }
  for (const std::string& path : recorded) {
    std::vector<int64_t> values = ReadSeconds(path);
    if (values.empty()) {
      std::fprintf(stderr, "%s: no values\n", path.c_str());
      return 2;
    }
    worst = std::max(worst, Compare("recorded", std::move(values)));
  }
  const double limit = Histogram::kMaxRelativeError;
  std::printf("\nhistogram-error: %.4f%% (bar: at most %.4f%%)\n", worst * 100, limit * 100);
  return worst <= limit ? 0 : 1;
}

}  // namespace
}  // namespace attn::bench

int main(int argc, char** argv) {
  int64_t count = 1'000'000;
  std::vector<std::string> recorded;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--values") == 0) count = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--recorded") == 0) recorded.emplace_back(argv[i + 1]);
  }
  if (argc % 2 == 0 || count < 1) {
    std::fprintf(stderr, "usage: attn_load_histogram [--values N] [--recorded FILE]...\n");
    return 2;
  }
  return attn::bench::Run(count, recorded);
}
