// Looks for the highest rate that meets a limit.
#ifndef ATTN_CLIENT_LOAD_SEARCH_H_
#define ATTN_CLIENT_LOAD_SEARCH_H_

#include <optional>

namespace attn::load {

// Tries a rate; while it passes, doubles it; then halves the interval between the highest that
// passed and the lowest that failed until they are within `precision` (a share of the lower). Where
// the first fails, halves until one passes. Not thread-safe.
class RateSearch {
 public:
  // Both over 0. At most `max_probes` rates are tried.
  RateSearch(double first_rate, double precision, int max_probes)
      : next_(first_rate), precision_(precision), left_(max_probes) {}

  // The rate to try next; unset: the search has ended.
  std::optional<double> Next() const;
  // How the rate that Next() gave did.
  void Tell(bool passed);

  std::optional<double> highest_passed() const { return passed_; }
  std::optional<double> lowest_failed() const { return failed_; }

 private:
  double next_;
  const double precision_;
  int left_;
  std::optional<double> passed_, failed_;
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_SEARCH_H_
