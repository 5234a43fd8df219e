"""Every refusal: the right code, and a message that names the field, the value and the limit."""

import math
import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import Case, simple_case
from harness.contract import field, pb, tensor, varint
from harness.server import Attnd, wait_idle

T = contract.TIMEOUT_S
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
RNG = np.random.default_rng(7)
NAN = float("nan")
INF = float("inf")


def bshd(**options):
    return simple_case(RNG, batch=2, seqlen_q=5, seqlen_k=6, num_heads=4, num_kv_heads=2,
                       head_dim=8, **options)


def thd():
    def draw(*shape):
        return RNG.standard_normal(shape).astype(np.float32).astype(np.float64)

    return Case(q=draw(5, 4, 8), k=draw(6, 2, 8), v=draw(6, 2, 8), thd=True, cu_q=(0, 2, 5),
                cu_k=(0, 4, 6))


# (name, case, change to the header, words that the message must hold). The change gets (header,
# payloads) and may edit both in place.
def _put(header_field, values, dtype):
    def change(h, p):
        path = header_field.split(".")
        target = h
        for name in path:
            target = getattr(target, name)
        target.CopyFrom(tensor(dtype, values.shape, len(p)))
        p.append(contract.to_bytes(values, dtype))
    return change


def _set(path, value):
    def change(h, p):
        target = h
        *names, last = path.split(".")
        for name in names:
            target = getattr(target, name)
        if isinstance(value, list):
            del getattr(target, last)[:]
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)
    return change


def _clear(path):
    def change(h, p):
        target = h
        *names, last = path.split(".")
        for name in names:
            target = getattr(target, name)
        target.ClearField(last)
    return change


def _all(*changes):
    def change(h, p):
        for c in changes:
            c(h, p)
    return change


def _drop_payload(index, count):
    def change(h, p):
        p[index] = p[index][:-count]
    return change


def _mask(shape, value=1):
    return np.full(shape, value, np.uint8)


F32 = pb.DTYPE_FP32
BIG = 1 << 40
INVALID_CASES = [
    ("layout unset", bshd, _clear("shape.layout"), ["layout"]),
    ("q missing", bshd, _clear("q"), ["q"]),
    ("dtype unset", bshd, _clear("q.dtype"), ["q", "dtype"]),
    ("q is uint8", bshd, _set("q.dtype", pb.DTYPE_UINT8), ["q", "UINT8"]),
    ("k of another dtype", bshd, _set("k.dtype", pb.DTYPE_FP16), ["k", "FP16", "FP32"]),
    ("rank 3", bshd, _set("q.shape", [2, 5, 32]), ["q", "3", "4"]),
    ("rank 0", bshd, _set("q.shape", []), ["q", "0", "4"]),
    ("negative extent", bshd, _set("q.shape", [2, -5, 4, 8]), ["q", "-5"]),
    ("product overflows", bshd, _set("q.shape", [BIG, BIG, 4, 8]), ["q"]),
    ("least int64", bshd, _set("q.shape", [-(1 << 63)] * 4), ["q", "-9223372036854775808"]),
    ("num_heads unset", bshd, _clear("shape.num_heads"), ["num_heads", "0"]),
    ("num_heads negative", bshd, _set("shape.num_heads", -4), ["num_heads", "-4"]),
    ("num_heads disagrees", bshd, _set("shape.num_heads", 8), ["num_heads", "8", "4"]),
    ("num_kv_heads unset", bshd, _clear("shape.num_kv_heads"), ["num_kv_heads", "0"]),
    ("num_kv_heads disagrees", bshd, _set("shape.num_kv_heads", 4), ["num_kv_heads", "4", "2"]),
    ("kv heads do not divide", bshd,
     _all(_set("shape.num_kv_heads", 3), _set("k.shape", [2, 6, 3, 8]),
          _set("v.shape", [2, 6, 3, 8])), ["num_kv_heads", "3", "4"]),
    ("heads and seqlen swapped", bshd, _set("q.shape", [2, 4, 5, 8]), ["num_heads"]),
    ("batch of k", bshd, _set("k.shape", [3, 6, 2, 8]), ["k", "3", "2"]),
    ("seqlen of v", bshd, _set("v.shape", [2, 7, 2, 8]), ["k", "v", "7", "6"]),
    ("head_dim of k", bshd, _set("k.shape", [2, 6, 2, 9]), ["k", "9", "8"]),
    ("head_dim 0", bshd, _all(_set("q.shape", [2, 5, 4, 0]), _set("k.shape", [2, 6, 2, 0])),
     ["head_dim", "0"]),
    ("head_dim 513", bshd, _all(_set("q.shape", [2, 5, 4, 513]), _set("k.shape", [2, 6, 2, 513])),
     ["head_dim", "513", "512"]),
    ("head_dim_v 513", bshd, _set("v.shape", [2, 6, 2, 513]), ["head_dim_v", "513", "512"]),
    ("strides: too few", bshd, _set("q.strides", [32, 8, 1]), ["q", "strides", "3", "4"]),
    ("stride negative", bshd, _set("q.strides", [160, -32, 8, 1]), ["q", "-32"]),
    ("last stride", bshd, _set("q.strides", [160, 32, 8, 2]), ["q", "2", "1"]),
    ("span over the payload", bshd, _set("q.strides", [160, 32, 9, 1]), ["q"]),
    ("span overflows", bshd, _set("q.strides", [1 << 62, 1 << 62, 1 << 62, 1]), ["q"]),
    ("payload out of range", bshd, _set("v.payload", 3), ["payload"]),
    ("largest payload index", bshd, _set("v.payload", (1 << 32) - 1), ["v", "4294967295"]),
    ("no source", bshd, _clear("k.payload"), ["k"]),
    ("payload too short", bshd, _drop_payload(0, 1), ["q", "1280", "1279"]),
    ("offset past the end", bshd, _set("q.offset_bytes", 4), ["q", "offset"]),
    ("offset not aligned", bshd, _set("q.offset_bytes", 2), ["q", "offset_bytes", "2", "4"]),
    ("offset overflows", bshd, _set("q.offset_bytes", (1 << 64) - 4), ["q", "offset"]),
    ("scale NaN", bshd, _set("options.softmax_scale", NAN), ["softmax_scale", "nan"]),
    ("scale infinite", bshd, _set("options.softmax_scale", INF), ["softmax_scale", "inf"]),
    ("causal and window_right", bshd,
     _all(_set("options.causal", True), _set("options.window_right", 3)), ["window_right", "3"]),
    ("window_left negative", bshd, _set("options.window_left", -1), ["window_left", "-1"]),
    ("window_right negative", bshd, _set("options.window_right", -7), ["window_right", "-7"]),
    ("seqlens_q: count", bshd, _set("options.seqlens_q", [1, 2, 3]), ["seqlens_q", "3", "2"]),
    ("seqlens_q: over", bshd, _set("options.seqlens_q", [5, 6]), ["seqlens_q", "6", "5", "1"]),
    ("seqlens_k: negative", bshd, _set("options.seqlens_k", [-1, 2]), ["seqlens_k", "-1", "0"]),
    ("seqlens_k with THD", thd, _set("options.seqlens_k", [1, 2]), ["seqlens_k"]),
    ("cu_seqlens with BSHD", bshd, _set("shape.cu_seqlens_q", [0, 2, 5]), ["cu_seqlens_q"]),
    ("cu_seqlens missing", thd, _set("shape.cu_seqlens_q", []), ["cu_seqlens_q"]),
    ("cu_seqlens: counts differ", thd, _set("shape.cu_seqlens_k", [0, 6]), ["cu_seqlens"]),
    ("cu_seqlens: first", thd, _set("shape.cu_seqlens_q", [1, 2, 5]), ["cu_seqlens_q[0]", "1"]),
    ("cu_seqlens: decreasing", thd, _set("shape.cu_seqlens_k", [0, 7, 6]),
     ["cu_seqlens_k[", "7", "6"]),
    ("cu_seqlens: last", thd, _set("shape.cu_seqlens_q", [0, 2, 4]), ["cu_seqlens_q[2]", "4", "5"]),
    ("softcap 0", bshd, _set("options.softcap", 0.0), ["softcap", "0"]),
    ("softcap negative", bshd, _set("options.softcap", -1.0), ["softcap", "-1"]),
    ("softcap NaN", bshd, _set("options.softcap", NAN), ["softcap", "nan"]),
    ("alibi shape", bshd, _put("options.alibi_slopes", np.ones(3), F32), ["alibi_slopes", "3"]),
    ("alibi dtype", bshd, _put("options.alibi_slopes", np.ones(4), pb.DTYPE_FP16),
     ["alibi_slopes", "FP16", "FP32"]),
    ("alibi NaN", bshd, _put("options.alibi_slopes", np.array([1, 1, NAN, 1]), F32),
     ["alibi_slopes", "nan", "2"]),
    ("bias shape", bshd, _put("options.bias", np.zeros((1, 1, 5, 7)), F32), ["bias", "7", "6"]),
    ("bias NaN", bshd, _put("options.bias", np.full((1, 1, 5, 6), NAN), F32), ["bias", "nan"]),
    ("bias +inf", bshd, _put("options.bias", np.full((1, 1, 5, 6), INF), pb.DTYPE_BF16),
     ["bias", "inf"]),
    ("sinks shape", bshd, _put("options.sinks", np.zeros(5), F32), ["sinks", "5", "4"]),
    ("sinks +inf", bshd, _put("options.sinks", np.array([0, INF, 0, 0]), F32),
     ["sinks", "inf", "1"]),
    ("dropout p 1", bshd, _all(_set("options.dropout.p", 1.0), _set("options.dropout.seed", 1)),
     ["dropout", "p", "1"]),
    ("dropout p negative", bshd,
     _all(_set("options.dropout.p", -0.5), _set("options.dropout.seed", 1)), ["dropout", "-0.5"]),
    ("dropout p NaN", bshd, _all(_set("options.dropout.p", NAN), _set("options.dropout.seed", 1)),
     ["dropout", "nan"]),
    ("dropout without seed", bshd, _set("options.dropout.p", 0.5), ["dropout", "seed"]),
    ("dropout keeps nothing", bshd,
     _all(_set("options.dropout.p", 0.999999), _set("options.dropout.seed", 1)), ["dropout", "p"]),
    ("mask shape", bshd, _put("options.block_mask.mask", _mask((1, 1, 2, 1)), pb.DTYPE_UINT8),
     ["block_mask", "2", "1"]),
    ("mask dtype", bshd, _put("options.block_mask.mask", np.ones((1, 1, 1, 1)), F32),
     ["block_mask", "FP32", "UINT8"]),
    ("mask entry 2", bshd, _put("options.block_mask.mask", _mask((1, 1, 1, 1), 2), pb.DTYPE_UINT8),
     ["block_mask", "2"]),
    ("mask missing", bshd, _set("options.block_mask.block_q", 64), ["block_mask"]),
    ("block_q 0", bshd, _all(_put("options.block_mask.mask", _mask((1, 1, 1, 1)), pb.DTYPE_UINT8),
                             _set("options.block_mask.block_q", 0)), ["block_q", "0", "1"]),
    ("block_k negative", bshd,
     _all(_put("options.block_mask.mask", _mask((1, 1, 1, 1)), pb.DTYPE_UINT8),
          _set("options.block_mask.block_k", -64)), ["block_k", "-64", "1"]),
    ("out_dtype fp16 of fp32", bshd, _set("options.out_dtype", pb.DTYPE_FP16),
     ["out_dtype", "FP16"]),
    ("out_dtype uint8", bshd, _set("options.out_dtype", pb.DTYPE_UINT8), ["out_dtype", "UINT8"]),
    ("named without a path", bshd, _set("path_policy.mode", pb.PATH_POLICY_NAMED), ["path"]),
    ("no such path", bshd, _all(_set("path_policy.mode", pb.PATH_POLICY_NAMED),
                                _set("path_policy.path", "flash_tpu")), ["path", "flash_tpu"]),
    ("path without NAMED", bshd, _set("path_policy.path", "flash_cpu"), ["path", "flash_cpu"]),
    ("too many payloads", bshd, lambda h, p: p.extend([b"x"] * 30), ["payload"]),
]

UNKNOWN_ENUMS = [
    ("shape.layout", 99), ("q.dtype", 98), ("options.alignment", 97), ("options.out_dtype", 96),
    ("path_policy.mode", 95), ("report_level", 94), ("q.dtype", -1),
]

BACKWARD_CASES = [
    ("out missing", _clear("out"), ["out"]),
    ("lse missing", _clear("lse"), ["lse"]),
    ("dout missing", _clear("dout"), ["dout"]),
    ("out shape", _set("out.shape", [2, 5, 4, 9]), ["out", "9", "8"]),
    ("lse shape", _set("lse.shape", [2, 5, 4]), ["lse", "5", "4"]),
    ("lse dtype", _set("lse.dtype", pb.DTYPE_FP16), ["lse", "FP16", "FP32"]),
    ("dout dtype", _set("dout.dtype", pb.DTYPE_BF16), ["dout", "BF16"]),
    ("dout shape", _set("dout.shape", [2, 6, 4, 8]), ["dout", "6", "5"]),
    ("dlse shape", _put("dlse", np.zeros((2, 4, 6)), F32), ["dlse", "6", "5"]),
]


class RefusalsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd("--max-unary-bytes=1MiB",
                                                 "--max-request-bytes=8MiB"))
        cls.channel = cls.server.channel()
        cls.stub = contract.pb_grpc.AttentionStub(cls.channel)

    def refused(self, call, code, words=()):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call()
            if hasattr(result, "__next__"):
                for _ in result:
                    pass
        error = caught.exception
        self.assertEqual(error.code(), code, error.details())
        for word in words:
            self.assertIn(word.lower(), error.details().lower())
        self.assertNotEqual(error.details(), "")
        self.assertLess(len(error.details()), 2000)
        return error

    def every_way(self, header, payloads, code, words, plan=True, in_bytes=False):
        """Unary, streaming and Plan must refuse alike. in_bytes: what is wrong is how many bytes there
        are, which a stream knows by payload and not by tensor."""
        with self.subTest("unary"):
            self.refused(lambda: self.stub.Forward(
                pb.ForwardRequest(header=header, payload=payloads), timeout=T), code, words)
        with self.subTest("stream"):
            self.refused(lambda: self.stub.ForwardStream(
                contract.stream_requests(header, payloads), timeout=T), code,
                ["payload"] if in_bytes else words)
        if plan:
            with self.subTest("plan"):
                request = pb.PlanRequest(payload=payloads, **{"pass": pb.PASS_FORWARD})
                request.header.MergeFrom(pb.BackwardRequestHeader.FromString(
                    header.SerializeToString()))
                self.refused(lambda: self.stub.Plan(request, timeout=T), code, words)

    # Payloads of q, k, v do not travel with Plan, so faults in them are not its business.
    NOT_IN_PLAN = {"span over the payload", "payload out of range", "largest payload index",
                   "no source", "payload too short", "offset past the end", "offset not aligned",
                   "offset overflows", "alibi NaN", "bias NaN", "bias +inf", "sinks +inf",
                   "too many payloads"}

    IN_BYTES = {"span over the payload", "payload too short", "offset past the end"}

    def test_invalid_arguments(self):
        for name, make, change, words in INVALID_CASES:
            with self.subTest(name):
                header, payloads = make().forward()
                change(header, payloads)
                self.every_way(header, payloads, INVALID, words, name not in self.NOT_IN_PLAN,
                               name in self.IN_BYTES)

    def test_unknown_enum_values_are_refused_by_name(self):
        for path, value in UNKNOWN_ENUMS:
            with self.subTest(f"{path} = {value}"):
                header, payloads = bshd().forward()
                _set(path, value)(header, payloads)
                self.every_way(header, payloads, UNIMPLEMENTED,
                               [path.split(".")[-1], str(value)])

    def test_plan_pass(self):
        request = bshd().plan_request(pb.PASS_UNSPECIFIED)
        self.refused(lambda: self.stub.Plan(request, timeout=T), INVALID, ["pass"])
        request = bshd().plan_request(17)
        self.refused(lambda: self.stub.Plan(request, timeout=T), UNIMPLEMENTED, ["pass", "17"])

    def test_backward_inputs(self):
        for name, change, words in BACKWARD_CASES:
            with self.subTest(name):
                case = bshd()
                header, payloads = case.backward(np.zeros(case.out_shape), np.zeros(case.lse_shape),
                                                 np.zeros(case.out_shape))
                change(header, payloads)
                self.refused(lambda: self.stub.Backward(
                    pb.BackwardRequest(header=header, payload=payloads), timeout=T), INVALID, words)
                self.refused(lambda: self.stub.BackwardStream(
                    contract.stream_requests(header, payloads, kind=pb.BackwardStreamRequest),
                    timeout=T), INVALID, words)

    # ----------------------------------------------------------------------------------- framing

    def test_malformed_messages(self):
        header, payloads = bshd().forward()
        good = pb.ForwardRequest(header=header, payload=payloads).SerializeToString()
        head = header.SerializeToString()
        bad = {
            "empty": b"",
            "garbage": b"\xff" * 40,
            "truncated": good[:-1],
            "truncated in a tag": good[:-len(field(2, payloads[-1]))] + b"\x92",
            "payload longer than the message": varint(2 << 3 | 2) + varint(1 << 40) + b"x",
            "length of 2^64 - 1": b"\x12" + b"\xff" * 9 + b"\x01" + b"x",
            "varint of 11 bytes": b"\x12" + b"\x80" * 11 + b"\x01",
            "field number 0": field(0, b"abc") + good,
            "unknown wire type": varint(9 << 3 | 6) + good,
            "group never closed": varint(9 << 3 | 3) + good,
            "group closed, never opened": good + varint(9 << 3 | 4),
            "nested groups": varint(9 << 3 | 3) * 10000 + good,
            "header is garbage": field(1, b"\xff\xff\xff") + good[len(field(1, head)):],
        }
        call = contract.raw_unary(self.channel, "Forward")
        stream = contract.raw_stream(self.channel, "ForwardStream")
        for name, data in bad.items():
            with self.subTest(name):
                self.refused(lambda: call(data, timeout=T), INVALID)
                self.refused(lambda: stream(iter([data]), timeout=T), INVALID)
        self.assertTrue(self.server.alive())

    def test_header_over_64_kib(self):
        header, payloads = bshd().forward()
        header.options.seqlens_q.extend([1] * 66000)
        size = header.ByteSize()
        self.assertGreater(size, 65536)
        self.refused(lambda: self.stub.Forward(
            pb.ForwardRequest(header=header, payload=payloads), timeout=T), INVALID,
            ["header", str(size), "65536"])
        self.refused(lambda: self.stub.ForwardStream(
            contract.stream_requests(header, payloads), timeout=T), INVALID,
            ["header", str(size), "65536"])

    def test_header_of_exactly_64_kib_is_read(self):
        header, payloads = bshd().forward()
        # Unknown fields count, and are allowed.
        base = header.SerializeToString()
        filler = 65536 - len(base)
        pad = field(500, b"x" * (filler - len(field(500, b"x" * filler)) + filler))
        data = field(1, base + pad) + b"".join(field(2, p) for p in payloads)
        self.assertEqual(len(base + pad), 65536)
        contract.raw_unary(self.channel, "Forward")(data, timeout=T)

    # ------------------------------------------------------------------------------------ limits

    def test_unary_request_over_the_limit_names_the_stream(self):
        case = simple_case(RNG, seqlen_q=1024, seqlen_k=1024, num_heads=2, head_dim=128)
        request = case.forward_request()
        error = self.refused(lambda: self.stub.Forward(request, timeout=T),
                             grpc.StatusCode.RESOURCE_EXHAUSTED, ["ForwardStream", "1048576"])
        self.assertIn(str(request.ByteSize())[:3], error.details())
        header, payloads = case.forward()
        contract.collect_stream(self.stub.ForwardStream(
            contract.stream_requests(header, payloads), timeout=T))

    def test_unary_reply_over_the_limit_names_the_stream(self):
        case = simple_case(RNG, seqlen_q=2048, seqlen_k=1, num_heads=1, head_dim=1,
                           head_dim_v=512)
        self.assertGreater(math.prod(case.out_shape) * 4, 1 << 20)
        self.refused(lambda: self.stub.Forward(case.forward_request(), timeout=T),
                     grpc.StatusCode.RESOURCE_EXHAUSTED, ["ForwardStream", "1048576"])

    def test_unary_backward_over_the_limit_names_its_stream(self):
        case = simple_case(RNG, seqlen_q=1024, seqlen_k=1024, num_heads=2, head_dim=128)
        zeros = np.zeros(case.out_shape)
        self.refused(lambda: self.stub.Backward(
            case.backward_request(zeros, np.zeros(case.lse_shape), zeros), timeout=T),
            grpc.StatusCode.RESOURCE_EXHAUSTED, ["BackwardStream", "1048576"])

    def test_stream_over_max_request_bytes_is_refused_from_its_header(self):
        header, _ = bshd().forward()
        header.q.shape[:] = [2, 1 << 20, 4, 8]

        def only_the_header():
            yield pb.ForwardStreamRequest(header=header)
            self.release.wait(T)  # never half-closes by itself

        import threading
        self.release = threading.Event()
        self.addCleanup(self.release.set)
        self.refused(lambda: self.stub.ForwardStream(only_the_header(), timeout=T),
                     grpc.StatusCode.RESOURCE_EXHAUSTED, ["8388608"])

    def test_invalid_header_is_refused_before_the_chunks(self):
        import threading
        release = threading.Event()
        self.addCleanup(release.set)
        header, _ = bshd().forward()
        header.q.shape[1] = -3

        def only_the_header():
            yield pb.ForwardStreamRequest(header=header)
            release.wait(T)

        self.refused(lambda: self.stub.ForwardStream(only_the_header(), timeout=T), INVALID,
                     ["q", "-3"])

    # ----------------------------------------------------------------------------------- streams

    def test_stream_order_and_coverage(self):
        header, payloads = bshd().forward()
        head = pb.ForwardStreamRequest(header=header)

        def chunk(index, offset, data):
            return pb.ForwardStreamRequest(chunk=pb.PayloadChunk(payload_index=index, offset=offset,
                                                                 data=data))

        q, k, v = payloads
        whole = [head, chunk(0, 0, q), chunk(1, 0, k), chunk(2, 0, v)]
        contract.collect_stream(self.stub.ForwardStream(iter(whole), timeout=T))
        bad = {
            "nothing at all": ([], ["header"]),
            "chunk before the header": (whole[1:], ["header"]),
            "two headers": ([head] + whole, ["header"]),
            "gap": ([head, chunk(0, 0, q[:100]), chunk(0, 104, q[104:])], ["0", "104", "100"]),
            "overlap": ([head, chunk(0, 0, q[:100]), chunk(0, 96, q[96:])], ["0", "96", "100"]),
            "does not start at 0": ([head, chunk(0, 4, q[4:])], ["4", "0"]),
            "short": (whole[:3] + [chunk(2, 0, v[:-1])], ["2", str(len(v)), str(len(v) - 1)]),
            "payload missing": (whole[:3], ["payload 2"]),
            "too long": (whole + [chunk(2, len(v), b"more")], ["2", str(len(v))]),
            "huge offset": ([head, chunk(0, (1 << 64) - 1, b"xy")], ["offset"]),
            "payload that no tensor names": (whole + [chunk(3, 0, b"x")], ["3"]),
            "largest payload index": ([head, chunk((1 << 32) - 1, 0, b"x")], ["4294967295"]),
            "message without a part": ([head, pb.ForwardStreamRequest()] + whole[1:], []),
        }
        for name, (messages, words) in bad.items():
            with self.subTest(name):
                self.refused(lambda: self.stub.ForwardStream(iter(messages), timeout=T), INVALID,
                             words)

    def test_chunk_over_one_mib(self):
        case = simple_case(RNG, seqlen_q=2100, seqlen_k=1, num_heads=1, head_dim=128,
                           head_dim_v=1)
        header, payloads = case.forward()
        self.assertGreater(len(payloads[0]), (1 << 20) + 1)
        self.refused(lambda: self.stub.ForwardStream(
            contract.stream_requests(header, payloads, (1 << 20) + 1), timeout=T), INVALID,
            ["chunk", "1048577", "1048576"])
        contract.collect_stream(self.stub.ForwardStream(
            contract.stream_requests(header, payloads, 1 << 20), timeout=T))

    def test_empty_chunks_are_harmless(self):
        header, payloads = bshd().forward()

        def requests():
            yield pb.ForwardStreamRequest(header=header)
            for index, data in enumerate(payloads):
                yield pb.ForwardStreamRequest(chunk=pb.PayloadChunk(payload_index=index))
                yield pb.ForwardStreamRequest(chunk=pb.PayloadChunk(payload_index=index, data=data))
                yield pb.ForwardStreamRequest(chunk=pb.PayloadChunk(payload_index=index,
                                                                    offset=len(data)))

        contract.collect_stream(self.stub.ForwardStream(requests(), timeout=T))

    # ----------------------------------------------------------------------------------- policies

    def test_require_flash_with_head_dim_264_lists_the_reasons(self):
        case = simple_case(RNG, head_dim=264)
        case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_REQUIRE_FLASH)
        words = ["REQUIRE_FLASH", "flash_cpu", "HEAD_DIM_UNSUPPORTED", "264", "256", "flash_sm90"]
        header, payloads = case.forward()
        self.every_way(header, payloads, grpc.StatusCode.FAILED_PRECONDITION, words, plan=False)
        plan = self.stub.Plan(case.plan_request(), timeout=T)
        self.assertEqual(plan.path, "")
        self.assertIn(("flash_cpu", pb.REASON_HEAD_DIM_UNSUPPORTED),
                      [(r.path, r.reason) for r in plan.rejections])
        self.assertTrue(plan.advice)

    def test_auto_with_head_dim_264_falls_to_standard(self):
        report = self.stub.Forward(simple_case(RNG, head_dim=264).forward_request(),
                                   timeout=T).report
        self.assertEqual(report.path, "standard_cpu")
        self.assertEqual(report.path_class, pb.PATH_CLASS_STANDARD)
        reasons = {(r.path, r.reason): r.detail for r in report.rejections}
        self.assertIn("264", reasons["flash_cpu", pb.REASON_HEAD_DIM_UNSUPPORTED])

    def test_force_standard_and_named(self):
        case = simple_case(RNG)
        case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_FORCE_STANDARD)
        report = self.stub.Forward(case.forward_request(), timeout=T).report
        self.assertEqual(report.path, "standard_cpu")
        self.assertIn(("flash_cpu", pb.REASON_POLICY),
                      [(r.path, r.reason) for r in report.rejections])
        for path in ("flash_cpu", "standard_cpu"):
            case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path=path)
            self.assertEqual(self.stub.Forward(case.forward_request(), timeout=T).report.path, path)
        case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path="flash_sm90")
        header, payloads = case.forward()
        self.every_way(header, payloads, grpc.StatusCode.FAILED_PRECONDITION, ["flash_sm90"],
                       plan=False)

    # ------------------------------------------------------------------------------------- after

    def test_unknown_methods(self):
        with self.assertRaises(grpc.RpcError) as caught:
            contract.raw_unary(self.channel, "Sideways")(b"", timeout=T)
        self.assertEqual(caught.exception.code(), UNIMPLEMENTED)

    def test_zzz_nothing_is_left_in_flight(self):
        wait_idle(self.server)
        self.stub.Forward(bshd().forward_request(), timeout=T)


if __name__ == "__main__":
    unittest.main(verbosity=2)
