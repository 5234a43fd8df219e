#include <google/protobuf/arena.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/lib/exchange.h"
#include "client/lib/tensor.h"
#include "proto/wire/framing.h"

namespace attn::client {
namespace {

template <typename... Parts>
absl::Status Broken(const Parts&... parts) {
  return absl::InternalError(absl::StrCat("invalid reply: ", parts...));
}

// The tensor that a reply header holds under a name of ReplySpec, or null.
const v1::Tensor* Find(const v1::ForwardResponseHeader& header, std::string_view name) {
  if (name == "out" && header.has_out()) return &header.out();
  if (name == "lse" && header.has_lse()) return &header.lse();
  return nullptr;
}

const v1::Tensor* Find(const v1::BackwardResponseHeader& header, std::string_view name) {
  if (name == "dq" && header.has_dq()) return &header.dq();
  if (name == "dk" && header.has_dk()) return &header.dk();
  if (name == "dv" && header.has_dv()) return &header.dv();
  if (name == "dbias" && header.has_dbias()) return &header.dbias();
  if (name == "dsink" && header.has_dsink()) return &header.dsink();
  return nullptr;
}

bool IsDense(const v1::Tensor& tensor) {
  if (tensor.strides_size() == 0) return true;
  if (tensor.strides_size() != tensor.shape_size()) return false;
  int64_t stride = 1;
  for (int axis = tensor.shape_size() - 1; axis >= 0; --axis) {
    if (tensor.shape(axis) > 1 && tensor.strides(axis) != stride) return false;
    stride *= tensor.shape(axis);
  }
  return true;
}

}  // namespace

absl::Status ReplyReader::PlaceTensor(const ExpectedTensor& expected, const v1::Tensor& tensor) {
  if (tensor.dtype() != expected.dtype ||
      !std::equal(tensor.shape().begin(), tensor.shape().end(), expected.shape.begin(),
                  expected.shape.end())) {
    return Broken(expected.name, " is ",
                  Describe(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}),
                  ", expected ", Describe(expected.dtype, expected.shape));
  }
  if (!IsDense(tensor)) return Broken(expected.name, " is not contiguous");
  if (tensor.source_case() != v1::Tensor::kPayload) {
    return Broken(expected.name, " has no payload");
  }
  if (tensor.payload() >= wire::kMaxPayloads) {
    return Broken(expected.name, ".payload ", tensor.payload(), " is over the limit of ",
                  wire::kMaxPayloads - 1);
  }
  if (tensor.offset_bytes() > spec_.bytes) {
    return Broken(expected.name, ".offset_bytes ", tensor.offset_bytes(), " is over the ",
                  spec_.bytes, " bytes of the whole reply");
  }
  if (payloads_.size() <= tensor.payload()) payloads_.resize(tensor.payload() + 1);
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].payload == tensor.payload() &&
        places_[i].offset < tensor.offset_bytes() + expected.bytes &&
        tensor.offset_bytes() < places_[i].offset + spec_.tensors[i].bytes) {
      return Broken(expected.name, " and ", spec_.tensors[i].name, " share bytes of payload ",
                    tensor.payload());
    }
  }
  Payload& payload = payloads_[tensor.payload()];
  payload.size = std::max(payload.size, tensor.offset_bytes() + expected.bytes);
  places_.push_back({tensor.payload(), tensor.offset_bytes()});
  return absl::OkStatus();
}

absl::Status ReplyReader::ReadHeader(std::string_view serialized) {
  if (have_header_) return Broken("a second header");
  have_header_ = true;
  if (!spec_.answerable.ok()) return spec_.answerable;
  // A header lives as long as this call; a typical one fits into the block.
  alignas(8) std::array<char, 1024> block;
  google::protobuf::ArenaOptions arena_options;
  arena_options.initial_block = block.data();
  arena_options.initial_block_size = block.size();
  google::protobuf::Arena arena(arena_options);
  const auto place_all = [&](auto* header) -> absl::Status {
    if (absl::Status status = wire::ParseInto(serialized, "header", header); !status.ok()) {
      return Broken(status.message());
    }
    for (const ExpectedTensor& expected : spec_.tensors) {
      const v1::Tensor* tensor = Find(*header, expected.name);
      if (tensor == nullptr) return Broken(expected.name, " is missing");
      if (absl::Status status = PlaceTensor(expected, *tensor); !status.ok()) return status;
    }
    return absl::OkStatus();
  };
  using google::protobuf::Arena;
  absl::Status status = spec_.pass == v1::PASS_FORWARD
                            ? place_all(Arena::CreateMessage<v1::ForwardResponseHeader>(&arena))
                            : place_all(Arena::CreateMessage<v1::BackwardResponseHeader>(&arena));
  if (!status.ok()) return status;
  for (Payload& payload : payloads_) {
    payload.memory = AllocateAligned(payload.size);
    if (payload.memory == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", payload.size, " bytes of the reply"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReplyReader::ReadReport(std::string_view serialized) {
  if (have_report_) return Broken("a second report");
  have_report_ = true;
  if (absl::Status status = wire::ParseInto(serialized, "report", &report_); !status.ok()) {
    return Broken(status.message());
  }
  return absl::OkStatus();
}

absl::Status ReplyReader::Append(uint64_t index, uint64_t offset, const wire::Bytes& data) {
  if (index >= payloads_.size()) {
    return Broken("payload ", index, " belongs to no tensor; there are ", payloads_.size());
  }
  Payload& payload = payloads_[index];
  if (offset != payload.received) {
    return Broken(offset > payload.received ? "gap" : "overlap", " in payload ", index,
                  ": chunk at byte ", offset, ", expected byte ", payload.received);
  }
  if (data.size > payload.size - payload.received) {
    return Broken("payload ", index, " is over its ", payload.size, " bytes");
  }
  data.CopyTo(0, data.size, payload.memory.get() + offset);
  payload.received += data.size;
  received_bytes_ += data.size;
  return absl::OkStatus();
}

absl::Status ReplyReader::ReadUnary(const grpc::ByteBuffer& buffer) {
  absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(buffer);
  if (!pieces.ok()) return pieces.status();
  absl::StatusOr<wire::UnaryMessage> message =
      wire::ParseUnary(pieces->pieces(), /*is_request=*/false);
  if (!message.ok()) return Broken(message.status().message());
  if (absl::Status status = ReadHeader(message->header); !status.ok()) return status;
  for (size_t i = 0; i < message->payloads.size(); ++i) {
    if (absl::Status status = Append(i, 0, message->payloads[i]); !status.ok()) return status;
  }
  // An empty report is left out of the encoding, so it cannot be told from one that is missing;
  // neither says what ran.
  if (message->report.empty()) return Broken("the report is missing");
  return ReadReport(message->report);
}

absl::Status ReplyReader::ReadStreamMessage(const grpc::ByteBuffer& buffer) {
  using Part = wire::StreamMessage::Part;
  absl::StatusOr<wire::ReceivedPieces> pieces = wire::ReceivedPieces::Create(buffer);
  if (!pieces.ok()) return pieces.status();
  absl::StatusOr<wire::StreamMessage> message =
      wire::ParseStream(pieces->pieces(), /*is_request=*/false);
  if (!message.ok()) return Broken(message.status().message());
  if (message->part == Part::kNone) return absl::OkStatus();  // a part this client does not know
  if (have_report_) return Broken("a message after the report");
  if (message->part == Part::kHeader) return ReadHeader(message->header);
  if (!have_header_) return Broken("the first message is not the header");
  if (message->part == Part::kReport) return ReadReport(message->report);
  return Append(message->chunk.payload_index, message->chunk.offset, message->chunk.data);
}

absl::Status ReplyReader::Finish() {
  if (!have_header_) return Broken("the header is missing");
  for (size_t i = 0; i < payloads_.size(); ++i) {
    if (payloads_[i].received < payloads_[i].size) {
      return Broken("payload ", i, " ended after ", payloads_[i].received, " of ",
                    payloads_[i].size, " bytes");
    }
  }
  if (!have_report_) return Broken("the report is missing");
  for (size_t i = 0; i < places_.size(); ++i) {
    const ExpectedTensor& expected = spec_.tensors[i];
    const Payload& payload = payloads_[places_[i].payload];
    HostTensor tensor;
    tensor.dtype = expected.dtype;
    tensor.shape = expected.shape;
    tensor.bytes = {payload.memory.get() + places_[i].offset, expected.bytes};
    tensor.owner = payload.memory;
    if (places_[i].offset % kAlignment != 0) {  // keep the promise of aligned tensors
      std::shared_ptr<std::byte> aligned = AllocateAligned(expected.bytes);
      if (aligned == nullptr) {
        return absl::ResourceExhaustedError(
            absl::StrCat("no memory for ", expected.bytes, " bytes of ", expected.name));
      }
      std::memcpy(aligned.get(), tensor.bytes.data(), expected.bytes);
      tensor.bytes = {aligned.get(), expected.bytes};
      tensor.owner = std::move(aligned);
    }
    tensors_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

}  // namespace attn::client
