// Whether the server takes calls, as health checks and probes see it.
#ifndef ATTN_SERVER_STATUS_SERVING_STATE_H_
#define ATTN_SERVER_STATUS_SERVING_STATE_H_

#include <atomic>

namespace grpc {
class Server;
}

namespace attn::server {

// Thread-safe.
class ServingState {
 public:
  // Starts answering grpc.health.v1 Check and Watch for "" and "attention.v1.Attention" through
  // `server`, which must have the default health service. `server` must outlive the last Set().
  void Attach(grpc::Server* server);

  void Set(bool serving);
  bool serving() const { return serving_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> serving_{false};
  grpc::Server* server_ = nullptr;
};

}  // namespace attn::server

#endif  // ATTN_SERVER_STATUS_SERVING_STATE_H_
