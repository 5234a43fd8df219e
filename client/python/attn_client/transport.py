"""How calls travel: channels, unary or streaming, when to try again."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import threading
import time

import grpc

from . import checks, schema, wire
from .call import Reply, Request
from .errors import AttentionError, cancelled

DEFAULT_TARGET = "127.0.0.1:50051"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_MIB = 1 << 20
_MAX_STREAM_THRESHOLD = 16 * _MIB  # from there on streams are faster (tests/bench: python-client)
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_MAX_PUSHBACK_MS = 86_400_000  # no wait that makes sense is longer than a day


def full_name(method: str) -> str:
    return f"/{schema.SERVICE}/{method}"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to reach a server, and when to try again.

    target: "host:port" or "unix:/path". tls_ca, tls_cert, tls_key: PEM files; TLS where any of the
    four is given, the system's authorities without tls_ca. tls_server_name: overrides the name to
    check. connect_timeout: seconds in which the server must answer. stream_threshold_bytes: calls
    whose tensors, in or out, exceed this go by the streaming methods; default: the server's
    max_unary_bytes, at most 16 MiB. max_retries: of UNAVAILABLE, and of RESOURCE_EXHAUSTED with
    pushback; attention is a pure function, so every call is safe to repeat. channel_options: pairs
    for gRPC, over ours.
    """

    target: str = DEFAULT_TARGET
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    connect_timeout: float | None = 10.0
    stream_threshold_bytes: int | None = None
    max_retries: int = 3
    channel_options: tuple = ()

    def __post_init__(self):
        checks.instance("target", self.target, str)
        checks.timeout("connect_timeout", self.connect_timeout)
        checks.integer("max_retries", self.max_retries, signed=False)
        if self.stream_threshold_bytes is not None:
            checks.integer("stream_threshold_bytes", self.stream_threshold_bytes, signed=False)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key must be given together")

    def credentials(self):
        """None: no TLS. OSError (a PEM file)."""
        if not (self.tls_ca or self.tls_cert or self.tls_server_name):
            return None
        ca, cert, key = (pathlib.Path(path).read_bytes() if path else None
                         for path in (self.tls_ca, self.tls_cert, self.tls_key))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def arguments(self) -> list:
        arguments = [
            ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
            # Retries are ours. gRPC's own would keep a copy of what was sent.
            ("grpc.enable_retries", 0), ("grpc.service_config_disable_resolution", 1),
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.primary_user_agent", "attn-client-python")]
        if self.target.startswith(("127.", "localhost", "[::1]", "unix:")):
            arguments.append(("grpc.enable_http_proxy", 0))
        if self.tls_server_name:
            arguments.append(("grpc.ssl_target_name_override", self.tls_server_name))
        return arguments + list(self.channel_options)


def channel(api, options: Options):
    """A channel of `api`: grpc or grpc.aio."""
    credentials = options.credentials()
    if credentials is None:
        return api.insecure_channel(options.target, options=options.arguments())
    return api.secure_channel(options.target, credentials, options=options.arguments())


class Cancellation:
    """Ends the one call that it is given to, from any thread, before the call or during it."""

    def __init__(self):
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._call = None

    def cancel(self):
        with self._lock:
            self._cancelled.set()
            call = self._call
        if call is not None:
            call.cancel()

    def watch(self, call):
        """`call`, of gRPC, is what cancel() ends from now on."""
        with self._lock:
            self._call = call
            was_cancelled = self._cancelled.is_set()
        if was_cancelled:
            call.cancel()

    def wait(self, seconds: float):
        """Sleeps. AttentionError (CANCELLED) as soon as it is cancelled."""
        if self._cancelled.wait(seconds):
            raise cancelled()


class Exchange:
    """What one call sends, and in which form: unary or streaming."""

    def __init__(self, options: Options, max_unary_bytes: int, request: Request, streaming,
                 traceparent):
        self.request = request
        self.metadata = checks.traceparent(traceparent)
        self.streaming = self._choose(options, max_unary_bytes, request, streaming)
        self.method = full_name(request.method + ("Stream" if self.streaming else ""))
        self._start = 0.0
        if not self.streaming:
            self.message = wire.unary_message(request.header, request.payloads)

    @staticmethod
    def _choose(options, max_unary_bytes, request, streaming) -> bool:
        most = min(max_unary_bytes or wire.MAX_MESSAGE_BYTES, wire.MAX_MESSAGE_BYTES)
        # Around the payloads: the header, the report, fields' tags and lengths.
        sent = request.tensor_bytes + len(request.header) + 1024
        received = request.reply_bytes + min(_MIB, most // 2)
        if streaming is None:
            threshold = options.stream_threshold_bytes
            if threshold is None:
                threshold = min(most, _MAX_STREAM_THRESHOLD)
            return (max(sent, received) > most
                    or max(request.tensor_bytes, request.reply_bytes) > threshold)
        if not streaming and max(sent, received) > most:
            raise AttentionError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"tensors of {request.tensor_bytes} B in and {request.reply_bytes} B out do not "
                f"fit in unary messages; the server's limit is {most} B: stream them")
        return bool(streaming)

    def begin(self) -> Reply:
        """Begins an attempt; gives the reply to fill."""
        self._start = time.monotonic()
        return Reply(self.request)

    def messages(self):
        return wire.stream_messages(self.request.header, self.request.payloads)

    def result(self, reply: Reply, attempts: int):
        return reply.result(time.monotonic() - self._start, self.streaming, attempts)


class Retry:
    """Counts attempts and says when the next one is due. timeout: from now, None: no limit."""

    def __init__(self, options: Options, timeout):
        self.attempts = 0
        self._max_retries = options.max_retries
        seconds = checks.timeout("timeout", timeout)
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def seconds_left(self):
        """None: no limit. AttentionError (DEADLINE_EXCEEDED) where none are left."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            # gRPC lets a call whose deadline has just passed through.
            raise deadline_exceeded()
        return left

    def is_late(self, seconds: float) -> bool:
        """Whether a wait reaches the deadline."""
        return self._deadline is not None and time.monotonic() + seconds >= self._deadline

    def begin(self):
        """Counts an attempt; gives seconds_left()."""
        self.attempts += 1
        return self.seconds_left()

    def delay_after(self, error: grpc.RpcError) -> float:
        """Seconds until the next attempt; raises AttentionError where there is none."""
        # grpc.aio's Metadata iterates over pairs, but calls itself a mapping: no dict().
        trailers = {key: value for key, value in error.trailing_metadata() or ()}
        delay = retry_delay(error.code(), trailers.get("grpc-retry-pushback-ms"), self.attempts,
                            self._max_retries, random.random())
        # A wait that reaches the deadline cannot help: the reason for the failure is worth more.
        if delay is None or self.is_late(delay):
            raise AttentionError(error.code(), error.details() or "",
                                 _rejections(trailers.get("attn-rejections"))) from None
        return delay


def deadline_exceeded() -> AttentionError:
    return AttentionError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")


def retry_delay(code, pushback_ms, attempts: int, max_retries: int, jitter: float):
    """Seconds to wait after attempt number `attempts`, or None. A pushback is the least wait;
    without one it doubles from 0.1 to 5 s. jitter, in [0, 1), parts clients that failed
    together."""
    if attempts > max_retries:
        return None
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        if pushback_ms is None:
            return None
    elif code != grpc.StatusCode.UNAVAILABLE:
        return None
    if pushback_ms is not None:
        try:
            ms = int(pushback_ms)
        except ValueError:
            return None
        return None if ms < 0 else min(ms, _MAX_PUSHBACK_MS) / 1000 * (1 + jitter / 10)
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempts - 1, 10)) * (0.5 + jitter / 2)


def _rejections(trailer) -> list:
    pairs = (pair.partition(":") for pair in (trailer or "").split(",") if pair)
    return [(path, reason) for path, _, reason in pairs]


def health_request(service: str) -> bytes:
    """A grpc.health.v1.HealthCheckRequest."""
    name = checks.instance("service", service, str).encode()
    return wire.varint(1 << 3 | 2) + wire.varint(len(name)) + name if name else b""


def is_serving(reply: bytes) -> bool:
    """Reads a grpc.health.v1.HealthCheckResponse."""
    return dict(wire.fields(memoryview(reply), {1: int})).get(1) == 1
