"""attention.v1 for a stock gRPC client: code generated from the .proto, tensors, and channels.

Nothing of attnd's own client is used here: protoc and grpc_python_plugin write the stubs when the
tests start, as any user of the .proto would. Where they are not installed, ATTN_CONTRACT_DIR names
a folder with stubs that `contract.py FOLDER` wrote on a host that has them.
"""

import atexit
import importlib
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROTO_DIR = pathlib.Path(os.environ.get("ATTN_PROTO_DIR", ROOT / "proto"))
TIMEOUT_S = 30.0  # of any call that a test expects to end by itself

# The parts of grpc.health.v1 and grpc.reflection.v1alpha that the tests call.
_OTHER_PROTOS = {
    "attn_test_health.proto": """
        syntax = "proto3";
        package grpc.health.v1;
        message HealthCheckRequest { string service = 1; }
        message HealthCheckResponse {
          enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; }
          ServingStatus status = 1;
        }
        service Health {
          rpc Check(HealthCheckRequest) returns (HealthCheckResponse);
          rpc Watch(HealthCheckRequest) returns (stream HealthCheckResponse);
        }
        """,
    "attn_test_reflection.proto": """
        syntax = "proto3";
        package grpc.reflection.v1alpha;
        message ServerReflectionRequest {
          string host = 1;
          oneof message_request {
            string file_by_filename = 3;
            string file_containing_symbol = 4;
            string list_services = 7;
          }
        }
        message FileDescriptorResponse { repeated bytes file_descriptor_proto = 1; }
        message ServiceResponse { string name = 1; }
        message ListServiceResponse { repeated ServiceResponse service = 1; }
        message ErrorResponse { int32 error_code = 1; string error_message = 2; }
        message ServerReflectionResponse {
          oneof message_response {
            FileDescriptorResponse file_descriptor_response = 4;
            ListServiceResponse list_services_response = 6;
            ErrorResponse error_response = 7;
          }
        }
        service ServerReflection {
          rpc ServerReflectionInfo(stream ServerReflectionRequest)
              returns (stream ServerReflectionResponse);
        }
        """,
}


def _generate(out):
    protoc = os.environ.get("ATTN_PROTOC") or shutil.which("protoc")
    plugin = os.environ.get("ATTN_GRPC_PYTHON_PLUGIN") or shutil.which("grpc_python_plugin")
    if not protoc or not plugin:
        raise RuntimeError("protoc and grpc_python_plugin are needed (protobuf-compiler-grpc)")
    for name, text in _OTHER_PROTOS.items():
        (out / name).write_text(text)
    files = [PROTO_DIR / "attention/v1/attention.proto"] + [out / name for name in _OTHER_PROTOS]
    subprocess.run(
        [protoc, f"-I{PROTO_DIR}", f"-I{out}", f"--python_out={out}", f"--grpc_python_out={out}",
         f"--plugin=protoc-gen-grpc_python={plugin}", *map(str, files)],
        check=True, timeout=60)


def _stubs():
    out = os.environ.get("ATTN_CONTRACT_DIR")
    if out is None:
        out = pathlib.Path(tempfile.mkdtemp(prefix="attn_contract_"))
        atexit.register(shutil.rmtree, out, ignore_errors=True)
        _generate(out)
    sys.path.insert(0, str(out))
    return [importlib.import_module(name) for name in (
        "attention.v1.attention_pb2", "attention.v1.attention_pb2_grpc", "attn_test_health_pb2",
        "attn_test_health_pb2_grpc", "attn_test_reflection_pb2", "attn_test_reflection_pb2_grpc")]


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    _generate(pathlib.Path(sys.argv[1]))
    sys.exit()

pb, pb_grpc, health_pb, health_grpc, reflection_pb, reflection_grpc = _stubs()

SERVICE = "attention.v1.Attention"
MAX_CHUNK = 1 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# ---------------------------------------------------------------------------------------- tensors

def item_size(dtype):
    return {pb.DTYPE_FP32: 4, pb.DTYPE_FP16: 2, pb.DTYPE_BF16: 2, pb.DTYPE_UINT8: 1}[dtype]


def to_bytes(values, dtype):
    """`values` rounded to `dtype`, to nearest, ties to even."""
    if dtype == pb.DTYPE_FP32:
        return np.ascontiguousarray(values, dtype="<f4").tobytes()
    if dtype == pb.DTYPE_FP16:
        return np.ascontiguousarray(values, dtype="<f2").tobytes()
    if dtype == pb.DTYPE_UINT8:
        return np.ascontiguousarray(values, dtype="u1").tobytes()
    single = np.ascontiguousarray(values, dtype="<f4")
    bits = single.view("<u4").astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    rounded[np.isnan(single)] = 0x7FC0
    return rounded.tobytes()


def from_bytes(data, dtype, shape):
    """Bytes of a contiguous tensor as float64 (UINT8: as uint8)."""
    if dtype == pb.DTYPE_FP32:
        return np.frombuffer(data, "<f4").astype(np.float64).reshape(shape)
    if dtype == pb.DTYPE_FP16:
        return np.frombuffer(data, "<f2").astype(np.float64).reshape(shape)
    if dtype == pb.DTYPE_UINT8:
        return np.frombuffer(data, "u1").reshape(shape)
    bits = np.frombuffer(data, "<u2").astype("<u4") << 16
    return bits.view("<f4").astype(np.float64).reshape(shape)


def round_to(values, dtype):
    """What is left of float64 `values` after storing them as `dtype`."""
    return from_bytes(to_bytes(values, dtype), dtype, np.shape(values))


def tensor(dtype, shape, payload, strides=(), offset_bytes=0):
    return pb.Tensor(dtype=dtype, shape=list(shape), strides=list(strides), payload=payload,
                     offset_bytes=offset_bytes)


def read_tensor(message, payloads):
    """A tensor of a response, as float64."""
    data = payloads[message.payload]
    count = math.prod(message.shape)
    size = count * item_size(message.dtype)
    if message.strides:
        raise AssertionError(f"responses are contiguous, this one has strides {message.strides}")
    if message.offset_bytes + size > len(data):
        raise AssertionError(f"tensor of {size} B at {message.offset_bytes} in a payload of "
                             f"{len(data)} B")
    piece = bytes(data[message.offset_bytes:message.offset_bytes + size])
    return from_bytes(piece, message.dtype, tuple(message.shape))


# ----------------------------------------------------------------------------------------- calling

def channel(target, options=(), credentials=None):
    options = UNLIMITED + list(options)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def raw_unary(chan, method):
    """Bytes in, bytes out: for messages that generated code would not write."""
    return chan.unary_unary(f"/{SERVICE}/{method}")


def raw_stream(chan, method):
    return chan.stream_stream(f"/{SERVICE}/{method}")


def chunks_of(payloads, chunk=MAX_CHUNK, kind=None):
    """Stream messages for whole payloads, one payload after the other."""
    kind = kind or pb.ForwardStreamRequest
    for index, data in enumerate(payloads):
        for offset in range(0, len(data), chunk):
            yield kind(chunk=pb.PayloadChunk(payload_index=index, offset=offset,
                                             data=data[offset:offset + chunk]))


def stream_requests(header, payloads, chunk=MAX_CHUNK, kind=None):
    kind = kind or pb.ForwardStreamRequest
    yield kind(header=header)
    yield from chunks_of(payloads, chunk, kind)


def collect_stream(responses):
    """(header, payloads, report) of a stream reply; checks its order and its chunks."""
    header = report = None
    payloads = {}
    for message in responses:
        part = message.WhichOneof("part")
        if report is not None:
            raise AssertionError(f"{part} after the report")
        if part == "header":
            if header is not None:
                raise AssertionError("two headers")
            header = message.header
        elif part == "chunk":
            if header is None:
                raise AssertionError("a chunk before the header")
            data = payloads.setdefault(message.chunk.payload_index, bytearray())
            if message.chunk.offset != len(data):
                raise AssertionError(f"chunk at {message.chunk.offset}, expected {len(data)}")
            if len(message.chunk.data) > MAX_CHUNK:
                raise AssertionError(f"chunk of {len(message.chunk.data)} B")
            data += message.chunk.data
        elif part == "report":
            report = message.report
        else:
            raise AssertionError("a stream message without a part")
    if header is None or report is None:
        raise AssertionError("the stream ended without header and report")
    return header, payloads, report


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, data):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(data)) + data
