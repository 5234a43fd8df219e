// attn forward, attn backward.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/check.h"
#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/interrupt.h"
#include "client/cli/problem.h"
#include "client/cli/progress.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

// One call made and what it gave.
struct Executed {
  std::string pass;
  v1::ExecutionReport report;
  CallFacts facts;
};

// Everything that forward and backward do alike around their calls.
class Run {
 public:
  Run(const Flags& flags, const Console& console, bool backward)
      : flags_(flags), console_(console), backward_(backward), style_(StyleOf(flags.output)) {}

  int Execute() {
    if (absl::Status status = Prepare(); !status.ok()) return ExplainLocal(status, console_);
    int exit_code = kExitOk;
    client_ = ConnectOrExplain(flags_, console_, &exit_code);
    if (client_ == nullptr) return exit_code;
    if (absl::Status status = Call(); !status.ok()) return ExplainCall(flags_, status, console_);
    if (absl::Status status = Keep(); !status.ok()) return ExplainLocal(status, console_);
    Print();
    if (AllPassed(checks_)) return kExitOk;
    console_.Error(Cat("the results differ from ", flags_.output.check));
    return kExitCheckFailed;
  }

 private:
  // Everything that can fail here does so before the server is asked to work.
  absl::Status Prepare() {
    absl::StatusOr<client::CallOptions> options = CallOptionsOf(flags_.connection);
    if (!options.ok()) return options.status();
    call_options_ = *std::move(options);
    absl::StatusOr<Problem> problem =
        MakeProblem(flags_.problem, backward_ ? Purpose::kBackward : Purpose::kForward);
    if (!problem.ok()) return problem.status();
    problem_ = *std::move(problem);
    if (!flags_.output.output.empty()) {
      absl::StatusOr<OutputTarget> target =
          OutputTarget::Create(flags_.output.output, backward_ ? 3 : 1);
      if (!target.ok()) return target.status();
      target_ = *std::move(target);
    }
    if (!flags_.output.check.empty()) {
      absl::StatusOr<TensorMap> expected = OpenTensors(flags_.output.check);
      if (!expected.ok()) return expected.status();
      expected_ = *std::move(expected);
    }
    if (flags_.output.save_inputs.empty()) return absl::OkStatus();
    if (!EndsWith(flags_.output.save_inputs, ".safetensors")) {
      return absl::InvalidArgumentError(
          Cat("--save-inputs ", flags_.output.save_inputs, ": must end with .safetensors"));
    }
    return SaveInputs();
  }

  absl::Status SaveInputs() const {
    absl::StatusOr<OutputTarget> target =
        OutputTarget::Create(flags_.output.save_inputs, problem_.Tensors().size());
    if (!target.ok()) return target.status();
    return target->Write(problem_.Tensors(), {}).status();
  }

  absl::Status Call() {
    InterruptGuard interrupt;
    ProgressMeter progress(flags_.connection.progress || console_.err_is_terminal,
                           console_.err_is_terminal);
    call_options_.cancel = interrupt.flag();
    if (progress.shown()) {
      call_options_.progress = [&progress](uint64_t sent, uint64_t sent_total, uint64_t received,
                                           uint64_t received_total) {
        progress.Update(sent, sent_total, received, received_total);
      };
    }
    absl::Status status = absl::OkStatus();
    if (!backward_ || problem_.out.empty()) status = CallForward(&progress);
    if (status.ok() && backward_) status = CallBackward(&progress);
    call_options_.progress = nullptr;
    call_options_.cancel = nullptr;
    return status;
  }

  absl::Status CallForward(ProgressMeter* progress) {
    client::ForwardCall call = ToForward(problem_);
    // The output type asked of backward is that of its gradients.
    if (backward_) call.header.mutable_options()->clear_out_dtype();
    absl::StatusOr<client::ForwardResult> result = client_->Forward(call, call_options_);
    progress->Clear();
    if (!result.ok()) return result.status();
    results_.push_back({"out", result->out});
    results_.push_back({"lse", result->lse});
    executed_.push_back({"forward",
                         std::move(result->report),
                         {result->latency, result->streamed, result->attempts}});
    if (backward_) {
      console_.Note("no out and lse given, so forward ran first");
      problem_.out = result->out;
      problem_.lse = result->lse;
    }
    return absl::OkStatus();
  }

  absl::Status CallBackward(ProgressMeter* progress) {
    absl::StatusOr<client::BackwardResult> result =
        client_->Backward(ToBackward(problem_), call_options_);
    progress->Clear();
    if (!result.ok()) return result.status();
    for (const auto& [name, tensor] :
         {std::pair("dq", &result->dq), std::pair("dk", &result->dk), std::pair("dv", &result->dv),
          std::pair("dbias", &result->dbias), std::pair("dsink", &result->dsink)}) {
      if (!tensor->empty()) results_.push_back({name, *tensor});
    }
    executed_.push_back({"backward",
                         std::move(result->report),
                         {result->latency, result->streamed, result->attempts}});
    return absl::OkStatus();
  }

  // Writes and checks the results.
  absl::Status Keep() {
    if (target_) {
      absl::StatusOr<std::vector<std::string>> written =
          target_->Write(results_, {{"attn.path", executed_.back().report.path()},
                                    {"attn.kernel", executed_.back().report.kernel()}});
      if (!written.ok()) return written.status();
      written_ = *std::move(written);
    }
    if (flags_.output.check.empty()) return absl::OkStatus();
    absl::StatusOr<std::vector<TensorCheck>> checks =
        CheckResults(results_, expected_, flags_.problem.prefix, problem_.inputs.q.dtype,
                     flags_.output.tolerance);
    if (!checks.ok()) return Within(Cat("--check ", flags_.output.check), checks.status());
    checks_ = *std::move(checks);
    return absl::OkStatus();
  }

  void Print() const {
    if (flags_.output.json) {
      console_.out << Document().dump(2) << "\n";
      return;
    }
    for (const Executed& executed : executed_) {
      for (const std::string& line :
           Wrap(Cat(executed.pass, ": ", Summary(problem_, style_)), kPageWidth)) {
        console_.out << style_.Bold(line) << "\n";
      }
      console_.out << Rule(style_) << "\n"
                   << RenderReport(executed.report, executed.facts, style_) << "\n";
    }
    Table results(2);
    for (size_t i = 0; i < results_.size(); ++i) {
      const NamedTensor& result = results_[i];
      results.Add({result.name, std::string(LowerName(result.tensor.dtype)),
                   ShapeString(result.tensor.shape),
                   i < written_.size() ? Cat(style_.Arrow(), " ", written_[i]) : ""});
    }
    console_.out << style_.Bold("results") << "\n" << results.ToString();
    if (!checks_.empty()) console_.out << "\n" << RenderChecks(checks_, style_);
  }

  nlohmann::ordered_json Document() const {
    nlohmann::ordered_json document = {{"command", flags_.command},
                                       {"server", flags_.connection.channel.target},
                                       {"calls", nlohmann::ordered_json::array()},
                                       {"results", nlohmann::ordered_json::array()},
                                       {"checks", nlohmann::ordered_json::array()}};
    for (const Executed& executed : executed_) {
      document["calls"].push_back({{"pass", executed.pass},
                                   {"client", ToJson(executed.report, executed.facts)},
                                   {"report", ToJson(executed.report)}});
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      document["results"].push_back(
          {{"name", results_[i].name},
           {"dtype", LowerName(results_[i].tensor.dtype)},
           {"shape", results_[i].tensor.shape},
           {"file", i < written_.size() ? nlohmann::ordered_json(written_[i]) : nullptr}});
    }
    for (const TensorCheck& check : checks_) {
      document["checks"].push_back({{"name", check.name},
                                    {"passed", check.passed},
                                    {"maxAbsError", check.max_abs_error},
                                    {"maxExpected", check.max_expected},
                                    {"error", check.error},
                                    {"tolerance", check.tolerance},
                                    {"problem", check.problem}});
    }
    return document;
  }

  const Flags& flags_;
  const Console& console_;
  const bool backward_;
  const Style style_;
  client::CallOptions call_options_;
  Problem problem_;
  std::optional<OutputTarget> target_;
  TensorMap expected_;
  std::unique_ptr<client::Client> client_;
  std::vector<Executed> executed_;
  std::vector<NamedTensor> results_;
  std::vector<std::string> written_;
  std::vector<TensorCheck> checks_;
};

}  // namespace

int RunForward(const Flags& flags, const Console& console) {
  return Run(flags, console, /*backward=*/false).Execute();
}

int RunBackward(const Flags& flags, const Console& console) {
  return Run(flags, console, /*backward=*/true).Execute();
}

}  // namespace attn::cli
