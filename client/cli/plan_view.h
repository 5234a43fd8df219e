// A PlanResponse as the picture that FlashAttention is explained with, for an 80-column terminal.
#ifndef ATTN_CLIENT_CLI_PLAN_VIEW_H_
#define ATTN_CLIENT_CLI_PLAN_VIEW_H_

#include <string>

#include "client/cli/format.h"
#include "client/cli/problem.h"
#include "client/lib/client.h"

namespace attn::cli {

// `info` gives the device's measured copy rate, from which the waiting time of the standard
// algorithm follows; may be empty. Every number is the server's, except that time and the entries
// drawn.
std::string RenderPlan(const Problem& problem, client::v1::Pass pass,
                       const client::v1::PlanResponse& plan,
                       const client::v1::GetServerInfoResponse& info, const Style& style);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_PLAN_VIEW_H_
