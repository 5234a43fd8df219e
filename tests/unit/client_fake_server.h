// A server for tests of the client: takes raw messages of any method and answers from a script, so
// it can break the contract in every way. Reads requests with protobuf's own parser.
#ifndef ATTN_TESTS_UNIT_CLIENT_FAKE_SERVER_H_
#define ATTN_TESTS_UNIT_CLIENT_FAKE_SERVER_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/v1/attention.pb.h"
#include "kernels/api/mutex.h"

namespace attn::client {

struct FakeAnswer {
  std::vector<std::string> messages;
  grpc::Status status;
  std::vector<std::pair<std::string, std::string>> trailers;
};

// What one method does. `attempt` counts its calls from 1.
struct FakeMethod {
  // Called once, with the messages read so far.
  std::function<FakeAnswer(const std::vector<std::string>& messages, int attempt)> answer;
  // Answer when this many messages have been read; -1: at the half-close.
  int answer_after = -1;
  // Send the answer's messages, but then go on reading up to the half-close before the status.
  bool finish_after_half_close = false;
  // Never answer; end when the call is cancelled.
  bool hang = false;
};

class FakeServer {
 public:
  // Listens on 127.0.0.1, port chosen by the system, or on a Unix socket where `unix_path` is
  // given.
  explicit FakeServer(
      const std::string& unix_path = "",
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials()) {
    attention::v1::GetServerInfoResponse info;
    info.mutable_limits()->set_max_unary_bytes(64 << 20);
    SetInfo(info);
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.SetMaxSendMessageSize(-1);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    int port = 0;
    builder.AddListeningPort(unix_path.empty() ? "127.0.0.1:0" : "unix:" + unix_path, credentials,
                             &port);
    builder.RegisterCallbackGenericService(&service_);
    server_ = builder.BuildAndStart();
    target_ = unix_path.empty() ? "127.0.0.1:" + std::to_string(port) : "unix:" + unix_path;
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& target() const { return target_; }
  void SetInfo(const attention::v1::GetServerInfoResponse& info) {
    Set("GetServerInfo", {[info](const auto&, int) {
                            return FakeAnswer{{info.SerializeAsString()}, grpc::Status::OK, {}};
                          },
                          /*answer_after=*/1});
  }
  // `name`: "Forward", or a whole path that begins with '/'.
  void Set(const std::string& name, FakeMethod method) {
    MutexLock lock(service_.mutex);
    service_.methods[Path(name)] = std::move(method);
  }
  int Calls(const std::string& name) {
    MutexLock lock(service_.mutex);
    return service_.calls[Path(name)];
  }
  // What the last call of the method sent as metadata `key`; "": nothing.
  std::string LastMetadata(const std::string& name, const std::string& key) {
    MutexLock lock(service_.mutex);
    return service_.metadata[Path(name)][key];
  }
  // Waits until `count` messages of all calls of the method together have been read.
  void AwaitMessages(const std::string& name, int count) {
    MutexLock lock(service_.mutex);
    while (service_.messages[Path(name)] < count) service_.changed.Wait(service_.mutex);
  }
  // Waits until a call of the method was seen to be cancelled.
  void AwaitCancelled(const std::string& name) {
    MutexLock lock(service_.mutex);
    while (service_.cancelled[Path(name)] == 0) service_.changed.Wait(service_.mutex);
  }

 private:
  static std::string Path(const std::string& name) {
    return name[0] == '/' ? name : "/attention.v1.Attention/" + name;
  }

  struct Service : grpc::CallbackGenericService {
    Mutex mutex;
    CondVar changed;
    std::map<std::string, FakeMethod> methods ATTN_GUARDED_BY(mutex);
    std::map<std::string, int> calls ATTN_GUARDED_BY(mutex);
    std::map<std::string, std::map<std::string, std::string>> metadata ATTN_GUARDED_BY(mutex);
    std::map<std::string, int> messages ATTN_GUARDED_BY(mutex);
    std::map<std::string, int> cancelled ATTN_GUARDED_BY(mutex);

    grpc::ServerGenericBidiReactor* CreateReactor(
        grpc::GenericCallbackServerContext* context) override;
  };

  class Call;

  Service service_;
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

class FakeServer::Call : public grpc::ServerGenericBidiReactor {
 public:
  Call(Service* service, grpc::GenericCallbackServerContext* context, FakeMethod method,
       int attempt)
      : service_(service), context_(context), method_(std::move(method)), attempt_(attempt) {
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      half_closed_ = true;
      if (!method_.hang && !answered_) Answer();
      MaybeFinish();
      return;
    }
    grpc::Slice slice;
    (void)incoming_.DumpToSingleSlice(&slice);
    read_.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
    {
      MutexLock lock(service_->mutex);
      ++service_->messages[context_->method()];
    }
    service_->changed.NotifyAll();
    if (static_cast<int>(read_.size()) == method_.answer_after && !method_.hang) {
      Answer();
      if (!method_.finish_after_half_close) return;
    }
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mutex_);
      write_failed_ |= !ok;
      ++written_;
    }
    WriteNext();
  }

  void OnCancel() override {
    {
      MutexLock lock(service_->mutex);
      ++service_->cancelled[context_->method()];
    }
    service_->changed.NotifyAll();
    if (method_.hang) Finish(grpc::Status(grpc::StatusCode::CANCELLED, "cancelled"));
  }

  void OnDone() override { delete this; }

 private:
  void Answer() {
    answered_ = true;
    answer_ = method_.answer(read_, attempt_);
    for (const auto& [key, value] : answer_.trailers) context_->AddTrailingMetadata(key, value);
    WriteNext();
  }

  void WriteNext() {
    {
      MutexLock lock(mutex_);
      if (!write_failed_ && written_ < answer_.messages.size()) {
        const grpc::Slice slice(answer_.messages[written_]);
        outgoing_ = grpc::ByteBuffer(&slice, 1);
      } else {
        all_written_ = true;
      }
      if (!all_written_) {
        StartWrite(&outgoing_);
        return;
      }
    }
    MaybeFinish();
  }

  void MaybeFinish() {
    {
      MutexLock lock(mutex_);
      if (!all_written_ || finished_) return;
      if (method_.finish_after_half_close && !half_closed_) return;
      finished_ = true;
    }
    Finish(answer_.status);
  }

  Service* service_;
  grpc::GenericCallbackServerContext* context_;
  const FakeMethod method_;
  const int attempt_;
  std::vector<std::string> read_;
  FakeAnswer answer_;
  grpc::ByteBuffer incoming_, outgoing_;
  bool answered_ = false;
  std::atomic<bool> half_closed_{false};
  Mutex mutex_;
  size_t written_ ATTN_GUARDED_BY(mutex_) = 0;
  bool write_failed_ ATTN_GUARDED_BY(mutex_) = false;
  bool all_written_ ATTN_GUARDED_BY(mutex_) = false;
  bool finished_ ATTN_GUARDED_BY(mutex_) = false;
};

inline grpc::ServerGenericBidiReactor* FakeServer::Service::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  FakeMethod method;
  int attempt;
  {
    MutexLock lock(mutex);
    attempt = ++calls[context->method()];
    auto& sent = metadata[context->method()];
    sent.clear();
    for (const auto& [key, value] : context->client_metadata()) {
      sent[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
    }
    if (const auto it = methods.find(context->method()); it != methods.end()) {
      method = it->second;
    } else {
      method.answer = [](const auto&, int) {
        return FakeAnswer{{}, {grpc::StatusCode::UNIMPLEMENTED, "no such method"}, {}};
      };
      method.answer_after = 1;
    }
  }
  return new Call(this, context, std::move(method), attempt);
}

}  // namespace attn::client

#endif  // ATTN_TESTS_UNIT_CLIENT_FAKE_SERVER_H_
