// attn plan.
#include <nlohmann/json.hpp>
#include <utility>

#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/interrupt.h"
#include "client/cli/plan_view.h"
#include "client/cli/problem.h"
#include "client/cli/report_view.h"
#include "client/cli/text.h"

namespace attn::cli {

namespace v1 = client::v1;

int RunPlan(const Flags& flags, const Console& console) {
  const v1::Pass pass = flags.pass == "backward" ? v1::PASS_BACKWARD : v1::PASS_FORWARD;
  absl::StatusOr<client::CallOptions> options = CallOptionsOf(flags.connection);
  if (!options.ok()) return ExplainLocal(options.status(), console);
  absl::StatusOr<Problem> problem = MakeProblem(
      flags.problem, pass == v1::PASS_BACKWARD ? Purpose::kPlanBackward : Purpose::kPlanForward);
  if (!problem.ok()) return ExplainLocal(problem.status(), console);
  int exit_code = kExitOk;
  const std::unique_ptr<client::Client> client = ConnectOrExplain(flags, console, &exit_code);
  if (client == nullptr) return exit_code;
  InterruptGuard interrupt;
  options->cancel = interrupt.flag();
  absl::StatusOr<v1::PlanResponse> plan = client->Plan(ToPlan(*problem, pass), *options);
  if (!plan.ok()) return ExplainCall(flags, plan.status(), console);
  if (flags.output.json) {
    const nlohmann::ordered_json document = {{"command", "plan"},
                                             {"server", flags.connection.channel.target},
                                             {"pass", flags.pass},
                                             {"plan", ToJson(*plan)}};
    console.out << document.dump(2) << "\n";
  } else {
    absl::StatusOr<v1::GetServerInfoResponse> info = client->ServerInfo(*options);
    if (!info.ok()) return ExplainCall(flags, info.status(), console);
    console.out << RenderPlan(*problem, pass, *plan, *info, StyleOf(flags.output));
  }
  if (!plan->path().empty()) return kExitOk;
  console.Error(Cat("no path meets --policy ", flags.problem.policy));
  return kExitRefused;
}

}  // namespace attn::cli
