"""Just enough HTTP/2 to send a gRPC server what no gRPC client would. RFC 9113, RFC 7541."""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
SERVICE = "/attention.v1.Attention"


def frame(kind, flags=0, stream=0, body=b""):
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _literal(name, value):
    """A header field without indexing and without Huffman coding; both at most 126 bytes."""
    def text(s):
        data = s.encode()
        if len(data) < 127:
            return bytes([len(data)]) + data
        rest, prefix = len(data) - 127, bytearray([127])
        while rest >= 128:
            prefix.append(rest & 0x7F | 0x80)
            rest >>= 7
        prefix.append(rest)
        return bytes(prefix) + data
    return b"\x00" + text(name) + text(value)


def request_headers(method, extra=()):
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"{SERVICE}/{method}"),
              (":authority", "localhost"), ("te", "trailers"),
              ("content-type", "application/grpc"), *extra]
    return b"".join(_literal(name, value) for name, value in fields)


def grpc_message(data, length=None, compressed=0):
    """The five-byte prefix and `data`; `length` may lie."""
    return bytes([compressed]) + struct.pack(">I", len(data) if length is None else length) + data


class Connection:
    """A TCP connection that speaks frames. A context manager."""

    def __init__(self, port, handshake=True, timeout=20.0):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.next_stream = 1
        self._buffer = b""
        if handshake:
            self.send(PREFACE + frame(SETTINGS))

    def send(self, data):
        """False where the server has closed the connection."""
        try:
            self.socket.sendall(data)
            return True
        except (ConnectionError, socket.timeout):
            return False

    def start(self, method, extra=(), flags=END_HEADERS):
        """Opens a stream; returns its id."""
        stream = self.next_stream
        self.next_stream += 2
        self.send(frame(HEADERS, flags, stream, request_headers(method, extra)))
        return stream

    def data(self, stream, body, flags=0):
        return self.send(frame(DATA, flags, stream, body))

    def closed_by_peer(self):
        """Reads until the server closes; False at the time-out."""
        try:
            while self.socket.recv(65536):
                pass
            return True
        except ConnectionError:
            return True
        except socket.timeout:
            return False

    def _exactly(self, count):
        while len(self._buffer) < count:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("closed by the server")
            self._buffer += data
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        return piece

    def read_frame(self):
        """(kind, flags, stream, body) of the next frame; answers SETTINGS and PING."""
        head = self._exactly(9)
        length = int.from_bytes(head[:3], "big")
        kind, flags = head[3], head[4]
        stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
        body = self._exactly(length)
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK))
        if kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, body))
        return kind, flags, stream, body

    def wait_end(self, stream):
        """Reads until the stream (or the connection) has ended."""
        try:
            while True:
                kind, flags, got, _ = self.read_frame()
                if kind == GOAWAY or (got == stream and (
                        kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM))):
                    return True
        except ConnectionError:
            return True
        except socket.timeout:
            return False

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
