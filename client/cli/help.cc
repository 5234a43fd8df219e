#include "client/cli/help.h"

#include <vector>

#include "client/cli/format.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

constexpr int kNameWidth = 26;

std::string TwoColumns(const std::string& name, const std::string& text) {
  const std::vector<std::string> lines = Wrap(text, kPageWidth - kNameWidth);
  std::string row = Cat("  ", name);
  size_t next = 0;
  if (DisplayWidth(row) + 1 < kNameWidth) {
    row = Cat(PadRight(row, kNameWidth), lines[0]);
    next = 1;
  }
  for (; next < lines.size(); ++next) row += Cat("\n", std::string(kNameWidth, ' '), lines[next]);
  return row + "\n";
}

// How the value of an option is called.
std::string ValueName(const CLI::Option* option) {
  if (option->get_type_size() == 0) return "";
  const std::string type = option->get_type_name();
  const std::string plain = type.substr(0, type.find_first_of(":= "));
  if (plain == "INT" || plain == "UINT") return " N";
  if (plain == "FLOAT") return " X";
  return plain == "TEXT" ? " VALUE" : Cat(" ", plain);
}

}  // namespace

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  std::string text = option->get_description();
  if (!option->get_default_str().empty()) text += Cat(" [", option->get_default_str(), "]");
  if (is_positional) return TwoColumns(option->get_type_name(), text);
  return TwoColumns(Cat(option->get_name(false, true), ValueName(option)), text);
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return TwoColumns(command->get_name(), command->get_description());
}

std::string HelpFormatter::make_usage(const CLI::App* app, std::string) const {
  std::string usage = "attn";
  if (app->get_parent() != nullptr) usage += Cat(" ", app->get_name());
  usage += " [options]";
  for (const CLI::Option* option : app->get_options()) {
    if (option->get_positional()) usage += Cat(" ", option->get_type_name());
  }
  return Cat("Usage: ", usage, app->get_parent() == nullptr ? " COMMAND" : "", "\n\n");
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  std::string text;
  for (const std::string& line : Wrap(app->get_description(), kPageWidth)) text += line + "\n";
  return text + "\n";
}

std::string HelpFormatter::make_group(std::string group, bool is_positional,
                                      std::vector<const CLI::Option*> options) const {
  std::string text = Cat(group, ":\n");
  for (const CLI::Option* option : options) text += make_option(option, is_positional);
  return text;
}

}  // namespace attn::cli
