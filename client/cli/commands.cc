#include "client/cli/commands.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "client/cli/exit_code.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

int Dispatch(const Flags& flags, const Console& console) {
  if (flags.command == "forward") return RunForward(flags, console);
  if (flags.command == "backward") return RunBackward(flags, console);
  if (flags.command == "plan") return RunPlan(flags, console);
  if (flags.command == "status") return RunStatus(flags, console);
  if (flags.command == "load") return RunLoad(flags, console);
  if (flags.command == "merge") return RunMerge(flags, console);
  return RunVersion(flags, console);
}

}  // namespace

void Console::Error(const std::string& text) const {
  out.flush();
  err << "attn: " << OneLine(text) << "\n" << std::flush;
}

void Console::Note(const std::string& text) const {
  err << "attn: note: " << OneLine(text) << "\n" << std::flush;
}

std::unique_ptr<client::Client> ConnectOrExplain(const Flags& flags, const Console& console,
                                                 int* exit_code) {
  absl::StatusOr<client::ChannelOptions> options = ChannelOptionsOf(flags.connection);
  if (!options.ok()) {
    *exit_code = ExplainLocal(options.status(), console);
    return nullptr;
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(*options);
  if (client.ok()) return *std::move(client);
  *exit_code = ExitCodeForConnect(client.status());
  if (*exit_code == kExitUnreachable) {
    console.Error(Cat("cannot reach a server at ", flags.connection.channel.target, ": ",
                      Message(client.status())));
  } else {
    console.Error(Message(client.status()));
  }
  return nullptr;
}

int ExplainCall(const Flags& flags, const absl::Status& status, const Console& console) {
  const std::string& target = flags.connection.channel.target;
  const std::string what = Cat(absl::StatusCodeToString(status.code()), ": ", Message(status));
  const ExitCode code = ExitCodeForCall(status);
  switch (code) {
    case kExitRefused:
      console.Error(Cat("refused by ", target, ": ", what));
      break;
    case kExitUnreachable:
      console.Error(Cat("cannot reach ", target, ": ", Message(status)));
      break;
    default:
      console.Error(what);
  }
  return code;
}

int ExplainLocal(const absl::Status& status, const Console& console) {
  console.Error(Message(status));
  return ExitCodeForLocal(status);
}

int RunVersion(const Flags& flags, const Console& console) {
  const std::string protobuf =
      Cat(GOOGLE_PROTOBUF_VERSION / 1000000, ".", GOOGLE_PROTOBUF_VERSION / 1000 % 1000, ".",
          GOOGLE_PROTOBUF_VERSION % 1000);
  if (flags.output.json) {
    const nlohmann::ordered_json document = {{"version", ATTN_CLI_VERSION},
                                             {"contract", "attention.v1"},
                                             {"grpc", grpc::Version()},
                                             {"protobuf", protobuf}};
    console.out << document.dump(2) << "\n";
  } else {
    console.out << "attn " << ATTN_CLI_VERSION << " (attention.v1, gRPC " << grpc::Version()
                << ", protobuf " << protobuf << ")\n";
  }
  return kExitOk;
}

int RunAttn(std::vector<std::string> arguments, const Console& console) {
  Flags flags;
  const absl::Status parsed = ParseFlags(std::move(arguments), &flags);
  if (absl::IsCancelled(parsed)) {
    console.out << Message(parsed);
    return kExitOk;
  }
  if (!parsed.ok()) return ExplainLocal(parsed, console);
  try {
    return Dispatch(flags, console);
  } catch (const std::bad_alloc&) {
    // Files and --random can ask for more than this machine has.
    console.Error("out of memory on this machine");
    return kExitExhausted;
  }
}

}  // namespace attn::cli
