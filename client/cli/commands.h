// The subcommands of attn. Each prints its answer on `out`, its errors as one line on `err`, and
// returns the exit status (exit_code.h).
#ifndef ATTN_CLIENT_CLI_COMMANDS_H_
#define ATTN_CLIENT_CLI_COMMANDS_H_

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/flags.h"
#include "client/lib/client.h"

namespace attn::cli {

struct Console {
  std::ostream& out;
  std::ostream& err;
  // Whether stderr is a terminal: progress is shown there.
  bool err_is_terminal = false;

  // One line, "attn: …".
  void Error(const std::string& text) const;
  void Note(const std::string& text) const;
};

// Connects, or explains why not and sets *exit_code.
std::unique_ptr<client::Client> ConnectOrExplain(const Flags& flags, const Console& console,
                                                 int* exit_code);

// Explains a failed call: says who refused it, and the status by name.
int ExplainCall(const Flags& flags, const absl::Status& status, const Console& console);

// Explains what is wrong with flags or files.
int ExplainLocal(const absl::Status& status, const Console& console);

int RunForward(const Flags& flags, const Console& console);
int RunBackward(const Flags& flags, const Console& console);
int RunPlan(const Flags& flags, const Console& console);
int RunStatus(const Flags& flags, const Console& console);
int RunLoad(const Flags& flags, const Console& console);
int RunMerge(const Flags& flags, const Console& console);
int RunVersion(const Flags& flags, const Console& console);

// Parses the arguments (without the program's name) and runs the subcommand.
int RunAttn(std::vector<std::string> arguments, const Console& console);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_COMMANDS_H_
