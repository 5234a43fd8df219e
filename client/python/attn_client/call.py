"""One call, before it is sent and after it is answered: no network in here."""

from __future__ import annotations

import dataclasses
import math
import typing

from google.protobuf.message import DecodeError

from . import checks, schema, wire
from .arrays import FLOATS, ITEM_BYTES, Array, Like, dtype_number
from .errors import bad_reply

_FP32 = (schema.DTYPE_FP32,)
_ALIGNMENTS = {"bottom-right": schema.ALIGNMENT_BOTTOM_RIGHT, "top-left": schema.ALIGNMENT_TOP_LEFT}
_LAYOUTS = {"bshd": 4, "bhsd": 4, "thd": 3}  # ranks of q, k, v
_PASSES = {"forward": schema.PASS_FORWARD, "backward": schema.PASS_BACKWARD}
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


@dataclasses.dataclass(frozen=True, eq=False)
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
        return [(r.path, schema.name_of(schema.Reason, r.reason), r.detail)
                for r in self.report.rejections]


@dataclasses.dataclass(frozen=True, eq=False)
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


@dataclasses.dataclass(frozen=True, eq=False)
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


class _Expected:
    """A tensor of the reply. swapped: handed out with axes 1 and 2 exchanged. size: bytes."""

    __slots__ = ("dtype", "shape", "swapped", "size")

    def __init__(self, dtype: int, shape: tuple, swapped: bool = False):
        self.dtype, self.shape, self.swapped = dtype, shape, swapped
        self.size = math.prod(shape) * ITEM_BYTES[dtype]


class Request:
    """A header, its payloads and what the reply must hold.

    method: "Forward" or "Backward". arguments: what a caller gave beside the tensors, by name.
    gradients: out, lse, dout, dlse of a backward call. plan: without contents, but for the block
    mask. message: the header; header: its bytes. payloads: memoryviews of bytes. expected: the
    reply's tensors by name. like: makes the results.
    """

    def __init__(self, method: str, q, k, v, arguments: dict, gradients=None, plan: bool = False):
        self.method = method
        self.message = getattr(schema, f"{method}RequestHeader")()
        self.payloads = []
        self.like = Like(q)
        self._plan = plan
        # Payloads by argument, so that q = k = v is encoded once, and by (address, size), so that
        # tensors in one place travel once.
        self._encoded, self._payload_of = {}, {}
        unknown = arguments.keys() - _SETTERS.keys() - _SHAPES
        if unknown:
            raise TypeError(f"unknown argument {min(unknown)!r}; there are "
                            f"{', '.join(sorted(_SETTERS.keys() | _SHAPES))}")
        given = {name: value for name, value in arguments.items() if value is not None}

        layout = given.get("layout", "thd" if "cu_seqlens_q" in given else "bshd")
        self._rank = checks.one_of("layout", layout, _LAYOUTS)
        self._swapped = layout == "bhsd"
        q, k, v = (self._add_rows(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
        shape = self.message.shape
        shape.layout = schema.LAYOUT_THD if self._rank == 3 else schema.LAYOUT_BSHD
        shape.num_heads, shape.num_kv_heads = q.shape[-2], k.shape[-2]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            getattr(shape, name).extend(checks.integers(name, given.get(name)))

        self.expected = {}
        for name, value in given.items():
            if name in _SETTERS:
                _SETTERS[name](self, name, value)
        out_dtype = self.message.options.out_dtype or q.dtype
        if method == "Forward":
            lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
            self.expected = {"out": self._rows(out_dtype, (*q.shape[:-1], v.shape[-1])),
                             "lse": _Expected(schema.DTYPE_FP32, lse)}
        else:
            for name, value in (gradients or {}).items():
                if name in ("out", "dout"):
                    self._add_rows(name, value)
                elif value is not None:
                    self._put(getattr(self.message, name), Array(name, value, _FP32), value)
            self.expected.update((f"d{name}", self._rows(out_dtype, array.shape))
                                 for name, array in (("q", q), ("k", k), ("v", v)))
        self.header = self.message.SerializeToString()
        self.tensor_bytes = sum(map(len, self.payloads))
        self.reply_bytes = sum(expected.size for expected in self.expected.values())

    def _rows(self, dtype, shape):
        return _Expected(dtype, tuple(shape), self._swapped)

    def _add_rows(self, name, value) -> Array:
        """q, k, v, out, dout: with a token axis and a head axis, and strides where that saves a
        copy."""
        array = Array(name, value, FLOATS)
        if len(array.shape) != self._rank:
            raise ValueError(f"{name} has shape {list(array.shape)}; its rank must be {self._rank}")
        if self._swapped:
            array.swap_axes(1, 2)
        self._put(getattr(self.message, name), array, value, strides=array.strides())
        return array

    def _put(self, tensor, array: Array, value, strides=None, always=False):
        tensor.dtype = array.dtype
        tensor.shape.extend(array.shape)
        if strides is not None:
            tensor.strides.extend(strides)
        if self._plan and not always:
            return
        if array.is_spec:
            raise TypeError("a Spec has no contents; only plan() takes it")
        key = (id(value), array.swapped, strides is not None)
        if key not in self._encoded:
            data, address = array.encode(strides)
            place = (address, len(data))
            if place not in self._payload_of:
                self._payload_of[place] = len(self.payloads)
                self.payloads.append(data)
            self._encoded[key] = self._payload_of[place]
        tensor.payload = self._encoded[key]

    # One for each argument that is an option: (self, name, value).

    def _set_number(self, name, value):
        setattr(self.message.options, name, checks.number(name, value))

    def _set_integer(self, name, value):
        setattr(self.message.options, name, checks.integer(name, value))

    def _set_flag(self, name, value):
        setattr(self.message.options, name, bool(value))

    def _set_lengths(self, name, value):
        getattr(self.message.options, name).extend(checks.integers(name, value))

    def _set_alignment(self, name, value):
        self.message.options.alignment = checks.one_of(name, value, _ALIGNMENTS)

    def _set_tensor(self, name, value):
        array = Array(name, value, FLOATS if name == "bias" else _FP32)
        self._put(getattr(self.message.options, name), array, value)
        gradient = {"bias": "dbias", "sinks": "dsink"}.get(name)
        if gradient:
            self.expected[gradient] = _Expected(schema.DTYPE_FP32, array.shape)

    def _set_dropout(self, name, value):
        checks.instance(name, value, Dropout)
        dropout = self.message.options.dropout
        dropout.p = checks.number("dropout.p", value.p)
        dropout.seed = checks.integer("dropout.seed", value.seed, signed=False)
        dropout.offset = checks.integer("dropout.offset", value.offset, 32, signed=False)

    def _set_block_mask(self, name, value):
        checks.instance(name, value, BlockMask)
        block_mask = self.message.options.block_mask
        array = Array("block_mask.mask", value.mask, (schema.DTYPE_UINT8,))
        self._put(block_mask.mask, array, value.mask, always=True)
        block_mask.block_q = checks.integer("block_mask.block_q", value.block_q)
        block_mask.block_k = checks.integer("block_mask.block_k", value.block_k)

    def _set_out_dtype(self, name, value):
        self.message.options.out_dtype = dtype_number(name, value)

    def _set_path_policy(self, name, value):
        policy = self.message.path_policy
        policy.mode = _POLICIES.get(checks.instance(name, value, str), schema.PATH_POLICY_NAMED)
        if value not in _POLICIES:
            policy.path = value

    def _set_report_level(self, name, value):
        self.message.report_level = checks.one_of(name, value, _REPORT_LEVELS)


_SHAPES = {"layout", "cu_seqlens_q", "cu_seqlens_k"}
_SETTERS = {
    "softmax_scale": Request._set_number, "softcap": Request._set_number,
    "window_left": Request._set_integer, "window_right": Request._set_integer,
    "causal": Request._set_flag, "deterministic": Request._set_flag,
    "seqlens_q": Request._set_lengths, "seqlens_k": Request._set_lengths,
    "alignment": Request._set_alignment, "alibi_slopes": Request._set_tensor,
    "bias": Request._set_tensor, "sinks": Request._set_tensor, "dropout": Request._set_dropout,
    "block_mask": Request._set_block_mask, "out_dtype": Request._set_out_dtype,
    "path_policy": Request._set_path_policy, "report_level": Request._set_report_level}


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
            index = getattr(self._header, name).payload
            data = self._payloads[index]
            if self._filled[index] != len(data):
                raise bad_reply(f"{self._filled[index]} of {len(data)} B of {name}")
            found[name] = self._request.like.make(expected.dtype, expected.shape, data,
                                                  expected.swapped)
        report = parse(schema.ExecutionReport, self._report)
        if self._request.method == "Forward":
            return ForwardResult(**found, report=report, latency_s=latency_s, streamed=streamed,
                                 attempts=attempts)
        found = {"dbias": None, "dsink": None, **found}
        return BackwardResult(**found, report=report, latency_s=latency_s, streamed=streamed,
                              attempts=attempts)

    def _read_header(self, data: bytes):
        """Checks that the reply announces what was asked for, each tensor in a payload of its
        own."""
        if self._header is not None:
            raise bad_reply("two headers")
        header = parse(getattr(schema, f"{self._request.method}ResponseHeader"), data)
        for name, expected in self._request.expected.items():
            tensor = getattr(header, name)
            if (tensor.dtype, tuple(tensor.shape)) != (expected.dtype, expected.shape):
                raise bad_reply(
                    f"{name} is {schema.name_of(schema.DType, tensor.dtype)} {list(tensor.shape)}, "
                    f"not {schema.name_of(schema.DType, expected.dtype)} {list(expected.shape)}")
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


def parse(message, data: bytes):
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise bad_reply(f"{message.DESCRIPTOR.name}: {error}") from None


def plan_request(q, k, v, arguments: dict) -> bytes:
    """A serialized PlanRequest. q, k, v: arrays, or Spec. arguments: `pass_` too."""
    arguments = dict(arguments)
    which = checks.one_of("pass_", arguments.pop("pass_", "forward"), _PASSES)
    request = Request("Backward", q, k, v, arguments, plan=True)
    message = schema.PlanRequest(header=request.message, payload=map(bytes, request.payloads),
                                 **{"pass": which})
    return message.SerializeToString()
