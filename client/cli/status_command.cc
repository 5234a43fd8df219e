// attn status.
#include <time.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/interrupt.h"
#include "client/cli/report_view.h"
#include "client/cli/status_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

int Look(const Flags& flags, client::Client* client, const client::CallOptions& options,
         const Console& console) {
  absl::StatusOr<bool> healthy = client->Healthy("", options);
  if (!healthy.ok()) return ExplainCall(flags, healthy.status(), console);
  absl::StatusOr<v1::GetServerInfoResponse> info = client->ServerInfo(options);
  if (!info.ok()) return ExplainCall(flags, info.status(), console);
  if (flags.output.json) {
    const nlohmann::ordered_json document = {{"command", "status"},
                                             {"server", flags.connection.channel.target},
                                             {"serving", *healthy},
                                             {"info", ToJson(*info)}};
    // With --watch, one document per line.
    console.out << document.dump(flags.watch ? -1 : 2) << "\n";
  } else {
    console.out << RenderStatus(flags.connection.channel.target, *healthy, *info,
                                StyleOf(flags.output));
  }
  console.out.flush();
  return *healthy ? kExitOk : kExitUnreachable;
}

}  // namespace

std::string RenderStatus(const std::string& target, bool healthy,
                         const v1::GetServerInfoResponse& info, const Style& style) {
  std::string text =
      Cat(style.Bold(Cat("attnd ", info.version(), " at ", target)), "  ",
          healthy ? style.Green("SERVING") : style.Red("NOT SERVING"), "\n", Rule(style), "\n",
          PadRight("commit", 12), info.git_commit().empty() ? "unknown" : info.git_commit(), "\n",
          PadRight("up for", 12), FormatNanos(static_cast<double>(info.uptime_ns()), style), "\n\n",
          style.Bold("devices"), "\n");
  Table devices(2);
  for (const v1::DeviceInfo& device : info.devices()) {
    const auto measured = [](double value, const std::string& formatted) {
      return value > 0 ? formatted : std::string("not measured");
    };
    devices.Add(
        {Cat(DeviceName(device.kind()), " ", device.index()), device.isa(),
         Cat(device.cores(), device.kind() == v1::DEVICE_KIND_CUDA ? " SMs" : " threads"),
         FormatBytes(static_cast<double>(device.memory_bytes())),
         measured(device.matrix_tflops(), FormatSi(device.matrix_tflops() * 1e12, "FLOP/s")),
         measured(device.copy_gb_per_s(), FormatSi(device.copy_gb_per_s() * 1e9, "B/s"))});
    if (!device.name().empty()) devices.Add({"", Cat(device.name())});
    if (!device.error().empty()) {
      devices.Add({"", style.Red("takes no calls"), device.error()});
    }
  }
  text += Cat(devices.ToString(), "\n", style.Bold("paths, fastest first"), "\n");
  Table paths(2);
  for (const v1::PathInfo& path : info.paths()) {
    const std::string what =
        Cat(ClassName(path.path_class()), ", ", DeviceName(path.device_kind()));
    if (path.available()) {
      paths.Add({path.path(), what, style.Green("ready")});
      continue;
    }
    std::string why;
    for (const v1::Rejection& rejection : path.rejections()) {
      why += Cat(why.empty() ? "" : "; ", ReasonName(rejection.reason()),
                 rejection.detail().empty() ? "" : Cat(": ", rejection.detail()));
    }
    paths.Add({path.path(), what, style.Yellow("off"), why});
  }
  const v1::ServerLimits& limits = info.limits();
  Table table(2);
  const auto bytes = [](uint64_t value) { return FormatBytes(static_cast<double>(value)); };
  table.Add({"unary message", bytes(limits.max_unary_bytes()), "larger calls are streamed"});
  table.Add({"header", bytes(limits.max_header_bytes()), ""});
  table.Add({"stream chunk", bytes(limits.max_chunk_bytes()), ""});
  table.Add({"one call", bytes(limits.max_request_bytes()), "tensors in and out"});
  table.Add({"at once", bytes(limits.max_inflight_bytes()),
             Cat("in at most ", FormatCount(limits.max_inflight_requests()), " calls")});
  table.Add({"workspace", bytes(limits.workspace_limit_bytes()), "scratch memory of one call"});
  table.Add({"head_dim", Cat(limits.max_head_dim()), ""});
  return Cat(text, paths.ToString(), "\n", style.Bold("limits"), "\n", table.ToString());
}

int RunStatus(const Flags& flags, const Console& console) {
  absl::StatusOr<client::CallOptions> options = CallOptionsOf(flags.connection);
  if (!options.ok()) return ExplainLocal(options.status(), console);
  std::chrono::nanoseconds period{0};
  if (flags.watch) {
    absl::StatusOr<std::chrono::nanoseconds> parsed = ParseDuration(*flags.watch);
    if (!parsed.ok()) return ExplainLocal(Within("--watch", parsed.status()), console);
    period = *parsed;
  }
  int exit_code = kExitOk;
  const std::unique_ptr<client::Client> client = ConnectOrExplain(flags, console, &exit_code);
  if (client == nullptr) return exit_code;
  InterruptGuard interrupt;
  options->cancel = interrupt.flag();
  exit_code = Look(flags, client.get(), *options, console);
  while (flags.watch && !interrupt.flag()->load()) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(period);
    const timespec wait = {static_cast<time_t>(seconds.count()),
                           static_cast<long>((period - seconds).count())};
    if (nanosleep(&wait, nullptr) != 0) break;  // a signal
    if (!flags.output.json) console.out << "\n";
    exit_code = Look(flags, client.get(), *options, console);
  }
  return exit_code;
}

}  // namespace attn::cli
