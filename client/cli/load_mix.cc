#include "client/cli/load_mix.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/cli/problem.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;
using Json = nlohmann::json;

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError(what); }

// A JSON value as the text of a flag; nullopt: it cannot be one.
std::optional<std::string> ValueText(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number()) return value.dump();
  if (!value.is_array()) return std::nullopt;
  std::string text;
  for (const Json& item : value) {
    if (!item.is_number_integer()) return std::nullopt;
    text += Cat(text.empty() ? "" : ",", item.dump());
  }
  return text;
}

std::string* Find(MixFields* fields, std::string_view name) {
  for (auto& [key, value] : *fields) {
    if (key == name) return &value;
  }
  return nullptr;
}

// Takes a field out; "" where it is not there.
std::string Take(MixFields* fields, std::string_view name) {
  const std::string* found = Find(fields, name);
  if (found == nullptr) return "";
  const std::string value = *found;
  std::erase_if(*fields, [&](const auto& field) { return field.first == name; });
  return value;
}

absl::StatusOr<load::MixEntry> MakeEntry(const ProblemFlags& flags, bool backward,
                                         const Style& style) {
  absl::StatusOr<Problem> problem =
      MakeProblem(flags, backward ? Purpose::kBackward : Purpose::kForward);
  if (!problem.ok()) return problem.status();
  load::MixEntry entry;
  entry.pass = backward ? v1::PASS_BACKWARD : v1::PASS_FORWARD;
  entry.summary = Summary(*problem, style);
  entry.forward = ToForward(*problem);
  if (backward) {
    // The output type asked of backward is that of its gradients.
    entry.forward.header.mutable_options()->clear_out_dtype();
    entry.backward = ToBackward(*problem);
  }
  return entry;
}

absl::StatusOr<load::MixEntry> FromFields(const ProblemFlags& defaults, MixFields fields,
                                          const Style& style) {
  ProblemFlags flags = defaults;
  const std::string name = Take(&fields, "name");
  const std::string weight = Take(&fields, "weight");
  const std::string pass = Take(&fields, "pass");
  if (!pass.empty() && pass != "forward" && pass != "backward") {
    return Bad(Cat("pass '", pass, "' is neither forward nor backward"));
  }
  const std::string payload = Take(&fields, "payload");
  if (!payload.empty() && payload != "inline") {
    return Bad(Cat("payload '", payload, "' is not inline, the one source that servers have"));
  }
  std::vector<std::string> arguments;
  for (auto& [key, value] : fields) {
    std::replace(key.begin(), key.end(), '_', '-');
    arguments.push_back(Cat("--", key, "=", value));
  }
  if (absl::Status status = ParseProblemArguments(std::move(arguments), &flags); !status.ok()) {
    return status;
  }
  flags.random = flags.input.empty() && flags.q.empty() && flags.k.empty() && flags.v.empty();
  absl::StatusOr<load::MixEntry> entry = MakeEntry(flags, pass == "backward", style);
  if (!entry.ok()) return entry;
  entry->name = name;
  if (!weight.empty()) {
    char* end = nullptr;
    entry->weight = std::strtod(weight.c_str(), &end);
    if (*end != '\0' || !std::isfinite(entry->weight) || entry->weight <= 0) {
      return Bad(Cat("weight '", weight, "' is not a number over 0"));
    }
  }
  return entry;
}

// Comma-separated cells; a cell in double quotes may hold commas, and "" stands for a quote.
std::vector<std::string> Cells(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      cells.back().push_back(line[++i]);
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      cells.emplace_back();
    } else {
      cells.back().push_back(c);
    }
  }
  for (std::string& cell : cells) {
    while (!cell.empty() && (cell.back() == ' ' || cell.back() == '\r')) cell.pop_back();
    cell.erase(0, cell.find_first_not_of(' '));
  }
  return cells;
}

// Rows of a trace, one by one.
class TraceReader {
 public:
  explicit TraceReader(std::vector<MixFields>* mix) : mix_(mix) {
    for (uint32_t i = 0; i < mix->size(); ++i) {
      if (const std::string* name = Find(&(*mix)[i], "name")) named_[*name] = i;
    }
  }

  absl::Status Header(std::vector<std::string> columns) {
    columns_ = std::move(columns);
    if (std::find(columns_.begin(), columns_.end(), "seconds") == columns_.end()) {
      return Bad("no column 'seconds'");
    }
    return absl::OkStatus();
  }
  bool has_header() const { return !columns_.empty(); }

  absl::Status Row(const std::vector<std::string>& cells) {
    if (cells.size() != columns_.size()) {
      return Bad(Cat(cells.size(), " cells, but ", columns_.size(), " columns"));
    }
    MixFields fields;
    std::string entry;
    double seconds = 0;
    for (size_t i = 0; i < cells.size(); ++i) {
      if (columns_[i] == "seconds") {
        char* end = nullptr;
        seconds = std::strtod(cells[i].c_str(), &end);
        if (cells[i].empty() || *end != '\0' || !(std::abs(seconds) < 1e12)) {
          return Bad(Cat("seconds '", cells[i], "' is not a number within -1e12 and 1e12"));
        }
      } else if (columns_[i] == "entry") {
        entry = cells[i];
      } else if (!cells[i].empty()) {
        fields.emplace_back(columns_[i], cells[i]);
      }
    }
    absl::StatusOr<uint32_t> index = IndexOf(entry, std::move(fields));
    if (!index.ok()) return index.status();
    rows_.emplace_back(seconds, *index);
    return absl::OkStatus();
  }

  std::vector<load::Arrival> Arrivals(double speed) const {
    double first = rows_.empty() ? 0 : rows_.front().first;
    for (const auto& row : rows_) first = std::min(first, row.first);
    std::vector<load::Arrival> arrivals;
    for (const auto& [seconds, entry] : rows_) {
      arrivals.push_back({std::llround((seconds - first) / speed * 1e9), entry});
    }
    std::stable_sort(arrivals.begin(), arrivals.end(),
                     [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; });
    return arrivals;
  }

 private:
  absl::StatusOr<uint32_t> IndexOf(const std::string& entry, MixFields fields) {
    if (!entry.empty()) {
      if (!fields.empty()) return Bad("a row with an entry has no other cells but seconds");
      const auto found = named_.find(entry);
      if (found == named_.end()) return Bad(Cat("no entry '", entry, "' in the mix"));
      return found->second;
    }
    const auto [place, is_new] = made_.try_emplace(fields, static_cast<uint32_t>(mix_->size()));
    if (is_new) mix_->push_back(std::move(fields));
    return place->second;
  }

  std::vector<MixFields>* mix_;
  std::vector<std::string> columns_;
  std::map<std::string, uint32_t> named_;
  std::map<MixFields, uint32_t> made_;
  std::vector<std::pair<double, uint32_t>> rows_;
};

}  // namespace

absl::StatusOr<std::vector<MixFields>> ParseMix(const std::string& json) {
  const Json document = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) return Bad("not valid JSON");
  const Json* entries = &document;
  if (document.is_object()) {
    const auto found = document.find("entries");
    if (found == document.end()) return Bad("no 'entries'");
    entries = &*found;
  }
  if (!entries->is_array() || entries->empty()) return Bad("'entries' is not a list of entries");
  std::vector<MixFields> mix;
  for (size_t i = 0; i < entries->size(); ++i) {
    const Json& entry = (*entries)[i];
    if (!entry.is_object()) return Bad(Cat("entry ", i + 1, " is not an object"));
    MixFields fields;
    for (const auto& [key, value] : entry.items()) {
      std::optional<std::string> text = ValueText(value);
      if (!text) {
        return Bad(Cat("entry ", i + 1, ": '", key,
                       "' must be a text, a number, true, false or a list of whole numbers"));
      }
      fields.emplace_back(key, *std::move(text));
    }
    mix.push_back(std::move(fields));
  }
  return mix;
}

absl::StatusOr<std::vector<load::Arrival>> ParseTrace(const std::string& csv, double speed,
                                                      std::vector<MixFields>* mix) {
  TraceReader reader(mix);
  int64_t number = 0;
  for (const std::string& line : Split(csv, '\n')) {
    ++number;
    if (line.empty() || line == "\r" || line.starts_with('#')) continue;
    const absl::Status status =
        reader.has_header() ? reader.Row(Cells(line)) : reader.Header(Cells(line));
    if (!status.ok()) return Within(Cat("line ", number), status);
  }
  std::vector<load::Arrival> arrivals = reader.Arrivals(speed);
  if (arrivals.empty()) return Bad("no calls in it");
  return arrivals;
}

absl::StatusOr<std::vector<load::MixEntry>> MakeEntries(const Flags& flags,
                                                        const std::vector<MixFields>& mix,
                                                        const Style& style) {
  std::vector<MixFields> all = mix;
  if (all.empty()) {
    if (flags.load.pass != "backward") all.push_back({{"name", "forward"}});
    if (flags.load.pass != "forward") {
      all.push_back({{"name", "backward"}, {"pass", "backward"}});
    }
  }
  std::vector<load::MixEntry> entries;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string* name = Find(&all[i], "name");
    const std::string called = name == nullptr ? Cat("entry-", i + 1) : *name;
    // Defaults of a mix: --pass says what an entry is that does not say so itself.
    if (!mix.empty() && Find(&all[i], "pass") == nullptr && flags.load.pass == "backward") {
      all[i].emplace_back("pass", "backward");
    }
    absl::StatusOr<load::MixEntry> entry = FromFields(flags.problem, all[i], style);
    if (!entry.ok()) return Within(Cat("entry '", called, "'"), entry.status());
    entry->name = called;
    for (const load::MixEntry& other : entries) {
      if (other.name == called) return Bad(Cat("two entries are named '", called, "'"));
    }
    entries.push_back(*std::move(entry));
  }
  return entries;
}

}  // namespace attn::cli
