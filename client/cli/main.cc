// The attn command.
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "client/cli/commands.h"

int main(int argc, char** argv) {
  const attn::cli::Console console{std::cout, std::cerr, isatty(STDERR_FILENO) != 0};
  return attn::cli::RunAttn(std::vector<std::string>(argv + std::min(argc, 1), argv + argc),
                            console);
}
