// What attn exits with. --help states the same list.
#ifndef ATTN_CLIENT_CLI_EXIT_CODE_H_
#define ATTN_CLIENT_CLI_EXIT_CODE_H_

#include "absl/status/status.h"

namespace attn::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitInternal = 1,     // an error of ours or of the server's
  kExitUsage = 2,        // wrong flags, or a file that cannot be used
  kExitUnreachable = 3,  // no server, or one that is draining
  kExitCheckFailed = 4,  // --check, or load's verification, found a difference
  kExitRefused = 5,      // the server will not do it as asked
  kExitExhausted = 6,    // out of a queue, a memory budget, or memory
  kExitStopped = 7,      // deadline exceeded, or cancelled
  kExitUnsteady = 8,     // load: the measurement does not stand, or does not meet its goal
};

// For the status of a call to a server.
ExitCode ExitCodeForCall(const absl::Status& status);

// For the status of connecting: what is wrong with the flags or the PEM files is usage, and a
// deadline means that nobody answered.
ExitCode ExitCodeForConnect(const absl::Status& status);

// For flags and files of this machine.
ExitCode ExitCodeForLocal(const absl::Status& status);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_EXIT_CODE_H_
