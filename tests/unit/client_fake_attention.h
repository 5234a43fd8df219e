// A stand-in for attention in tests of the client: results that depend on every request byte, so
// that a byte lost, moved or repeated on the way shows.
#ifndef ATTN_TESTS_UNIT_CLIENT_FAKE_ATTENTION_H_
#define ATTN_TESTS_UNIT_CLIENT_FAKE_ATTENTION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/lib/client.h"
#include "tests/unit/client_fake_server.h"

namespace attn::client {

inline constexpr size_t kChunk = 1 << 20;

inline std::string_view Text(const HostTensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
}

// A tensor whose bytes repeat only after 2^32.
inline HostTensor Pattern(v1::DType dtype, std::vector<int64_t> shape, uint32_t seed) {
  HostTensor tensor = HostTensor::Allocate(dtype, std::move(shape));
  uint32_t state = seed * 2654435761u + 1;
  for (std::byte& byte : tensor.mutable_bytes()) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return tensor;
}

// `size` bytes that depend on all of `inputs`.
inline std::string Mix(const std::vector<std::string>& inputs, size_t size, char salt) {
  std::string out(size, salt);
  for (const std::string& input : inputs) {
    uint32_t hash = 2166136261u;
    for (const char byte : input) hash = (hash ^ static_cast<uint8_t>(byte)) * 16777619u;
    for (size_t i = 0; i < size; ++i) {
      const char from = input.empty() ? '\0' : input[i % input.size()];
      out[i] = static_cast<char>(out[i] + from + (hash >> (8 * (i % 4))));
    }
  }
  return out;
}

// bf16 BSHD; out and lse have the sizes that `seqlen` and `heads` give.
inline ForwardCall MakeForward(int64_t seqlen, int64_t heads = 2, int64_t head_dim = 32) {
  ForwardCall call;
  call.header.mutable_shape()->set_layout(v1::LAYOUT_BSHD);
  call.header.mutable_shape()->set_num_heads(heads);
  call.header.mutable_shape()->set_num_kv_heads(heads);
  call.inputs.q = Pattern(v1::DTYPE_BF16, {1, seqlen, heads, head_dim}, 1);
  call.inputs.k = Pattern(v1::DTYPE_BF16, {1, seqlen, heads, head_dim}, 2);
  call.inputs.v = Pattern(v1::DTYPE_BF16, {1, seqlen, heads, head_dim}, 3);
  return call;
}

struct FakeResult {
  v1::ForwardResponseHeader header;
  std::string out, lse;
  v1::ExecutionReport report;
};

inline FakeResult FakeForward(const v1::ForwardRequestHeader& request,
                              const std::vector<std::string>& payloads) {
  FakeResult result;
  v1::Tensor* out = result.header.mutable_out();
  *out = request.q();
  out->set_shape(3, request.v().shape(3));
  out->set_payload(0);
  v1::Tensor* lse = result.header.mutable_lse();
  lse->set_dtype(v1::DTYPE_FP32);
  for (const int axis : {0, 2, 1}) lse->add_shape(request.q().shape(axis));
  lse->set_payload(1);
  size_t elements = 1;
  for (const int64_t extent : out->shape()) elements *= extent;
  result.out = Mix(payloads, elements * 2, 'o');
  result.lse = Mix(payloads, 4 * elements / request.v().shape(3), 'l');
  result.report.set_path("flash_cpu");
  return result;
}

inline FakeResult FakeForwardUnary(const std::string& message) {
  v1::ForwardRequest request;
  if (!request.ParseFromString(message)) return {};
  return FakeForward(request.header(), {request.payload().begin(), request.payload().end()});
}

inline std::string UnaryReply(const FakeResult& result) {
  v1::ForwardResponse response;
  *response.mutable_header() = result.header;
  response.add_payload(result.out);
  response.add_payload(result.lse);
  *response.mutable_report() = result.report;
  return response.SerializeAsString();
}

// Puts a request stream together as the contract says. `*error` tells what broke it.
inline v1::ForwardRequest Reassemble(const std::vector<std::string>& messages, std::string* error) {
  v1::ForwardRequest request;
  for (size_t i = 0; i < messages.size(); ++i) {
    v1::ForwardStreamRequest message;
    if (!message.ParseFromString(messages[i])) *error = "not a ForwardStreamRequest";
    if (message.has_header() != (i == 0)) *error = "header is not the first message";
    if (i == 0) *request.mutable_header() = message.header();
    if (!message.has_chunk()) continue;
    const v1::PayloadChunk& chunk = message.chunk();
    while (request.payload_size() <= static_cast<int>(chunk.payload_index())) request.add_payload();
    std::string* payload = request.mutable_payload(chunk.payload_index());
    if (chunk.offset() != payload->size()) *error = "gap or overlap";
    if (chunk.data().empty() || chunk.data().size() > kChunk) *error = "chunk size";
    payload->append(chunk.data());
  }
  return request;
}

inline std::string StreamHeader(const FakeResult& result) {
  v1::ForwardStreamResponse message;
  *message.mutable_header() = result.header;
  return message.SerializeAsString();
}
inline std::string StreamChunk(uint32_t index, uint64_t offset, const std::string& data) {
  v1::ForwardStreamResponse message;
  message.mutable_chunk()->set_payload_index(index);
  message.mutable_chunk()->set_offset(offset);
  message.mutable_chunk()->set_data(data);
  return message.SerializeAsString();
}
inline std::string StreamReport(const FakeResult& result) {
  v1::ForwardStreamResponse message;
  *message.mutable_report() = result.report;
  return message.SerializeAsString();
}

inline std::vector<std::string> StreamReply(const FakeResult& result) {
  std::vector<std::string> messages = {StreamHeader(result)};
  for (uint32_t index = 0; index < 2; ++index) {
    const std::string& bytes = index == 0 ? result.out : result.lse;
    for (size_t offset = 0; offset < bytes.size(); offset += kChunk) {
      messages.push_back(StreamChunk(index, offset, bytes.substr(offset, kChunk)));
    }
  }
  messages.push_back(StreamReport(result));
  return messages;
}

// Serves Forward and ForwardStream properly.
inline void ServeForward(FakeServer& server) {
  server.Set("Forward", {[](const auto& messages, int) {
               return FakeAnswer{{UnaryReply(FakeForwardUnary(messages[0]))}, grpc::Status::OK, {}};
             }});
  server.Set("ForwardStream", {[](const auto& messages, int) {
               std::string error;
               const v1::ForwardRequest request = Reassemble(messages, &error);
               if (!error.empty()) {
                 return FakeAnswer{{}, {grpc::StatusCode::INVALID_ARGUMENT, error}, {}};
               }
               return FakeAnswer{
                   StreamReply(FakeForward(request.header(),
                                           {request.payload().begin(), request.payload().end()})),
                   grpc::Status::OK,
                   {}};
             }});
}

// What ServeForward() answers to a call.
inline FakeResult Expected(const ForwardCall& call) {
  v1::ForwardRequestHeader header;
  for (const auto& [tensor, field] :
       {std::pair{&call.inputs.q, header.mutable_q()}, {&call.inputs.v, header.mutable_v()}}) {
    field->set_dtype(tensor->dtype);
    field->mutable_shape()->Add(tensor->shape.begin(), tensor->shape.end());
  }
  return FakeForward(header, {std::string(Text(call.inputs.q)), std::string(Text(call.inputs.k)),
                              std::string(Text(call.inputs.v))});
}

}  // namespace attn::client

#endif  // ATTN_TESTS_UNIT_CLIENT_FAKE_ATTENTION_H_
