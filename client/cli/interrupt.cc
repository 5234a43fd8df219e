#include "client/cli/interrupt.h"

#include <signal.h>

namespace attn::cli {
namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set from a signal handler");

void OnSignal(int) { interrupted.store(true, std::memory_order_relaxed); }

void Install(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  // The default comes back with the first signal. No SA_RESTART, so that a sleep ends at once.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  interrupted.store(false);
  Install(OnSignal);
}

InterruptGuard::~InterruptGuard() { Install(SIG_DFL); }

const std::atomic<bool>* InterruptGuard::flag() const { return &interrupted; }

}  // namespace attn::cli
