"""The blocking client."""

from __future__ import annotations

import threading
import time

import grpc

from . import checks, errors, schema, transport
from .call import Request, parse, plan_request
from .errors import AttentionError
from .transport import Cancellation, Exchange, Options, Retry, full_name

_SERVER_INFO, _PLAN = full_name("GetServerInfo"), full_name("Plan")
_RECONNECT_S = 0.1


class Client:
    """Calls one attnd. Thread-safe. Options: see transport.Options.

    The constructor asks the server for its limits, and keeps them. Errors: AttentionError
    (UNAVAILABLE or DEADLINE_EXCEEDED: no server answered within connect_timeout), TypeError,
    ValueError, OSError (a PEM file).
    """

    def __init__(self, target: str = transport.DEFAULT_TARGET, **options):
        self._options = Options(target, **options)
        self._channel = transport.channel(grpc, self._options)
        self._methods = {}  # made once: that takes as long as sending
        self._lock = threading.Lock()
        self._closed = False
        self._waiting = set()  # Cancellations of calls between two attempts
        try:
            self.max_unary_bytes = self._connect().limits.max_unary_bytes
        except BaseException:
            self._channel.close()
            raise

    def forward(self, q, k, v, *, timeout: float | None = None, streaming: bool | None = None,
                traceparent: str | None = None, cancellation: Cancellation | None = None,
                **arguments):
        """out and lse: a ForwardResult. Arguments: see the README.

        q: [batch, seqlen_q, num_heads, head_dim]; k: [batch, seqlen_k, num_kv_heads, head_dim]; v:
        as k with head_dim_v. float32, float16 or bfloat16, alike in all three. With cu_seqlens_q
        and cu_seqlens_k: [total tokens, heads, dim]. timeout: seconds, retries included. streaming:
        None chooses by size. Errors: AttentionError; TypeError and ValueError for what cannot be
        sent.
        """
        retry = Retry(self._options, timeout)
        request = Request("Forward", q, k, v, arguments)
        return self._exchange(request, retry, streaming, traceparent, cancellation)

    def backward(self, q, k, v, out, lse, dout, dlse=None, *, timeout: float | None = None,
                 streaming: bool | None = None, traceparent: str | None = None,
                 cancellation: Cancellation | None = None, **arguments):
        """Gradients: a BackwardResult. Arguments as of the forward call, dropout's seed included.

        out, lse: as forward() returned them. dout: like out. dlse: like lse, None: 0.
        """
        retry = Retry(self._options, timeout)
        gradients = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        request = Request("Backward", q, k, v, arguments, gradients)
        return self._exchange(request, retry, streaming, traceparent, cancellation)

    def plan(self, q, k, v, *, timeout: float | None = None,
             cancellation: Cancellation | None = None, **arguments):
        """Which path a call would take and why, and its cost: a schema.PlanResponse.

        q, k, v: arrays, or Spec(shape, dtype). pass_: "forward" or "backward".
        """
        reply = self._simple(_PLAN, plan_request(q, k, v, arguments), timeout, cancellation)
        return parse(schema.PlanResponse, reply)

    def server_info(self, *, timeout: float | None = None,
                    cancellation: Cancellation | None = None):
        """Version, devices, paths and limits: a schema.GetServerInfoResponse."""
        return parse(schema.GetServerInfoResponse,
                     self._simple(_SERVER_INFO, b"", timeout, cancellation))

    def healthy(self, service: str = "", *, timeout: float | None = None,
                cancellation: Cancellation | None = None) -> bool:
        """grpc.health.v1: whether the server is SERVING."""
        return transport.is_serving(self._simple(
            transport.HEALTH_CHECK, transport.health_request(service), timeout, cancellation))

    def close(self):
        """Ends calls that are under way, with CANCELLED."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for cancellation in waiting:
            cancellation.cancel()
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _connect(self):
        """The server's info, as soon as it answers."""
        def no_answer(code, why):
            return AttentionError(code, f"no answer from {self._options.target} within "
                                        f"{self._options.connect_timeout} s: {why}")

        retry = Retry(self._options, self._options.connect_timeout)
        why = "there was no time to ask"
        while True:
            try:
                left = retry.begin()
            except AttentionError as error:
                raise no_answer(error.code, why) from None
            try:
                reply = self._unary(_SERVER_INFO, b"", None, timeout=left)
                return parse(schema.GetServerInfoResponse, reply)
            except grpc.RpcError as error:
                why = error.details()
                if error.code() != grpc.StatusCode.UNAVAILABLE or retry.is_late(_RECONNECT_S):
                    raise no_answer(error.code(), why) from None
            time.sleep(_RECONNECT_S)

    def _simple(self, name, request: bytes, timeout, cancellation) -> bytes:
        """A unary call of few bytes."""
        def attempt(left, _):
            return self._unary(name, request, cancellation, timeout=left)

        return self._with_retries(attempt, Retry(self._options, timeout), cancellation)

    def _exchange(self, request, retry, streaming, traceparent, cancellation):
        exchange = Exchange(self._options, self.max_unary_bytes, request, streaming, traceparent)
        return self.run(exchange, retry, cancellation)

    def run(self, exchange: Exchange, retry: Retry, cancellation):
        """A call that has been prepared; for AsyncClient."""
        def attempt(left, attempts):
            reply = exchange.begin()
            if exchange.streaming:
                self._stream(exchange, reply, cancellation, left)
            else:
                reply.read_unary(self._unary(exchange.method, exchange.message, cancellation,
                                             timeout=left, metadata=exchange.metadata))
            return exchange.result(reply, attempts)

        return self._with_retries(attempt, retry, cancellation)

    def _with_retries(self, attempt, retry: Retry, cancellation):
        """attempt(seconds left, attempts so far) until it succeeds."""
        if cancellation is not None:
            checks.instance("cancellation", cancellation, Cancellation).wait(0)
        while True:
            left = retry.begin()
            if self._closed:
                raise errors.closed()
            try:
                return attempt(left, retry.attempts)
            except grpc.RpcError as error:
                if self._closed:
                    raise errors.closed() from None
                self._wait(retry.delay_after(error), cancellation or Cancellation())
            except ValueError:  # what gRPC says of a closed channel
                if self._closed:
                    raise errors.closed() from None
                raise

    def _wait(self, seconds: float, cancellation: Cancellation):
        """Sleeps, until close() or the caller cancels."""
        with self._lock:
            if self._closed:
                raise errors.closed()
            self._waiting.add(cancellation)
        try:
            cancellation.wait(seconds)
        finally:
            with self._lock:
                self._waiting.discard(cancellation)

    def _unary(self, name, message: bytes, cancellation, **options) -> bytes:
        call = self._methods.get(name)
        if call is None:
            call = self._methods[name] = self._channel.unary_unary(name)
        if cancellation is None:
            return call(message, **options)
        future = call.future(message, **options)
        cancellation.watch(future)
        try:
            return future.result()
        except grpc.FutureCancelledError:
            raise future from None  # an RpcError too, with code CANCELLED
        finally:
            future.cancel()  # nothing, where it has ended

    def _stream(self, exchange, reply, cancellation, left):
        call = self._channel.stream_stream(exchange.method)(
            exchange.messages(), timeout=left, metadata=exchange.metadata)
        if cancellation is not None:
            cancellation.watch(call)
        try:
            for message in call:
                reply.read_stream(message)
        finally:
            call.cancel()  # nothing, where it has ended
