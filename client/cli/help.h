// --help for an 80-column terminal.
#ifndef ATTN_CLIENT_CLI_HELP_H_
#define ATTN_CLIENT_CLI_HELP_H_

#include <CLI/CLI.hpp>
#include <string>

namespace attn::cli {

// CLI11's layout with every line wrapped at kPageWidth, values named by what they are, and defaults
// in brackets.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override;
};

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_HELP_H_
