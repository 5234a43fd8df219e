#include "server/status/serving_state.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

namespace attn::server {

void ServingState::Attach(grpc::Server* server) {
  server_ = server;
  Set(false);
}

void ServingState::Set(bool serving) {
  serving_.store(serving, std::memory_order_release);
  if (server_ == nullptr) return;
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  if (health == nullptr) return;
  // A service that was never set is NOT_FOUND, so both names are set each time.
  health->SetServingStatus("", serving);
  health->SetServingStatus("attention.v1.Attention", serving);
}

}  // namespace attn::server
