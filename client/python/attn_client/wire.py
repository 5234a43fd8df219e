"""Messages of attention.v1 as bytes, without passing tensors through protobuf, which copies them.

The framing is documented in proto/README.md.
"""

from __future__ import annotations

from .errors import bad_reply

MAX_MESSAGE_BYTES = (1 << 31) - 1  # of a unary message; gRPC and protobuf carry no more
MAX_CHUNK_BYTES = 1 << 20

_HEADER, _PAYLOAD, _REPORT = 1, 2, 3  # fields of unary messages
_STREAM_HEADER, _STREAM_CHUNK, _STREAM_REPORT = 1, 2, 3  # fields of stream messages
_CHUNK_INDEX, _CHUNK_OFFSET, _CHUNK_DATA = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, size: int) -> bytes:
    return varint(number << 3 | _BYTES) + varint(size)


def unary_message(header: bytes, payloads) -> bytes:
    """A unary request. `payloads`: memoryviews of bytes."""
    parts = [_bytes_field(_HEADER, len(header)), header]
    for payload in payloads:
        parts += [_bytes_field(_PAYLOAD, len(payload)), payload]
    return b"".join(parts)


def stream_messages(header: bytes, payloads):
    """The messages of a streaming request, one after the other."""
    yield _bytes_field(_STREAM_HEADER, len(header)) + header
    for index, payload in enumerate(payloads):
        for offset in range(0, len(payload), MAX_CHUNK_BYTES):
            data = payload[offset:offset + MAX_CHUNK_BYTES]
            fields = (varint(_CHUNK_INDEX << 3 | _VARINT) + varint(index) +
                      varint(_CHUNK_OFFSET << 3 | _VARINT) + varint(offset) +
                      _bytes_field(_CHUNK_DATA, len(data)))
            yield b"".join((_bytes_field(_STREAM_CHUNK, len(fields) + len(data)), fields, data))


def _read_varint(data, at: int):
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise bad_reply(f"a varint at byte {at} does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: memoryview, kinds: dict):
    """(number, value) of the fields in `kinds`: number -> int or memoryview. Fields of other
    numbers or of another wire type are unknown, and skipped, as protobuf does."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise bad_reply(f"wire type {kind} at byte {at}")
            if size > len(data) - at:
                raise bad_reply(f"a field of {size} B at byte {at} of {len(data)}")
            value = data[at:at + size] if kind == _BYTES else None
            at += size
        if isinstance(value, kinds.get(tag >> 3, ())):
            yield tag >> 3, value


def read_unary(message: bytes):
    """(header, payloads, report) of a unary reply: bytes, memoryviews, bytes or None."""
    header, payloads, report = [], [], []
    kinds = {_HEADER: memoryview, _PAYLOAD: memoryview, _REPORT: memoryview}
    for number, value in fields(memoryview(message), kinds):
        if number == _HEADER:
            header.append(value)
        elif number == _PAYLOAD:
            payloads.append(value)
        else:
            report.append(value)
    # Parts of a message that are given more than once are merged, which is to concatenate them.
    return b"".join(header), payloads, b"".join(report) if report else None


def read_stream(message: bytes):
    """("header", bytes), ("chunk", (index, offset, data)) or ("report", bytes)."""
    kinds = {_STREAM_HEADER: memoryview, _STREAM_CHUNK: memoryview, _STREAM_REPORT: memoryview}
    for number, value in fields(memoryview(message), kinds):
        if number == _STREAM_HEADER:
            return "header", bytes(value)
        if number == _STREAM_REPORT:
            return "report", bytes(value)
        chunk = {_CHUNK_INDEX: 0, _CHUNK_OFFSET: 0, _CHUNK_DATA: memoryview(b"")}
        chunk.update(fields(value, {_CHUNK_INDEX: int, _CHUNK_OFFSET: int,
                                    _CHUNK_DATA: memoryview}))
        return "chunk", (chunk[_CHUNK_INDEX], chunk[_CHUNK_OFFSET], chunk[_CHUNK_DATA])
    raise bad_reply("a stream message without a part that is known")
