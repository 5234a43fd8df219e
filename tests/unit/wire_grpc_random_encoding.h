// Random encodings of attention.v1 messages: valid ones in every way that the encoding allows, and
// damaged ones.
#ifndef ATTN_TESTS_UNIT_WIRE_GRPC_RANDOM_ENCODING_H_
#define ATTN_TESTS_UNIT_WIRE_GRPC_RANDOM_ENCODING_H_

#include <cstdint>
#include <random>
#include <string>

#include "attention/v1/attention.pb.h"

namespace attn::wire {

class RandomEncoding {
 public:
  explicit RandomEncoding(uint32_t seed) : generator_(seed) {}

  // In [0, n].
  size_t Number(size_t n) { return std::uniform_int_distribution<size_t>(0, n)(generator_); }
  bool OneIn(size_t n) { return Number(n - 1) == 0; }

  // A varint, at times longer than it need be.
  std::string Varint(uint64_t value, int max_bytes) {
    std::string out;
    for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
    out += static_cast<char>(value);
    if (OneIn(4)) {
      const size_t longer = Number(max_bytes - out.size());
      for (size_t i = 0; i < longer; ++i) {
        out.back() = static_cast<char>(out.back() | 0x80);
        out += '\0';
      }
    }
    return out;
  }
  std::string Tag(uint32_t field, uint32_t type) { return Varint(field << 3 | type, 5); }
  std::string Len(uint32_t field, const std::string& bytes) {
    return Tag(field, 2) + Varint(bytes.size(), 5) + bytes;
  }
  std::string RandomBytes(size_t max_size) {
    std::string out(Number(max_size), '\0');
    for (char& byte : out) byte = static_cast<char>(Number(255));
    return out;
  }

  // A field of any wire type. Groups hold fields, to `depth` levels.
  std::string AnyField(uint32_t field, int depth = 3) {
    switch (Number(depth > 0 ? 4 : 3)) {
      case 0:
        return Tag(field, 0) + Varint(Number(3) == 0 ? ~uint64_t{0} : Number(1000), 10);
      case 1:
        return Tag(field, 1) + std::string(8, static_cast<char>(Number(255)));
      case 2:
        return Len(field, RandomBytes(20));
      case 3:
        return Tag(field, 5) + std::string(4, static_cast<char>(Number(255)));
      default: {
        std::string inside;
        for (size_t n = Number(3); n > 0; --n) inside += AnyField(1 + Number(5), depth - 1);
        return Tag(field, 3) + inside + Tag(field, 4);
      }
    }
  }
  uint32_t UnknownNumber() { return OneIn(3) ? (1u << 29) - 1 - Number(5) : 20 + Number(100); }
  // A field that no message knows, or a known number with a wire type that it does not have.
  std::string StrayField() {
    if (OneIn(2)) return AnyField(UnknownNumber());
    const uint32_t field = 1 + Number(2);
    std::string out = AnyField(field);
    return (out[0] & 7) == 2 ? std::string() : out;
  }

  // Some of the fields of a request header.
  std::string HeaderPart() {
    attention::v1::ForwardRequestHeader header;
    if (OneIn(2)) FillTensor(header.mutable_q());
    if (OneIn(3)) FillTensor(header.mutable_k());
    if (OneIn(2)) header.mutable_shape()->set_num_heads(Number(100));
    if (OneIn(3)) header.mutable_shape()->add_cu_seqlens_q(Number(1000));
    if (OneIn(3)) header.mutable_options()->set_softmax_scale(0.5f * Number(7));
    if (OneIn(3)) header.mutable_options()->add_seqlens_k(Number(1u << 20));
    if (OneIn(4)) FillTensor(header.mutable_options()->mutable_bias());
    if (OneIn(4)) header.mutable_path_policy()->set_path("flash_cpu");
    if (OneIn(4)) header.set_report_level(attention::v1::REPORT_LEVEL_FULL);
    std::string out = header.SerializeAsString();
    if (OneIn(4)) out += AnyField(UnknownNumber());
    return out;
  }
  std::string ReportPart() {
    attention::v1::ExecutionReport report;
    if (OneIn(2)) report.set_kernel("kernel");
    if (OneIn(2)) report.set_flops(Number(1u << 30));
    if (OneIn(2)) report.add_rejections()->set_detail("detail");
    if (OneIn(2)) report.mutable_times()->set_kernel_ns(Number(1000));
    return report.SerializeAsString();
  }
  std::string ChunkPart() {
    std::string out;
    for (size_t n = Number(4); n > 0; --n) {
      switch (Number(4)) {
        case 0:
          out += Tag(1, 0) + Varint(OneIn(5) ? (uint64_t{1} << 40) + 7 : Number(40), 10);
          break;
        case 1:
          out += Tag(2, 0) + Varint(OneIn(5) ? ~uint64_t{0} : Number(1u << 30), 10);
          break;
        case 2:
          out += Len(3, RandomBytes(60));
          break;
        default:
          out += AnyField(OneIn(2) ? UnknownNumber() : 4 + Number(3));
      }
    }
    return out;
  }

  std::string Unary() {
    std::string out;
    for (size_t n = Number(9); n > 0; --n) {
      switch (Number(5)) {
        case 0:
          out += Len(1, HeaderPart());
          break;
        case 1:
        case 2:
          out += Len(2, RandomBytes(OneIn(4) ? 300 : 5));
          break;
        case 3:
          out += Len(3, ReportPart());
          break;
        default:
          out += StrayField();
      }
    }
    return out;
  }
  std::string Stream() {
    std::string out;
    for (size_t n = OneIn(2) ? 1 : Number(5); n > 0; --n) {
      switch (Number(5)) {
        case 0:
        case 1:
          out += Len(2, ChunkPart());
          break;
        case 2:
          out += Len(1, HeaderPart());
          break;
        case 3:
          out += Len(3, ReportPart());
          break;
        default:
          out += StrayField();
      }
    }
    return out;
  }

  // Flips, drops, doubles or cuts off bytes.
  std::string Damage(std::string bytes) {
    for (size_t n = 1 + Number(2); n > 0 && !bytes.empty(); --n) {
      const size_t at = Number(bytes.size() - 1);
      switch (Number(4)) {
        case 0:
          bytes[at] = static_cast<char>(Number(255));
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << Number(7)));
          break;
        case 2:
          bytes.erase(at, 1 + Number(2));
          break;
        case 3:
          bytes.insert(at, 1, static_cast<char>(Number(255)));
          break;
        default:
          bytes.resize(at);
      }
    }
    return bytes;
  }

 private:
  void FillTensor(attention::v1::Tensor* tensor) {
    tensor->set_dtype(attention::v1::DTYPE_BF16);
    for (size_t n = Number(4); n > 0; --n) tensor->add_shape(Number(5000));
    if (OneIn(2)) tensor->set_payload(Number(5));
  }

  std::mt19937 generator_;
};

}  // namespace attn::wire

#endif  // ATTN_TESTS_UNIT_WIRE_GRPC_RANDOM_ENCODING_H_
