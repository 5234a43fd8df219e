// What attn load sends: the entries of a request mix, from flags, a JSON file or a trace.
#ifndef ATTN_CLIENT_CLI_LOAD_MIX_H_
#define ATTN_CLIENT_CLI_LOAD_MIX_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/flags.h"
#include "client/load/schedule.h"
#include "client/load/target.h"

namespace attn::cli {

// Names and values of one entry: name, weight, pass, payload, and the options of a call by their
// long names with - or _ (seqlen_q, causal, dtype, …).
using MixFields = std::vector<std::pair<std::string, std::string>>;

// A mix file: {"entries": [{"name": "prefill", "weight": 3, "pass": "forward", "seqlen_q": 1024,
// "causal": true}, …]}, or the array alone. Errors: INVALID_ARGUMENT, naming the entry and the key.
absl::StatusOr<std::vector<MixFields>> ParseMix(const std::string& json);

// A recorded load: the first line names the columns; `seconds` is required (from any origin: the
// earliest becomes 0). Column `entry` names an entry of the mix; without it the other columns are
// the fields of an entry (a cell left empty: not set), and equal rows are one entry. Appends what
// it makes to `mix`. Lines that begin with # are skipped. Errors: INVALID_ARGUMENT, naming the
// line.
absl::StatusOr<std::vector<load::Arrival>> ParseTrace(const std::string& csv, double speed,
                                                      std::vector<MixFields>* mix);

// The entries, with their tensors made. Fields stand over `flags.problem`; without any, the flags
// themselves and --pass make one entry, or two. Errors: INVALID_ARGUMENT, naming the entry.
absl::StatusOr<std::vector<load::MixEntry>> MakeEntries(const Flags& flags,
                                                        const std::vector<MixFields>& mix,
                                                        const Style& style);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_LOAD_MIX_H_
