// The command line, through CLI11, which is used in this file alone.
#include <CLI/CLI.hpp>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/api/text.h"
#include "server/config/config.h"

namespace attn::server {
namespace {

constexpr char kFooter[] =
    "Precedence: flag > environment variable ATTND_<NAME> (--max-unary-bytes is\n"
    "ATTND_MAX_UNARY_BYTES; lists are separated by commas) > --config file > default.\n"
    "The file is TOML: one \"name = value\" a line, names as above without dashes in front;\n"
    "--check-config prints one. Sizes take KiB, MiB, GiB; durations ms, s, m.\n"
    "SIGTERM or SIGINT drains and exits with status 0; a second one does not wait.\n"
    "SIGHUP reads the settings again and applies disable-path and log-level.";

// Breaks help at 80 columns; the formatter indents but does not wrap.
std::string Wrap(const std::string& help) {
  std::string out;
  size_t column = 0;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(help, ' '))) {
    if (column > 0) {
      const bool fits = column + 1 + word.size() <= 80;
      out += fits ? ' ' : '\n';
      column = fits ? column + 1 : 0;
    }
    out += word;
    column += word.size();
  }
  return out;
}

void AddBytes(CLI::App& app, const std::string& name, uint64_t* value, const std::string& help,
              const std::string& default_text, const std::string& group = "Limits") {
  app.add_option_function<std::string>(
         name, [value](const std::string& text) { *value = ParseBytes(text).value_or(0); }, help)
      ->check(
          [](const std::string& text) { return std::string(ParseBytes(text).status().message()); })
      ->type_name("SIZE")
      ->default_str(default_text)
      ->group(group);
}

void AddListening(CLI::App& app, Config* c) {
  const std::string group = "Listening";
  app.add_option("--listen", c->listen,
                 "Serve gRPC here: host:port, [v6]:port or unix:/path; port 0 lets the system "
                 "choose. May be repeated")
      ->type_name("ADDR")
      ->default_str("127.0.0.1:50051")
      ->allow_extra_args(false)
      ->group(group);
  app.add_option("--metrics-listen", c->metrics_listen,
                 "Serve /metrics, /healthz and /readyz over plain HTTP here; empty: nowhere")
      ->type_name("ADDR")
      ->default_str(c->metrics_listen)
      ->group(group);
  app.add_option("--ports-file", c->ports_file,
                 "Once ready, write the bound addresses to this file as JSON")
      ->type_name("FILE")
      ->group(group);
  app.add_flag("--allow-insecure-public", c->allow_insecure_public,
               "Allow --listen on an address other hosts can reach without TLS")
      ->group(group);
  const std::string tls = "TLS (PEM files)";
  app.add_option("--tls-cert", c->tls_cert, "Certificate chain of this server")
      ->type_name("FILE")
      ->group(tls);
  app.add_option("--tls-key", c->tls_key, "Private key of this server")
      ->type_name("FILE")
      ->group(tls);
  app.add_option("--tls-client-ca", c->tls_client_ca,
                 "Require client certificates signed by this authority (mTLS)")
      ->type_name("FILE")
      ->group(tls);
}

void AddDuration(CLI::App& app, const std::string& name, std::chrono::milliseconds* value,
                 const std::string& help, const std::string& default_text) {
  app.add_option_function<std::string>(
         name,
         [value](const std::string& text) {
           *value = ParseDuration(text).value_or(std::chrono::milliseconds(0));
         },
         help)
      ->check([](const std::string& text) {
        return std::string(ParseDuration(text).status().message());
      })
      ->type_name("DURATION")
      ->default_str(default_text)
      ->group("Work");
}

void AddWork(CLI::App& app, Config* c) {
  const std::string group = "Work";
  app.add_option("--threads", c->threads, "Compute threads of the CPU paths; 0: one per core")
      ->type_name("N")
      ->default_str("0")
      ->group(group);
  app.add_option("--executor-workers", c->executor_workers,
                 "Calls that run at the same time; 0: 2, with GPUs two more than all their lanes")
      ->type_name("N")
      ->default_str("0")
      ->group(group);
  app.add_option("--disable-path", c->disable_path,
                 "Never take this path, for example flash_cpu. May be repeated; SIGHUP reads it "
                 "anew")
      ->type_name("PATH")
      ->allow_extra_args(false)
      ->group(group);
  app.add_flag("--cpu-fallback", c->cpu_fallback,
               "On a host with GPUs, let the CPU paths serve what no CUDA path can")
      ->group(group);
  AddDuration(app, "--drain-timeout", &c->drain_timeout,
              "On SIGTERM, how long calls in progress may take to finish", "30s");
  AddDuration(app, "--stream-idle-timeout", &c->stream_idle_timeout,
              "End a stream whose caller sends or reads nothing for so long; 0: never", "60s");
  AddDuration(app, "--canary-interval", &c->canary_interval,
              "Check the path that calls take by a call of the server's own this often; 0: never",
              "15s");
}

void AddGpus(CLI::App& app, Config* c) {
  const std::string group = "GPUs";
  app.add_option("--cuda-devices", c->cuda_devices,
                 "Which CUDA devices to use: all, none, or indices with commas between them")
      ->type_name("LIST")
      ->default_str(c->cuda_devices)
      ->group(group);
  app.add_option("--device-lanes", c->device_lanes,
                 "Calls under way at once on each GPU: copied in, computed, copied out")
      ->type_name("N")
      ->default_str("4")
      ->group(group);
  AddBytes(app, "--device-memory-limit", &c->device_memory_limit_bytes,
           "Memory to use of each GPU; 0: nine tenths of what is free at the start", "0", group);
}

void AddLimits(CLI::App& app, Config* c) {
  AddBytes(app, "--max-unary-bytes", &c->max_unary_bytes,
           "Largest unary message in or out, below 2 GiB; larger tensors go by streaming",
           "256MiB");
  AddBytes(app, "--max-request-bytes", &c->max_request_bytes,
           "Tensor bytes in and out of one call, streaming included; 0: 16 GiB, at most half of "
           "memory",
           "0");
  AddBytes(app, "--max-inflight-bytes", &c->max_inflight_bytes,
           "Tensor and scratch bytes of all calls at once; 0: half of memory", "0");
  app.add_option("--max-inflight-requests", c->max_inflight_requests, "Calls admitted at once")
      ->type_name("N")
      ->default_str("256")
      ->group("Limits");
  app.add_option("--max-concurrent-streams", c->max_concurrent_streams,
                 "Calls open at once on one connection")
      ->type_name("N")
      ->default_str("256")
      ->group("Limits");
  AddBytes(app, "--workspace-limit-bytes", &c->workspace_limit_bytes,
           "Scratch memory of one call; 0: a quarter of memory", "0");
}

void AddLogsAndModes(CLI::App& app, Config* c) {
  static const auto* levels = new std::map<std::string, LogLevel>{{"debug", LogLevel::kDebug},
                                                                  {"info", LogLevel::kInfo},
                                                                  {"warn", LogLevel::kWarn},
                                                                  {"error", LogLevel::kError},
                                                                  {"off", LogLevel::kOff}};
  app.add_option_function<std::string>(
         "--log-level", [c](const std::string& name) { c->log_level = levels->at(name); },
         "debug (a line per call), info, warn, error or off; to standard error")
      ->check(CLI::IsMember(levels).description(""))
      ->type_name("LEVEL")
      ->default_str("info")
      ->group("Logs");
  app.add_option_function<std::string>(
         "--log-format",
         [c](const std::string& name) {
           c->log_format = name == "json" ? LogFormat::kJson : LogFormat::kText;
         },
         "text or json (one object a line)")
      ->check(CLI::IsMember(std::vector<std::string>{"text", "json"}).description(""))
      ->type_name("FORMAT")
      ->default_str("text")
      ->group("Logs");
  app.add_flag("--self-test-only", c->self_test_only,
               "Run the start-up self-test, print a line per path, and exit: 0 where all passed")
      ->group("Modes");
  app.add_flag("--check-config", c->check_config, "Print the effective settings and exit")
      ->group("Modes");
}

std::unique_ptr<CLI::App> MakeApp(Config* config) {
  auto app = std::make_unique<CLI::App>(
      "attnd serves exact attention, forward and backward, over gRPC.", "attnd");
  app->get_formatter()->column_width(38);
  app->set_help_flag("-h,--help", "Print this and exit")->group("Modes");
  app->set_version_flag("--version", VersionText(), "Print the version and exit")->group("Modes");
  app->footer(kFooter);
  app->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  AddListening(*app, config);
  AddWork(*app, config);
  AddGpus(*app, config);
  AddLimits(*app, config);
  AddLogsAndModes(*app, config);
  for (CLI::Option* option : app->get_options([](CLI::Option*) { return true; })) {
    option->description(Wrap(option->get_description()));
  }
  return app;
}

std::string VariableName(const CLI::Option& option) {
  return Cat("ATTND_",
             absl::AsciiStrToUpper(absl::StrReplaceAll(option.get_lnames()[0], {{"-", "_"}})));
}

// CLI11 takes the arguments last first.
void Parse(CLI::App& app, const std::vector<std::string>& arguments) {
  app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
}

bool IsMode(const CLI::Option& option) {
  const std::string& name = option.get_lnames()[0];
  return name == "help" || name == "version";
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const Environment& environment) {
  CommandLine result;
  std::unique_ptr<CLI::App> app;
  try {
    // First pass: which flags the command line has. The file is not read.
    Config scratch;
    app = MakeApp(&scratch);
    std::string file;
    app->add_option("--config", file, "Read settings from this file")
        ->type_name("FILE")
        ->group("Modes");
    Parse(*app, arguments);

    // Second pass: environment variables become flags where the command line has none. CLI11's own
    // order would put the file before the environment.
    std::vector<std::string> all;
    for (const CLI::Option* option : app->get_options()) {
      if (IsMode(*option) || option->count() > 0) continue;
      const std::optional<std::string> value = environment(VariableName(*option));
      if (!value) continue;
      const bool list = option->get_items_expected_max() > 1;
      std::vector<std::string> values = {*value};
      if (list) values = absl::StrSplit(*value, ',', absl::SkipWhitespace());
      for (const std::string& entry : values) {
        all.push_back(Cat("--", option->get_lnames()[0], "=", entry));
      }
    }
    all.insert(all.end(), arguments.begin(), arguments.end());
    app = MakeApp(&result.config);
    app->set_config("--config", "", "Read settings from this file", false)
        ->type_name("FILE")
        ->group("Modes");
    app->allow_config_extras(CLI::config_extras_mode::error);
    Parse(*app, all);
  } catch (const CLI::CallForHelp&) {
    result.print = app->help();
    return result;
  } catch (const CLI::CallForVersion& version) {
    result.print = Cat(version.what(), "\n");
    return result;
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(Cat(error.what(), " (see attnd --help)"));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(Cat("settings: ", error.what()));
  }
  if (absl::Status s = result.config.Check(); !s.ok()) return s;
  return result;
}

}  // namespace attn::server
