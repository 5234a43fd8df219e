#include "server/status/page.h"

#include <random>
#include <string_view>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "kernels/api/text.h"

namespace attn::server {

// Written by embed.cmake from page/.
extern const char kStatusPage[];
extern const unsigned long kStatusPageBytes;

namespace {

std::string Nonce() {
  std::random_device random;  // the system's generator, 32 bits a call
  std::string nonce;
  for (int i = 0; i < 4; ++i) nonce += absl::StrFormat("%08x", random());
  return nonce;
}

}  // namespace

HttpServer::Document StatusPage() {
  const std::string nonce = Nonce();
  return {absl::StrReplaceAll(std::string(kStatusPage, kStatusPageBytes), {{"@NONCE@", nonce}}),
          Cat("default-src 'none'; script-src 'nonce-", nonce, "'; style-src 'nonce-", nonce,
              "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
              "frame-ancestors 'none'")};
}

}  // namespace attn::server
