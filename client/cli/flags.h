// The command line of attn, as values. The names are those of attention.proto where it has them.
#ifndef ATTN_CLIENT_CLI_FLAGS_H_
#define ATTN_CLIENT_CLI_FLAGS_H_

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/format.h"
#include "client/lib/client.h"

namespace attn::cli {

// How to reach the server and how to call it.
struct ConnectionFlags {
  client::ChannelOptions channel;
  std::string connect_timeout = "5s";
  std::string deadline = "10m";
  std::string streaming = "auto";  // auto, always, never
  std::string traceparent;         // empty: the environment's TRACEPARENT, where it is valid
  bool progress = false;
};

// The attention call: where tensors come from, and what is computed.
struct ProblemFlags {
  // Tensors in files. Each: FILE.npy, FILE.safetensors or FILE.safetensors:NAME.
  std::string input;   // one file with tensors named q, k, v, …
  std::string prefix;  // stands before those names
  std::string q, k, v, out, lse, dout, dlse;
  std::string bias, alibi_slopes, sinks, block_mask;  // or "random"; alibi_slopes also "standard"
  // "0,5,9", or a file as above.
  std::string cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k;

  // Made-up tensors. Unset sizes have the defaults that --help states.
  bool random = false;
  uint64_t seed = 0;
  std::optional<int64_t> batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, head_dim_v;

  std::string dtype;   // "": as the files have it; fp32 for made-up tensors
  std::string layout;  // "": by the rank of q

  std::optional<float> softmax_scale, softcap, dropout_p;
  std::optional<uint64_t> dropout_seed;
  uint32_t dropout_offset = 0;
  bool causal = false;
  bool deterministic = false;
  std::string alignment = "bottom-right";
  std::optional<int64_t> window_left, window_right, block_q, block_k;
  std::string out_dtype;
  std::string policy = "auto";
  std::string report_level = "basic";
};

// What becomes of the answer.
struct OutputFlags {
  std::string output;
  std::string save_inputs;
  std::string check;
  std::optional<double> tolerance;
  bool json = false;
  bool ascii = false;
  std::string color = "auto";
};

// attn load: what is sent when, for how long, and what becomes of the numbers.
struct LoadFlags {
  std::string concurrency;  // "8", or "1,2,4,8": a sweep
  std::string rate;         // "500", or "100,200,400": a sweep. Calls per second
  std::string arrivals = "poisson";
  std::string steps;  // "100:10s,200:10s"
  std::string ramp;   // "100:500:30s"
  std::string trace;  // a CSV file
  double trace_speed = 1;
  std::string slo;  // "p99<50ms"
  int max_in_flight = 256;

  std::string duration = "10s", warm_up = "2s", window = "1s", drain = "10s";
  std::optional<int64_t> calls;
  double stability = 10;  // percent; 0: not judged
  bool until_stable = false;
  double abort_errors = 50;  // percent
  std::string abort_p99;
  double allow_failed = 1;  // percent

  std::string mix;  // a JSON file
  std::string pass = "forward";
  std::string payload = "inline";
  int64_t verify_every = 0;
  std::string metrics;  // URL
  std::string csv, calls_csv, html;
};

struct Flags {
  ConnectionFlags connection;
  ProblemFlags problem;
  OutputFlags output;
  LoadFlags load;
  std::string pass = "forward";      // plan
  std::optional<std::string> watch;  // status: seconds between looks
  std::vector<std::string> parts;    // merge
  std::string command;               // which subcommand was given
};

// Declares every subcommand on `app`; parsing it fills `flags`, which must outlive `app`.
void DeclareFlags(CLI::App* app, Flags* flags);

// Parses the arguments (without the program's name). OK: `flags` are filled. Errors: CANCELLED with
// the text to print on stdout where help was asked for; INVALID_ARGUMENT with one line otherwise.
absl::Status ParseFlags(std::vector<std::string> arguments, Flags* flags);

// Reads "--name=value" arguments of a call's shape, tensors and options over what `flags` hold.
// Errors: INVALID_ARGUMENT, one line.
absl::Status ParseProblemArguments(std::vector<std::string> arguments, ProblemFlags* flags);

Style StyleOf(const OutputFlags& flags);

// Errors: INVALID_ARGUMENT.
absl::StatusOr<client::ChannelOptions> ChannelOptionsOf(const ConnectionFlags& flags);

// Options of one call. The deadline covers it whole. Errors: INVALID_ARGUMENT.
absl::StatusOr<client::CallOptions> CallOptionsOf(const ConnectionFlags& flags);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_FLAGS_H_
