// The status page: one HTML document that needs nothing else than /status.json.
#ifndef ATTN_SERVER_STATUS_PAGE_H_
#define ATTN_SERVER_STATUS_PAGE_H_

#include <string>

#include "server/metrics/http.h"

namespace attn::server {

// The page with a nonce of its own for its style and script, and the policy that allows no other
// script, style, image, frame, form or connection but to its own origin. Thread-safe.
HttpServer::Document StatusPage();

}  // namespace attn::server

#endif  // ATTN_SERVER_STATUS_PAGE_H_
