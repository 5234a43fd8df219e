"""One call, before it is sent and after it is answered: no network in here."""

from __future__ import annotations

import dataclasses
import math
import typing

from google.protobuf.message import DecodeError

from . import schema, wire
from .arrays import FLOATS, ITEM_BYTES, Array, Like, dtype_number
from .errors import bad_reply

_FP32 = (schema.DTYPE_FP32,)
_ALIGNMENTS = {"bottom-right": schema.ALIGNMENT_BOTTOM_RIGHT, "top-left": schema.ALIGNMENT_TOP_LEFT}
_POLICIES = {"auto": schema.PATH_POLICY_AUTO, "require-flash": schema.PATH_POLICY_REQUIRE_FLASH,
             "force-standard": schema.PATH_POLICY_FORCE_STANDARD}
_REPORT_LEVELS = {"basic": schema.REPORT_LEVEL_BASIC, "full": schema.REPORT_LEVEL_FULL}


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout on the probabilities; the mask is a function of seed, offset and position alone.

    p: probability of dropping, 0 <= p < 1. seed: 64 bits. offset: 32 bits.
    """

    p: float
    seed: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which blocks of the score matrix are visible.

    mask: uint8 or bool [batch or 1, num_heads or 1, ceil(seqlen_q / block_q),
    ceil(seqlen_k / block_k)]. Flash paths take multiples of 64 as block_q and block_k.
    """

    mask: typing.Any
    block_q: int = 128
    block_k: int = 128


class _Result:
    @property
    def path(self) -> str:
        """The path that ran, for example "flash_sm90"."""
        return self.report.path

    @property
    def rejections(self) -> list:
        """(path, reason, detail) of each reason for each faster path that was not taken."""
        return [(r.path, schema.Reason.Name(r.reason)[len("REASON_"):], r.detail)
                for r in self.report.rejections]


@dataclasses.dataclass(frozen=True)
class ForwardResult(_Result):
    """out: layout of q, with head_dim_v. lse: float32, natural log, [batch, num_heads, seqlen_q]
    (THD: [num_heads, total_q]). report: schema.ExecutionReport. latency_s: of the attempt that
    succeeded."""

    out: typing.Any
    lse: typing.Any
    report: typing.Any
    latency_s: float
    streamed: bool
    attempts: int


@dataclasses.dataclass(frozen=True)
class BackwardResult(_Result):
    """dq, dk, dv: shaped like q, k, v. dbias, dsink: float32, None without bias or sinks."""

    dq: typing.Any
    dk: typing.Any
    dv: typing.Any
    dbias: typing.Any
    dsink: typing.Any
    report: typing.Any
    latency_s: float
    streamed: bool
    attempts: int


@dataclasses.dataclass(frozen=True)
class _Expected:
    dtype: int
    shape: tuple
    swapped: bool  # handed out with axes 1 and 2 exchanged

    @property
    def size(self):
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Request:
    """A header, its payloads and what the reply must hold.

    method: "Forward" or "Backward". message: the header; header: its bytes. payloads: memoryviews of
    bytes. expected: the reply's tensors by name. like: makes the results.
    """

    def __init__(self, method, q, k, v, *, layout=None, cu_seqlens_q=None, cu_seqlens_k=None,
                 path_policy="auto", report_level="basic", gradients=None, bodies=True, **options):
        self.method = method
        self.payloads = []
        self._payload_of = {}  # (address, size) -> index: tensors in one place travel once
        self._bodies = bodies
        self.message = getattr(schema, f"{method}RequestHeader")()
        self.like = Like(q)
        if layout is None:
            layout = "bshd" if cu_seqlens_q is None else "thd"
        if layout not in ("bshd", "bhsd", "thd"):
            raise ValueError(f"layout {layout!r} is not one of bshd, bhsd, thd")
        self._rank = 3 if layout == "thd" else 4
        self._swapped = layout == "bhsd"
        header = self.message

        q, k, v = (self._add_rows(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
        header.shape.layout = schema.LAYOUT_THD if self._rank == 3 else schema.LAYOUT_BSHD
        header.shape.num_heads, header.shape.num_kv_heads = q.shape[-2], k.shape[-2]
        header.shape.cu_seqlens_q.extend(_integers("cu_seqlens_q", cu_seqlens_q))
        header.shape.cu_seqlens_k.extend(_integers("cu_seqlens_k", cu_seqlens_k))
        self._set_options(header.options, **options)
        header.path_policy.mode = _POLICIES.get(path_policy, schema.PATH_POLICY_NAMED)
        if path_policy not in _POLICIES:
            header.path_policy.path = path_policy
        header.report_level = _one_of("report_level", report_level, _REPORT_LEVELS)

        out_dtype = header.options.out_dtype or q.dtype
        if method == "Forward":
            lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
            self.expected = {"out": self._rows(out_dtype, (*q.shape[:-1], v.shape[-1])),
                             "lse": _Expected(schema.DTYPE_FP32, lse, False)}
        else:
            for name, value in (gradients or {}).items():
                if value is not None:
                    self._add_gradient(name, value)
            self.expected = {f"d{x.name}": self._rows(out_dtype, x.shape) for x in (q, k, v)}
            for name, given in (("dbias", options.get("bias")), ("dsink", options.get("sinks"))):
                if given is not None:
                    shape = tuple(given.shape)
                    self.expected[name] = _Expected(schema.DTYPE_FP32, shape, False)
        self.header = header.SerializeToString()
        self.tensor_bytes = sum(map(len, self.payloads))
        self.reply_bytes = sum(expected.size for expected in self.expected.values())

    def _rows(self, dtype, shape):
        return _Expected(dtype, tuple(shape), self._swapped)

    def _add_rows(self, name, value, allowed=FLOATS):
        """q, k, v, out, dout: with a token axis and a head axis."""
        array = Array(name, value, allowed)
        if len(array.shape) != self._rank:
            raise ValueError(f"{name} has shape {list(array.shape)}; its rank must be {self._rank}")
        if self._swapped:
            array.swap_axes(1, 2)
        self._put(getattr(self.message, name), array, may_be_strided=True)
        return array

    def _add_gradient(self, name, value):
        if name in ("out", "dout"):
            self._add_rows(name, value)
        else:
            self._put(getattr(self.message, name), Array(name, value, _FP32))

    def _put(self, tensor, array, may_be_strided=False):
        tensor.dtype = array.dtype
        tensor.shape.extend(array.shape)
        if not self._bodies or array.values is None:
            return
        data, address, strides = array.encode(may_be_strided)
        if strides is not None:
            tensor.strides.extend(strides)
        place = (address, len(data))
        if place not in self._payload_of:
            self._payload_of[place] = len(self.payloads)
            self.payloads.append(data)
        tensor.payload = self._payload_of[place]

    def _set_options(self, to, *, softmax_scale=None, causal=False, alignment="bottom-right",
                     window_left=None, window_right=None, seqlens_q=None, seqlens_k=None,
                     softcap=None, alibi_slopes=None, bias=None, sinks=None, dropout=None,
                     block_mask=None, deterministic=False, out_dtype=None):
        for name, value in (("softmax_scale", softmax_scale), ("window_left", window_left),
                            ("window_right", window_right), ("softcap", softcap)):
            if value is not None:
                setattr(to, name, value)
        to.causal, to.deterministic = bool(causal), bool(deterministic)
        to.alignment = _one_of("alignment", alignment, _ALIGNMENTS)
        to.seqlens_q.extend(_integers("seqlens_q", seqlens_q))
        to.seqlens_k.extend(_integers("seqlens_k", seqlens_k))
        for name, value, allowed in (("alibi_slopes", alibi_slopes, _FP32), ("bias", bias, FLOATS),
                                     ("sinks", sinks, _FP32)):
            if value is not None:
                self._put(getattr(to, name), Array(name, value, allowed))
        if dropout is not None:
            to.dropout.p, to.dropout.seed = dropout.p, dropout.seed
            to.dropout.offset = dropout.offset
        if block_mask is not None:
            mask = Array("block_mask.mask", block_mask.mask, (schema.DTYPE_UINT8,))
            bodies, self._bodies = self._bodies, True  # plan() reads it too
            self._put(to.block_mask.mask, mask)
            self._bodies = bodies
            to.block_mask.block_q, to.block_mask.block_k = block_mask.block_q, block_mask.block_k
        if out_dtype is not None:
            to.out_dtype = dtype_number(out_dtype)


def _one_of(name, value, known):
    if value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
    return known[value]


def _integers(name, values):
    if values is None:
        return []
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in values:
        if not isinstance(value, int):
            raise TypeError(f"{name} holds {value!r}; it must hold integers")
    return values


class Reply:
    """The reply to a request, piece by piece; result() gives it once it is whole."""

    def __init__(self, request: Request):
        self._request = request
        self._header = self._report = None
        self._payloads = {}  # index -> bytearray
        self._filled = {}    # index -> bytes of it that have come

    def read_unary(self, message: bytes):
        header, payloads, self._report = wire.read_unary(message)
        self._read_header(header)
        for index, data in enumerate(payloads):
            self._add_chunk(index, 0, data)

    def read_stream(self, message: bytes):
        part, value = wire.read_stream(message)
        if self._report is not None:
            raise bad_reply(f"a {part} after the report")
        if part == "header":
            self._read_header(value)
        elif self._header is None:
            raise bad_reply(f"a {part} before the header")
        elif part == "chunk":
            self._add_chunk(*value)
        else:
            self._report = value

    def result(self, latency_s: float, streamed: bool, attempts: int):
        """The whole reply. AttentionError (INTERNAL) where anything is missing."""
        if self._header is None or self._report is None:
            raise bad_reply("it has no " + ("header" if self._header is None else "report"))
        found = {}
        for name, expected in self._request.expected.items():
            tensor = getattr(self._header, name)
            data = self._payloads[tensor.payload]
            if self._filled[tensor.payload] != len(data):
                raise bad_reply(f"{self._filled[tensor.payload]} of {len(data)} B of {name}")
            found[name] = self._request.like.make(expected.dtype, expected.shape, data,
                                                   expected.swapped)
        report = _parse(schema.ExecutionReport, self._report)
        if self._request.method == "Forward":
            return ForwardResult(**found, report=report, latency_s=latency_s, streamed=streamed,
                                 attempts=attempts)
        found = {"dbias": None, "dsink": None, **found}
        return BackwardResult(**found, report=report, latency_s=latency_s, streamed=streamed,
                              attempts=attempts)

    def _read_header(self, data: bytes):
        """Checks that the reply announces what was asked for, each tensor in a payload of its own."""
        if self._header is not None:
            raise bad_reply("two headers")
        header = _parse(getattr(schema, f"{self._request.method}ResponseHeader"), data)
        for name, expected in self._request.expected.items():
            tensor = getattr(header, name)
            if (tensor.dtype, tuple(tensor.shape)) != (expected.dtype, expected.shape):
                raise bad_reply(
                    f"{name} is {schema.DType.Name(tensor.dtype)} {list(tensor.shape)}, not "
                    f"{schema.DType.Name(expected.dtype)} {list(expected.shape)}")
            if tensor.offset_bytes or tensor.strides or tensor.payload in self._payloads:
                raise bad_reply(f"{name} is not a contiguous payload of its own")
            self._payloads[tensor.payload] = bytearray(expected.size)
            self._filled[tensor.payload] = 0
        self._header = header

    def _add_chunk(self, index: int, offset: int, data: memoryview):
        if index not in self._payloads:
            raise bad_reply(f"payload {index}, which belongs to no tensor")
        payload, filled = self._payloads[index], self._filled[index]
        if offset != filled or offset + len(data) > len(payload):
            raise bad_reply(f"{len(data)} B at {offset} of payload {index}, of which {filled} of "
                            f"{len(payload)} B have come")
        memoryview(payload)[offset:offset + len(data)] = data
        self._filled[index] += len(data)


def _parse(message, data: bytes):
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise bad_reply(f"{message.DESCRIPTOR.name}: {error}") from None


def plan_request(q, k, v, *, pass_="forward", **arguments) -> bytes:
    """A serialized PlanRequest. q, k, v: arrays, or Spec."""
    request = Request("Backward", q, k, v, bodies=False, **arguments)
    passes = {"forward": schema.PASS_FORWARD, "backward": schema.PASS_BACKWARD}
    message = schema.PlanRequest(header=request.message, payload=map(bytes, request.payloads),
                                 **{"pass": _one_of("pass_", pass_, passes)})
    return message.SerializeToString()
