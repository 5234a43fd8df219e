// Ctrl-C and SIGTERM as a flag that the client library looks at.
#ifndef ATTN_CLIENT_CLI_INTERRUPT_H_
#define ATTN_CLIENT_CLI_INTERRUPT_H_

#include <atomic>

namespace attn::cli {

// While one exists, the first SIGINT or SIGTERM sets flag(); a second one ends the process as
// usual. One at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  const std::atomic<bool>* flag() const;
};

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_INTERRUPT_H_
