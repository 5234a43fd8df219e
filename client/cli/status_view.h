// A server's state as a page.
#ifndef ATTN_CLIENT_CLI_STATUS_VIEW_H_
#define ATTN_CLIENT_CLI_STATUS_VIEW_H_

#include <string>

#include "client/cli/format.h"
#include "client/lib/client.h"

namespace attn::cli {

std::string RenderStatus(const std::string& target, bool healthy,
                         const client::v1::GetServerInfoResponse& info, const Style& style);

}  // namespace attn::cli

#endif  // ATTN_CLIENT_CLI_STATUS_VIEW_H_
