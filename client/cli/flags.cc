#include "client/cli/flags.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "client/cli/help.h"
#include "client/cli/load_flags.h"
#include "client/cli/text.h"
#include "proto/wire/trace_context.h"

namespace attn::cli {
namespace {

constexpr char kExitCodes[] = R"(Exit status:
  0  done
  1  internal error, here or in the server
  2  wrong usage, or an input file that cannot be used
  3  the server cannot be reached, or is draining
  4  --check (load: --verify-every) found a difference
  5  refused: INVALID_ARGUMENT, FAILED_PRECONDITION, UNIMPLEMENTED, …
  6  the server, or this machine, is out of a resource (RESOURCE_EXHAUSTED)
  7  deadline exceeded, or cancelled (Ctrl-C)
  8  load: not steady, failed calls, a threshold passed, or no rate meets --slo
Errors are one line on stderr.)";

constexpr char kExamples[] = R"(Examples:
  attn forward --random --seqlen-q 1024 --causal
  attn forward --q q.npy --k k.npy --v v.npy --output results/
  attn backward --input layer.safetensors --output grads.safetensors --json
  attn plan --seqlen-q 8192 --num-heads 32 --num-kv-heads 8 --causal
  attn status --server gpu-host:50051
  attn load --rate 200 --seqlen-q 512 --causal --html report.html

"attn COMMAND --help" lists the options of a command.
)";

std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void DeclareConnection(CLI::App* app, ConnectionFlags* flags) {
  client::ChannelOptions* channel = &flags->channel;
  const char* group = "Connection";
  app->add_option("--server", channel->target, "HOST:PORT or unix:/PATH (environment: ATTN_SERVER)")
      ->capture_default_str()
      ->group(group);
  app->add_option("--tls-ca", channel->tls_ca, "PEM file of the authority to trust; turns TLS on")
      ->group(group);
  app->add_option("--tls-cert", channel->tls_cert, "PEM file of this client's certificate (mTLS)")
      ->group(group);
  app->add_option("--tls-key", channel->tls_key, "PEM file of this client's key (mTLS)")
      ->group(group);
  app->add_option("--tls-server-name", channel->tls_server_name, "Name to check the server for")
      ->group(group);
  app->add_option("--connect-timeout", flags->connect_timeout, "How long to look for the server")
      ->capture_default_str()
      ->group(group);
  app->add_option("--deadline", flags->deadline, "For a call, retries included: 500ms, 30s, 2m")
      ->capture_default_str()
      ->group(group);
  app->add_option("--retries", channel->max_retries, "Times to try again where the server is busy")
      ->check(CLI::Range(0, 100))
      ->capture_default_str()
      ->group(group);
  app->add_option("--streaming", flags->streaming, "auto (by size), always, never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str()
      ->group(group);
  app->add_option("--traceparent", flags->traceparent,
                  "W3C trace context to send along (default: the variable TRACEPARENT)")
      ->group(group);
  app->add_flag("--progress", flags->progress, "Show progress though stderr is no terminal")
      ->group(group);
}

void DeclarePrinting(CLI::App* app, OutputFlags* flags) {
  app->add_flag("--json", flags->json, "One JSON document on stdout instead of text")
      ->group("Output");
  app->add_flag("--ascii", flags->ascii, "Draw with ASCII (default where the locale is not UTF-8)")
      ->group("Output");
  app->add_option("--color", flags->color, "auto (a terminal, and NO_COLOR unset), always, never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str()
      ->group("Output");
}

void DeclareTensors(CLI::App* app, ProblemFlags* flags, bool backward) {
  const char* group = "Tensors (FILE.npy, FILE.safetensors or FILE.safetensors:NAME)";
  app->add_option("--input", flags->input,
                  "File with tensors named q, k, v and, where wanted, dout, out, lse, dlse, bias, "
                  "alibi_slopes, sinks, block_mask, cu_seqlens_q/k, seqlens_q/k")
      ->group(group);
  app->add_option("--prefix", flags->prefix, "Stands before the names in --input")->group(group);
  app->add_option("--q", flags->q, "[batch, seqlen_q, num_heads, head_dim]; THD [total_q, …]")
      ->group(group);
  app->add_option("--k", flags->k, "[batch, seqlen_k, num_kv_heads, head_dim]")->group(group);
  app->add_option("--v", flags->v, "[batch, seqlen_k, num_kv_heads, head_dim_v]")->group(group);
  if (backward) {
    app->add_option("--dout", flags->dout, "Gradient of out; or 'random', 'ones'")->group(group);
    app->add_option("--out", flags->out, "As forward returned it; without it, forward runs first")
        ->group(group);
    app->add_option("--lse", flags->lse, "As forward returned it")->group(group);
    app->add_option("--dlse", flags->dlse, "Gradient of lse; or 'random'")->group(group);
  }
  app->add_option("--bias", flags->bias, "Added to the scores; or 'random'")->group(group);
  app->add_option("--alibi-slopes", flags->alibi_slopes,
                  "[num_heads] or [batch, num_heads]; or 'standard' (2^(-8h/H)), 'random'")
      ->group(group);
  app->add_option("--sinks", flags->sinks, "[num_heads]; or 'random'")->group(group);
  app->add_option("--block-mask", flags->block_mask, "U8 or BOOL; or 'random'")->group(group);
}

void DeclareShape(CLI::App* app, ProblemFlags* flags, bool plan) {
  const char* group = plan ? "Shape (without files)" : "Made-up tensors";
  if (!plan) {
    app->add_flag("--random", flags->random, "Gaussian q, k, v (and dout) of the shape below")
        ->group(group);
  }
  app->add_option("--seed", flags->seed, "The same seed makes the same tensors")
      ->capture_default_str()
      ->group(group);
  app->add_option("--batch", flags->batch, "Sequences [1]")->group(group);
  app->add_option("--seqlen-q", flags->seqlen_q, "Queries per sequence [1024]")->group(group);
  app->add_option("--seqlen-k", flags->seqlen_k, "Keys per sequence [seqlen-q]")->group(group);
  app->add_option("--num-heads", flags->num_heads, "Query heads [8]")->group(group);
  app->add_option("--num-kv-heads", flags->num_kv_heads, "Key/value heads [num-heads]")
      ->group(group);
  app->add_option("--head-dim", flags->head_dim, "Of q and k [64]")->group(group);
  app->add_option("--head-dim-v", flags->head_dim_v, "Of v and out [head-dim]")->group(group);
}

void DeclareSemantics(CLI::App* app, ProblemFlags* flags) {
  const char* group = "What is computed";
  app->add_option("--dtype", flags->dtype,
                  "fp32, fp16, bf16: converts q, k, v, dout from files (F64 only so; a .npy of "
                  "uint16 or V2 is bf16 only so); made-up tensors: fp32 by default")
      ->group(group);
  app->add_option("--layout", flags->layout, "bshd or thd (packed) [by the rank of q]")
      ->check(CLI::IsMember({"bshd", "thd"}, CLI::ignore_case))
      ->group(group);
  app->add_option("--cu-seqlens-q", flags->cu_seqlens_q, "THD: sequence starts, 0,5,9 or FILE")
      ->group(group);
  app->add_option("--cu-seqlens-k", flags->cu_seqlens_k, "THD: sequence starts, 0,5,9 or FILE")
      ->group(group);
  app->add_option("--seqlens-q", flags->seqlens_q, "BSHD: valid queries of each, 5,9 or FILE")
      ->group(group);
  app->add_option("--seqlens-k", flags->seqlens_k, "BSHD: valid keys of each, 5,9 or FILE")
      ->group(group);
  app->add_option("--softmax-scale", flags->softmax_scale, "[1/sqrt(head_dim)]")->group(group);
  app->add_flag("--causal", flags->causal, "No query sees a later key")->group(group);
  app->add_option("--alignment", flags->alignment, "bottom-right or top-left diagonal")
      ->check(CLI::IsMember({"bottom-right", "top-left"}))
      ->capture_default_str()
      ->group(group);
  app->add_option("--window-left", flags->window_left, "Keys seen before the query's own position")
      ->group(group);
  app->add_option("--window-right", flags->window_right, "Keys seen after it")->group(group);
  app->add_option("--softcap", flags->softcap, "Caps logits: c tanh(t / c)")->group(group);
  app->add_option("--dropout-p", flags->dropout_p, "Probability of dropping; needs --dropout-seed")
      ->group(group);
  app->add_option("--dropout-seed", flags->dropout_seed, "Philox key")->group(group);
  app->add_option("--dropout-offset", flags->dropout_offset, "Fourth word of the Philox counter")
      ->group(group);
  app->add_option("--block-q", flags->block_q, "Queries per block of --block-mask [128]")
      ->group(group);
  app->add_option("--block-k", flags->block_k, "Keys per block of --block-mask [128]")
      ->group(group);
  app->add_flag("--deterministic", flags->deterministic, "Bitwise the same from run to run")
      ->group(group);
  app->add_option("--out-dtype", flags->out_dtype, "Of results: fp32, or the dtype of q")
      ->group(group);
  app->add_option("--policy", flags->policy,
                  "auto, require-flash, force-standard, or a path's name")
      ->capture_default_str()
      ->group(group);
  app->add_option("--report-level", flags->report_level, "basic, or full (a sentence per reason)")
      ->check(CLI::IsMember({"basic", "full"}))
      ->capture_default_str()
      ->group(group);
}

void DeclareRun(CLI::App* app, Flags* flags, bool backward) {
  DeclareTensors(app, &flags->problem, backward);
  DeclareShape(app, &flags->problem, /*plan=*/false);
  DeclareSemantics(app, &flags->problem);
  OutputFlags* output = &flags->output;
  app->add_option("-o,--output", output->output,
                  "FILE.safetensors, a directory (NAME.npy each), or, forward, FILE.npy (out "
                  "alone). bf16 goes to .npy as uint16 bits")
      ->group("Output");
  app->add_option("--save-inputs", output->save_inputs, "Write the tensors sent to this file")
      ->group("Output");
  app->add_option("--check", output->check,
                  "File with the expected results by name (F64 allowed); exit status 4 where max "
                  "|error| / max |expected| of one is over the tolerance")
      ->group("Output");
  app->add_option("--tolerance", output->tolerance,
                  "For --check [fp32 and lse 1e-5, fp16 2e-3, bf16 1.6e-2]")
      ->check(CLI::NonNegativeNumber)
      ->group("Output");
  DeclarePrinting(app, output);
  DeclareConnection(app, &flags->connection);
}

void DeclareCommands(CLI::App* app, Flags* flags) {
  CLI::App* forward =
      app->add_subcommand("forward", "Compute attention: out and lse, with a report");
  DeclareRun(forward, flags, /*backward=*/false);

  CLI::App* backward = app->add_subcommand("backward", "Compute the gradients: dq, dk, dv");
  DeclareRun(backward, flags, /*backward=*/true);

  CLI::App* plan = app->add_subcommand(
      "plan", "Say which path a call would take, why, and what it would cost, without running it");
  plan->add_option("--pass", flags->pass, "forward or backward")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str()
      ->group("What is computed");
  DeclareTensors(plan, &flags->problem, /*backward=*/true);
  DeclareShape(plan, &flags->problem, /*plan=*/true);
  DeclareSemantics(plan, &flags->problem);
  DeclarePrinting(plan, &flags->output);
  DeclareConnection(plan, &flags->connection);

  CLI::App* status =
      app->add_subcommand("status", "Show a server's health, devices, paths, limits");
  status->add_option("--watch", flags->watch, "Look again every so often (2s) until Ctrl-C")
      ->expected(0, 1)
      ->default_str("2s");
  DeclarePrinting(status, &flags->output);
  DeclareConnection(status, &flags->connection);

  CLI::App* load = app->add_subcommand(
      "load", "Send calls as fast as they return, or at a rate, and measure latency");
  DeclareLoad(load, &flags->load, &flags->connection);
  DeclareTensors(load, &flags->problem, /*backward=*/true);
  DeclareShape(load, &flags->problem, /*plan=*/true);
  DeclareSemantics(load, &flags->problem);
  DeclarePrinting(load, &flags->output);
  DeclareConnection(load, &flags->connection);
  load->get_option("--retries")->default_str("0");

  CLI::App* merge = app->add_subcommand(
      "merge", "Merge partial results (out, lse) over disjoint keys into the whole (no server)");
  merge->add_option("parts", flags->parts, "FILE.safetensors with out and lse, BSHD or THD")
      ->required()
      ->type_name("FILE...");
  merge->add_option("-o,--output", flags->output.output, "FILE.safetensors or a directory")
      ->required();
  merge->add_option("--out-dtype", flags->problem.out_dtype, "Of the merged out [fp32]");
  DeclarePrinting(merge, &flags->output);

  CLI::App* version = app->add_subcommand("version", "Print the version");
  DeclarePrinting(version, &flags->output);
  for (CLI::App* command : app->get_subcommands({})) command->footer(kExitCodes);
}

}  // namespace

void DeclareFlags(CLI::App* app, Flags* flags) {
  app->description("attn: exact attention on an attnd server");
  app->footer(Cat(kExamples, "\n", kExitCodes));
  app->formatter(std::make_shared<HelpFormatter>());
  app->require_subcommand(1);
  DeclareCommands(app, flags);
}

absl::Status ParseFlags(std::vector<std::string> arguments, Flags* flags) {
  // CLI11 reports everything, help included, by throwing; nothing of it leaves this function.
  CLI::App app;
  app.name("attn");
  // Not by CLI11: it lets the environment speak for every subcommand, also those not chosen, and so
  // over what the chosen one was told.
  if (const char* server = std::getenv("ATTN_SERVER"); server != nullptr && *server != '\0') {
    flags->connection.channel.target = server;
  }
  DeclareFlags(&app, flags);
  const bool bare = arguments.empty();
  std::reverse(arguments.begin(), arguments.end());
  try {
    if (bare) throw CLI::CallForHelp();
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    return absl::CancelledError((chosen.empty() ? &app : chosen.front())->help());
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const std::string command = chosen.empty() ? "attn" : Cat("attn ", chosen.front()->get_name());
    return absl::InvalidArgumentError(Cat(OneLine(error.what()), " (see '", command, " --help')"));
  }
  const CLI::App* command = app.get_subcommands().front();
  flags->command = command->get_name();
  // Under load a refusal is a result to count, not a thing to smooth over.
  if (flags->command == "load" && command->get_option("--retries")->count() == 0) {
    flags->connection.channel.max_retries = 0;
  }
  return absl::OkStatus();
}

absl::Status ParseProblemArguments(std::vector<std::string> arguments, ProblemFlags* flags) {
  CLI::App app;
  DeclareTensors(&app, flags, /*backward=*/true);
  DeclareShape(&app, flags, /*plan=*/true);
  DeclareSemantics(&app, flags);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(OneLine(error.what()));
  }
  return absl::OkStatus();
}

Style StyleOf(const OutputFlags& flags) {
  return DetectStyle(flags.ascii, flags.color == "always"  ? ColorMode::kAlways
                                  : flags.color == "never" ? ColorMode::kNever
                                                           : ColorMode::kAuto);
}

absl::StatusOr<client::ChannelOptions> ChannelOptionsOf(const ConnectionFlags& flags) {
  client::ChannelOptions options = flags.channel;
  absl::StatusOr<std::chrono::nanoseconds> timeout = ParseDuration(flags.connect_timeout);
  if (!timeout.ok()) return Within("--connect-timeout", timeout.status());
  options.connect_timeout = std::chrono::ceil<std::chrono::milliseconds>(*timeout);
  return options;
}

absl::StatusOr<client::CallOptions> CallOptionsOf(const ConnectionFlags& flags) {
  client::CallOptions options;
  absl::StatusOr<std::chrono::nanoseconds> deadline = ParseDuration(flags.deadline);
  if (!deadline.ok()) {
    return Within("--deadline", deadline.status());
  }
  options.deadline = *deadline;
  if (flags.streaming != "auto") options.streaming = flags.streaming == "always";
  options.traceparent = flags.traceparent;
  if (!flags.traceparent.empty()) {
    absl::Status valid = wire::CheckTraceparent(flags.traceparent);
    if (!valid.ok()) return Within("--traceparent", valid);
  } else if (const char* value = std::getenv("TRACEPARENT"); value != nullptr) {
    // The environment's may be meant for others; a malformed one is ignored, as the specification
    // asks.
    if (const auto trace = wire::TraceContext::Parse(value)) {
      options.traceparent = trace->ToString();
    }
  }
  return options;
}

}  // namespace attn::cli
